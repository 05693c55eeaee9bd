"""Bytes to requests: what is refused, and in which words."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Conversation, Message, RawPrompt
from flare.errors import RequestError
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.decoding import decode_body
from flare.protocols.messages import Messages
from flare.protocols.refusals import SHOWN_CHARACTERS
from flare.protocols.responses import Responses
from tests.support.live_server import VOCABULARY, make_model

USER = {"role": "user", "content": "hi"}
CHAT, RAW, MESSAGES, RESPONSES = ChatCompletions(), Completions(), Messages(), Responses()
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
        (b"\xef\xbb\xbf{}", "byte order mark"),
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
    ("text", "says"),
    [
        ("{", "ends before it is complete"),
        ('{"user": "a', "ends before it is complete"),
        ('{"user": "a", }', "a comma before the end of an object"),
        ('{"stop": ["a", ]}', "a comma before the end of an array"),
        ('{"stop": ["a" 1]}', "neither a comma nor the end of an array"),
        ('{"user": "a" 1}', "neither a comma nor the end of an object"),
        ('{"user" 1}', "no colon"),
        ("{'user': 1}", "a name that is no string"),
        ('{"user": "\\q"}', "an unknown escape"),
        ('{"seed": 01}', "a number that is none"),
        ('{"user": tru}', "an unexpected character"),
        ('{"user": "a\nb"}', "an unexpected character"),
        ('{"messages": [{"role": "user", "content": "a"}]} 1', "something behind its end"),
        ('{"user": "\\ud83d"}', "half of a surrogate pair"),
        ('{"user": "\\udcf0"}', "half of a surrogate pair"),
        ('{"user": "\\\\ud83d \\ud83d\\ude00 \\ud83d"}', "half of a surrogate pair"),
        ('{"\\ud83d": 1}', "half of a surrogate pair"),
        ('{"user": "\\ud83d, and much more text"}', "half of a surrogate pair"),
        ('{"user": "\\ud83d\\u0041"}', "half of a surrogate pair"),
        ('{"user": "\\uzzzz"}', "an unknown escape"),
        ('{"metadata": {"a": "\\ud83d x"}}', "half of a surrogate pair"),
        ('{"temperature": NaN}', "NaN or Infinity"),
        ('{"temperature": -Infinity}', "NaN or Infinity"),
        ('{"store": [1,NaN]}', "NaN or Infinity"),
    ],
)
def test_bad_json_is_located(text: str, says: str) -> None:
    """Line and column where Python's own parser stops too, give or take what either has read of the fault."""
    body = f'{{"model": "é",\n  {text[1:]}'
    message = str(refusal(CHAT.decode, body.encode(), MODEL))
    assert message.startswith("the body is not valid JSON: ") and says in message
    ((line, column, byte),) = re.findall(r"near line (\d+), column (\d+) \(byte (\d+)\)$", message)
    assert len(body.encode()[: int(byte)].decode().split("\n")) == int(line)
    assert len(body.encode()[: int(byte)].decode().split("\n")[-1]) + 1 == int(column)
    try:
        json.loads(body, parse_constant=lambda name: pytest.fail(name) if name not in body else None)
    except json.JSONDecodeError as error:
        assert abs(error.pos - len(body.encode()[: int(byte)].decode())) <= len("null"), error
    else:
        assert "surrogate" in says or "NaN" in says, "Python takes only these"
        begin = body.rindex("\\ud") if "surrogate" in says else body.index("NaN" if "NaN" in body else "-Infinity")
        assert abs(begin - len(body.encode()[: int(byte)].decode())) <= len(r"\ud83d\u0041")


FAULTLESS = (
    '{"model": "a\\u00e9\\ud83d\\ude00\\n", "n": 1, "store": [false, {"a": -1.5e3}], '
    '"messages": [{"role": "user", "content": "é"}]}'
)


@given(st.integers(0, len(FAULTLESS) - 1), st.sampled_from([*'{}[]",:\\eu0dD-+.\n x', ""]))
def test_every_fault_of_json_has_its_words(place: int, put: str) -> None:
    try:
        CHAT.decode((FAULTLESS[:place] + put + FAULTLESS[place + 1 :]).encode(), MODEL)
    except RequestError as error:
        assert "something unexpected" not in str(error)


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b'{"user":"a\xff"}', b'{"a\xff":1}', b'{"user":"\xc3', '{"user": "é"}'.encode("utf-16")]
)
def test_what_is_not_utf8_is_told_apart(body: bytes) -> None:
    message = str(refusal(CHAT.decode, body, MODEL))
    with pytest.raises(UnicodeDecodeError) as caught:
        body.decode()
    assert "not UTF-8" in message and f"(byte {caught.value.start})" in message


