"""Responses through OpenAI's own SDK, strictly validated, against a server process: whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, OpenAI

from tests.server.process import Process, scripted
from tests.support.live_server import EOS
from tests.support.scripted_server import FAILURE


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


PATCH = '+ a "b"\n\n- \\c\u2028😊'
REPLIES: dict[str, str | None] = {
    "think": "<think>Hm.</think>Fine, Zürich 😊.",
    "all": f"<think>Look first.</think>I look.\n{call('read', path='a.py')}\n{call('fs__read', path='b')}",
    "patch": call("patch", input=PATCH),
    "no input": call("patch", path="x"),
    "undeclared": f"{call('remove', p=3)}\n{call('read', path='a.py')}",
    "prose": "I would rather talk.",
    "cut": f"{call('read', path='a.py')}\n{call('read', path='b.py')[:-20]}",
    "use read": call("read", input="x"),
    "use fs__read": call("fs__read", input="x"),
    "use none": "No.",
    "broken": None,
}
READ: dict[str, Any] = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
SPACE = {"type": "namespace", "name": "fs", "description": "Files.", "tools": [READ]}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "text"}}
TOOLS: Any = [READ, SPACE, CUSTOM]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with scripted(tmp_path_factory.mktemp("responses"), REPLIES, plain="It says one.", context=2048) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True) as made:
        yield made


def both(client: OpenAI, **fields: Any) -> Any:
    """The answer, asked for whole and streamed, which must be the same but for ids and times."""
    whole = client.responses.create(model="m", **fields)
    events = list(client.responses.create(model="m", stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert plain(last.response) == plain(whole)
    return whole


def size(words: str) -> int:
    """How many tokens a reply has, without the end token."""
    return len((REPLIES[words] or "").encode())


def plain(answer: Any) -> dict[str, Any]:
    times = {"id", "created_at", "completed_at", "timings"}
    value: dict[str, Any] = answer.model_dump(exclude=times)
    for item in value["output"]:
        item["id"] = item["id"].split("_")[0] + item["id"][-2:]
        if "call_id" in item:
            item["call_id"] = item["call_id"].split("_")[-1]
    return value


def test_text_and_usage(client: OpenAI) -> None:
    answer = both(client, input="think", instructions="be brief", metadata={"a": "b"})
    assert answer.output_text == "Fine, Zürich 😊." and answer.status == "completed"
    assert answer.metadata == {"a": "b"} and answer.model == "org/tiny"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm." and answer.output[0].summary == []
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == size("think") + 1 and usage.output_tokens_details.reasoning_tokens == 3
    assert answer.stop_reason == "stop_token" and answer.flare_context["tokens_used"] == usage.total_tokens


def test_a_conversation_with_tools(client: OpenAI) -> None:
    """The client sends back the objects that it got, and the results of the calls."""
    history: list[Any] = [{"role": "user", "content": "all"}]
    first = both(client, input=history, tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(item.name, item.namespace) for item in first.output[2:]] == [("read", None), ("read", "fs")]
    assert [json.loads(item.arguments) for item in first.output[2:]] == [{"path": "a.py"}, {"path": "b"}]
    assert first.output_text.strip() == "I look."
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "one"}
        for item in reversed(first.output[2:])
    ]
    for items in (first.output, [item.model_dump() for item in first.output]):
        second = client.responses.create(model="m", input=[*history, *items, *outputs], tools=TOOLS)
        assert second.output_text == "It says one."


def test_the_sdks_own_stream_helper(client: OpenAI) -> None:
    """It puts the response together from the events, and its parsed items can be sent back."""
    fields: Any = {"model": "m", "input": [{"role": "user", "content": "all"}], "tools": TOOLS}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        answer: Any = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 4
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in answer.output[2:]]
    fields["input"] += [*answer.output, *results]
    assert client.responses.create(**fields).output_text == "It says one."


def test_a_custom_tool_gets_its_text_back(client: OpenAI) -> None:
    """Byte for byte, and never as a call of a function."""
    answer = both(client, input="patch", tools=TOOLS)
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", PATCH)
    result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    again = client.responses.create(model="m", input=[{"role": "user", "content": "patch"}, item, result], tools=TOOLS)
    assert again.output_text == "It says one."


def test_calls_of_undeclared_tools_are_passed_on(client: OpenAI) -> None:
    answer = both(client, input="undeclared", tools=TOOLS)
    assert [(item.type, item.name) for item in answer.output] == [
        ("function_call", "remove"),
        ("function_call", "read"),
    ]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "fs__read"}, ["fs__read"]),
        ({"type": "function", "name": "read", "namespace": "fs"}, ["fs__read"]),
        ({"type": "function", "name": "read"}, ["read"]),
        ({"type": "custom", "name": "patch"}, ["patch"]),
        ("auto", ["read", "fs__read", "patch"]),
        ("none", []),
    ],
)
def test_what_the_model_sees_of_the_tools(client: OpenAI, server: Process, choice: Any, names: list[str]) -> None:
    words = f"use {names[0]}" if names and names[0] != "patch" else "patch" if names else "use none"
    client.responses.create(model="m", input=words, tools=TOOLS, tool_choice=choice)
    shown = server.prompts()[-1].partition("tools\n")[2].partition("\0")[0]
    assert [tool["function"]["name"] for tool in json.loads(shown or "[]")] == names


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("prose", {"tool_choice": "required"}),
        ("prose", {"tool_choice": {"type": "function", "name": "read"}}),
        ("undeclared", {"tool_choice": {"type": "function", "name": "fs__read"}}),
        ("all", {"parallel_tool_calls": False}),
        ("no input", {}),
    ],
)
def test_what_the_request_did_not_allow_fails(client: OpenAI, words: str, fields: dict[str, Any]) -> None:
    """Whole: an error. Streamed: the last event, no success behind it, and no call that must not be made."""
    asked: Any = {"model": "m", "input": words, "tools": TOOLS, **fields}
    with pytest.raises(InternalServerError) as caught:
        client.responses.create(**asked)
    assert caught.value.code == "invalid_output" and caught.value.response.headers["x-request-id"].startswith("resp_")
    assert caught.value.response.headers["x-should-retry"] == "false"  # else the SDK asks three times
    *before, last = list(client.responses.create(stream=True, **asked))
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    assert not any(event.type in ("response.completed", "response.incomplete") for event in before)
    assert sum(event.type == "response.output_item.done" and "call" in event.item.type for event in before) <= 1


def test_a_selected_tool_is_called_and_nothing_is_said(client: OpenAI) -> None:
    answer = both(client, input="patch", tools=TOOLS, tool_choice={"type": "custom", "name": "patch"})
    assert [item.type for item in answer.output] == ["custom_tool_call"]


def test_a_limit_makes_it_incomplete(client: OpenAI) -> None:
    answer = both(client, input="think", max_output_tokens=14)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 14 and answer.stop_reason == "max_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]


def test_a_limit_within_a_call(client: OpenAI) -> None:
    """The calls before it stand, the cut one is left out, and the limit is the reason."""
    limit = size("cut")
    answer = both(client, input="cut", tools=TOOLS, max_output_tokens=limit)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert [json.loads(item.arguments) for item in answer.output] == [{"path": "a.py"}]


def test_a_stop_string_completes_the_answer(client: OpenAI) -> None:
    answer = both(client, input="think", extra_body={"stop": [" Zür"], "top_k": 5, "seed": 3})
    assert answer.output_text == "Fine," and (answer.status, answer.stop_reason) == ("completed", "stop_sequence")
    stopped = client.responses.create(model="m", input="think", extra_body={"stop_token_ids": [ord("F")]})
    assert stopped.status == "completed" and stopped.output_text == "" and EOS != ord("F")


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="m", input="x" * 3000)
    assert (caught.value.param, caught.value.code) == ("input", "context_full")


def test_what_is_kept_nowhere_is_refused(client: OpenAI) -> None:
    for field, value in (("store", True), ("previous_response_id", "resp_1"), ("background", True)):
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="m", input="think", **{field: value})  # type: ignore[call-overload]
        assert caught.value.param == field


def test_a_failure_of_the_model_says_nothing_of_its_cause(client: OpenAI) -> None:
    with pytest.raises(InternalServerError) as failed:
        client.responses.create(model="m", input="broken")
    assert failed.value.type == "server_error" and FAILURE not in str(failed.value.body)
    *_, last = list(client.responses.create(model="m", input="broken", stream=True))
    assert last.type == "response.failed" and last.response.error and FAILURE not in last.response.error.message
