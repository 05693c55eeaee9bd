"""Bytes to requests: what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.conversation import Conversation, Message, RawPrompt
from flare.errors import RequestError
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.refusals import SHOWN_CHARACTERS
from tests.support.live_server import VOCABULARY, make_model

USER = {"role": "user", "content": "hi"}
CHAT, RAW = ChatCompletions(), Completions()
MODEL = make_model()


def chat(**fields: Any) -> Any:
    return CHAT.decode(json.dumps({"messages": [USER], **fields}).encode(), MODEL)


def raw(**fields: Any) -> Any:
    return RAW.decode(json.dumps({"prompt": "hi", **fields}).encode(), MODEL)


def refusal(decode: Any, *arguments: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(*arguments, **fields)
    error = caught.value
    assert error.status == 400 and error.type == "invalid_request_error"
    assert "\n" not in str(error) and len(str(error)) < 300
    assert "msgspec" not in str(error) and "`" not in str(error) and "$" not in str(error)
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not valid JSON"),
        (b'{"messages": [}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}]} 1', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"\\ud83d"}]}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"\\udcf0"}]}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}],"\\ud83d":1}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}],"stop":"\\ude00"}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}],"metadata":{"a":"\\ud83d x"}}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":-Infinity}', "not valid JSON"),
        (b"[]", "expected an object, got an array"),
        (b"null", "expected an object, got null"),
        (b'"text"', "expected an object, got a string"),
        (b'{"messages":[{"role":"user","content":"a"}],"metadata":' + b"[" * 9000 + b"]" * 9000 + b"}", ""),
        (b'{"messages":[{"role":"user","content":"a"}],"store":' + b"[" * 100000 + b"]" * 100000 + b"}", "too deeply"),
    ],
)
def test_what_is_not_a_request(body: bytes, says: str) -> None:
    assert says in str(refusal(CHAT.decode, body, MODEL))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "0.5", "expected a number, got a string"),
        ("temperature", True, "expected a number, got true or false"),
        ("top_k", 1.5, "expected an integer, got a number"),
        ("top_k", 1.0, "expected an integer, got a number"),
        ("top_k", True, "expected an integer, got true or false"),
        ("top_k", 2**31, "<= 2147483647"),
        ("seed", -1, ">= 0"),
        ("seed", 2**64, "<="),
        ("seed", 10**400, "<="),
        ("max_tokens", -1, ">= 0"),
        ("max_tokens", 0, "least value, 1"),
        ("max_completion_tokens", 0, "least value, 1"),
        ("max_tokens", "5", "expected an integer, got a string"),
        ("n", 0, ">= 1"),
        ("stream", 1, "expected true or false, got an integer"),
        ("stop", 5, "expected a string or an array, got an integer"),
        ("stop", [""], "must not be empty"),
        ("stop", list("abcde"), "5 strings"),
        ("stop", ["x" * 4097], "4097 bytes"),
        ("stop", ["é" * 2049], "4098 bytes"),
        ("stop_token_ids", [VOCABULARY], "outside the vocabulary"),
        ("stop_token_ids", list(range(17)), "17 ids"),
        ("ignore_eos", 0, "expected true or false, got an integer"),
        ("messages", [], "length >= 1"),
        ("messages", None, "expected an array, got null"),
        ("messages", "hi", "expected an array, got a string"),
        ("user", 5, "expected a string, got an integer"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any, says: str) -> None:
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert str(error).startswith(f"{field}: ") and says in str(error)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, 5], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "messages[0].content[0].x"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ],
)
def test_a_wrong_message_is_named_by_its_path(messages: list[Any], param: str) -> None:
    error = refusal(chat, messages=messages)
    assert error.param == param and param in str(error)


@pytest.mark.parametrize("name", ["colour", "Temperature", "a`b", "x\ny", "- at `$.seed", "", "x" * 500, "ключ"])
def test_an_unknown_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{name: 1})
    error = caught.value
    assert error.code == "unknown_parameter" or "seed" in name
    assert "\n" not in str(error) and len(str(error)) < 2 * SHOWN_CHARACTERS + 50
    if name.isalpha() and len(name) < SHOWN_CHARACTERS:
        assert error.param == name


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, VOCABULARY], "prompt[1]"),
        ([1, 4294967295], "prompt[1]"),
        ([1, 10**300], "prompt[1]"),
        ([True, 1], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, VOCABULARY]], "prompt[0][1]"),
        ([[[1]]], "prompt[0][0]"),
        (5, "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, param: str) -> None:
    assert refusal(raw, prompt=prompt).param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, VOCABULARY - 1], [[1, VOCABULARY - 1]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert raw(prompt=prompt).generation.prompts == [RawPrompt(content) for content in prompts]


def test_limits_and_their_names() -> None:
    """max_tokens goes before max_completion_tokens; Completions also takes 0; null is "not sent"."""
    assert chat().generation.max_tokens is None
    assert chat(max_tokens=None, max_completion_tokens=7).generation.max_tokens == 7
    both = chat(max_tokens=5, max_completion_tokens=7).generation
    assert (both.max_tokens, both.max_tokens_field) == (5, "max_tokens")
    assert chat(max_completion_tokens=7).generation.max_tokens_field == "max_completion_tokens"
    assert raw(max_tokens=0).generation.max_tokens == 0


def test_the_last_of_two_equal_names_counts() -> None:
    body = b'{"messages":[{"role":"user","content":"a"}],"temperature":0.2,"temperature":0.9}'
    assert CHAT.decode(body, MODEL).generation.sampling.temperature == 0.9


def test_text_parts_are_joined_with_blank_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    (prompt,) = chat(messages=[{"role": "user", "content": parts, "name": "x"}]).generation.prompts
    assert prompt == Conversation([Message("user", "a\n\nb")])


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    """The message of a response, with all the fields that SDKs add, is a message of the next request."""
    message = {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "why not",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
    }
    (prompt,) = chat(messages=[USER, message, USER]).generation.prompts
    assert prompt.messages[1] == Message("assistant", "yes", "why not")


def test_stop_strings_and_stop_tokens_exclude_each_other() -> None:
    assert refusal(chat, stop="x", stop_token_ids=[1]).param == "stop_token_ids"
    assert chat(stop=["x" * 4096]).generation.stop == ("x" * 4096,)
    assert chat(stop=[], stop_token_ids=[3, 3]).generation.stop_token_ids == {3}


def test_best_of_must_equal_n() -> None:
    assert raw(n=3, best_of=3).generation.n == 3
    assert raw(best_of=1).generation.n == 1
    for fields in ({"best_of": 2}, {"n": 2, "best_of": 1}, {"best_of": True}):
        assert refusal(raw, **fields).param == "best_of"


def test_without_a_template_there_is_no_chat() -> None:
    error = refusal(CHAT.decode, json.dumps({"messages": [USER]}).encode(), make_model(has_template=False))
    assert error.param == "messages" and "/v1/completions" in str(error)