@pytest.mark.parametrize(
    ("endpoint", "body", "name", "routes"),
    [
        (RAW, {"messages": [USER]}, "messages", "/v1/chat/completions or /v1/messages"),
        (RAW, {"system": "a", "max_tokens": 1, "messages": [USER]}, "messages", "/v1/chat/completions or /v1/messages"),
        (RAW, {"input": "a"}, "input", "/v1/responses"),
        (CHAT, {"prompt": "a", "best_of": 1}, "prompt", "/v1/completions"),
        (CHAT, {"input": [USER]}, "input", "/v1/responses"),
        (MESSAGES, {"prompt": "a"}, "prompt", "/v1/completions"),
        (MESSAGES, {"input": "a"}, "input", "/v1/responses"),
        (RESPONSES, {"messages": [USER]}, "messages", "/v1/chat/completions or /v1/messages"),
        (RESPONSES, {"prompt": "a"}, "prompt", "/v1/completions"),
    ],
)
def test_a_body_on_the_wrong_route_is_shown_its_way(
    endpoint: Any, body: dict[str, Any], name: str, routes: str
) -> None:
    error = refusal(endpoint.decode, json.dumps({"model": "m", **body}).encode(), MODEL)
    assert error.param == name and str(error).endswith(f"send such a body to {routes}")


def test_a_body_with_a_prompt_of_its_own_is_at_home() -> None:
    assert str(refusal(chat, prompt="a")) == "prompt: unknown field; leave it out"
    stored = refusal(RESPONSES.decode, b'{"prompt": {"id": "stored"}}', MODEL)
    assert str(stored) == "input: this field is required"


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temprature": 1}, "temperature"),
        ({"max_output_tokens": 1}, "max_tokens"),
        ({"num_predict": 1}, "max_tokens"),
        ({"stop_sequences": ["a"]}, "stop"),
        ({"repeat_penalty": 1}, "repetition_penalty"),
        ({"messages": [{"role": "user", "contents": "a"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "text"),
        ({"stream_options": {"include_usages": True}}, "include_usage"),
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "enable_thinking"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameter": {}}}]}, "parameters"),
    ],
)
def test_a_slip_of_a_name_is_shown_the_right_one(fields: dict[str, Any], meant: str) -> None:
    assert str(refusal(chat, **fields)).endswith(f"did you mean {meant!r}?")


def test_long_and_foreign_names_are_compared_with_none() -> None:
    for name in ("x" * 1_000_000, "temperature" * 100, "colour", "système"):
        assert str(refusal(chat, **{name: 1})).endswith("leave it out")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "0.5", "expected a number, got a string"),
        ("temperature", True, "expected a number, got true or false"),
        ("top_k", 1.5, "expected an integer, got a number, 1.5"),
        ("top_k", 1.0, "expected an integer, got a number, 1.0"),
        ("top_k", True, "expected an integer, got true or false"),
        ("top_k", 2**63, "expected an integer <= 9223372036854775807, got 9223372036854775808"),
        ("seed", -1, "expected an integer >= 0, got -1"),
        ("seed", 2**64, "<= 9223372036854775807, got 18446744073709551616"),
        ("seed", 10**400, "<= 9223372036854775807, got a huge number"),
        ("max_tokens", -1, "expected an integer >= 1, got -1"),
        ("max_tokens", 0, "expected an integer >= 1, got 0"),
        ("max_completion_tokens", 0, "expected an integer >= 1, got 0"),
        ("max_tokens", "5", "expected an integer, got a string"),
        ("n", 0, "expected an integer >= 1, got 0"),
        ("stream", 1, "expected true or false, got an integer, 1"),
        ("stop", 5, "expected a string or an array, got an integer"),
        ("stop", [""], "must not be empty"),
        ("stop", list("abcde"), "5 strings"),
        ("stop", ["x" * 4097], "4097 bytes"),
        ("stop", ["é" * 2049], "4098 bytes"),
        ("stop_token_ids", [VOCABULARY], "outside the vocabulary"),
        ("stop_token_ids", list(range(17)), "17 ids"),
        ("stop_token_sequences", [[1, 2]] * 17, "17 sequences, the limit is 16 in all"),
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


def test_a_wrong_number_within_a_list_is_shown() -> None:
    inside = "stop_token_ids[1]: expected an integer >= 0, got -2"
    for endpoint, prompt in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "x"})):
        error = refusal(endpoint.decode, json.dumps({**prompt, "stop_token_ids": [1, -2]}).encode(), MODEL)
        assert str(error) == inside


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


def test_sequences_of_stop_tokens() -> None:
    longest = list(range(64))
    found = chat(stop_token_ids=[3], stop_token_sequences=[[1, 2], [5], longest, *[[7, 7]] * 12]).generation
    assert found.stop_token_ids == {3, 5}
    assert found.stop_token_sequences == ((1, 2), tuple(longest), *[(7, 7)] * 12)
    assert chat(stop="x", stop_token_sequences=[]).generation.stop_token_sequences == ()
    for decode in (chat, raw):
        for fields, param, said in (
            ({"stop_token_sequences": [1]}, "stop_token_sequences[0]", "expected an array, got an integer"),
            ({"stop_token_sequences": [[1], []]}, "stop_token_sequences[1]", "0 ids, a sequence has 1 to 64"),
            ({"stop_token_sequences": [[1] * 65]}, "stop_token_sequences[0]", "65 ids, a sequence has 1 to 64"),
            ({"stop_token_sequences": [[1, VOCABULARY]]}, "stop_token_sequences[0]", "outside the vocabulary"),
            ({"stop_token_sequences": [[1, 2]], "stop": ["x"]}, "stop_token_sequences", "be combined with stop"),
            (
                {"stop_token_sequences": [[1]] * 9, "stop_token_ids": [2] * 8},
                "stop_token_sequences",
                "9 sequences beside 8 stop_token_ids, the limit is 16 in all",
            ),
        ):
            error = refusal(decode, **fields)
            assert error.param == param and said in str(error), fields


def test_best_of_must_equal_n() -> None:
    assert raw(n=3, best_of=3).generation.n == 3
    assert raw(best_of=1).generation.n == 1
    for fields in ({"best_of": 2}, {"n": 2, "best_of": 1}, {"best_of": True}):
        assert refusal(raw, **fields).param == "best_of"


def test_without_a_template_there_is_no_chat() -> None:
    error = refusal(CHAT.decode, json.dumps({"messages": [USER]}).encode(), make_model(has_template=False))
    assert error.param == "messages" and "/v1/completions" in str(error)


@pytest.mark.parametrize("endpoint", [CHAT, RAW, MESSAGES, RESPONSES])
def test_a_model_may_be_named_or_not(endpoint: Any) -> None:
    """The loaded one answers anyway; only what is no name is refused."""
    prompt = {CHAT: "messages", RAW: "prompt", MESSAGES: "messages", RESPONSES: "input"}[endpoint]
    body = {prompt: [USER] if prompt == "messages" else "hi", "max_tokens": 1}
    if endpoint is RESPONSES:
        del body["max_tokens"]
    for named in ({}, {"model": None}, {"model": ""}, {"model": "another/model"}):
        endpoint.decode(json.dumps(body | named).encode(), MODEL)
    for wrong in (5, [], {"id": "a"}):
        assert refusal(endpoint.decode, json.dumps(body | {"model": wrong}).encode(), MODEL).param == "model"


@pytest.mark.parametrize("number", ["1e400", "-1e999", "9" * 5000])
@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"a": %s}', "a"),
        ('{"a": [1, {"b c": [[2.5, %s]]}]}', "a[1].b c[0][1]"),
        ('{"a": true, "b": {"é": {"x": null, "y": %s}}, "c": 1e400}', "b.é.y"),
        ("[[], [%s]]", "[1][0]"),
    ],
)
def test_a_number_out_of_range_is_named_among_open_objects(body: str, path: str, number: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(msgspec.json.Decoder(Any), (body % number).encode())
    assert (str(caught.value), caught.value.param) == (f"{path}: the number is out of range", path)
