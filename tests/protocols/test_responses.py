"""Responses without a server: items and tools in, the response object and its events out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import (
    Boundary,
    Called,
    Conversation,
    Event,
    Failed,
    Finished,
    Message,
    Reasoning,
    Text,
    Timings,
    Tool,
    ToolCall,
    Tools,
)
from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.protocols.endpoint import Collected, Response
from flare.protocols.responses import Responses
from flare.protocols.responses_fields import INERT, UNBUILT, ResponsesRequest
from tests.support.live_server import make_model

ENDPOINT = Responses()
MODEL = make_model(output=OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")))
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}


def decode(model: Any = MODEL, **body: Any) -> Conversation:
    decoded = ENDPOINT.decode(json.dumps({"input": "hi", **body}).encode(), model)
    (prompt,) = decoded.generation.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def refused(model: Any = MODEL, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(model, **body)
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    return caught.value


def test_text_and_instructions() -> None:
    assert decode().messages == [Message("user", "hi")]
    assert decode(instructions="be brief").messages == [Message("system", "be brief"), Message("user", "hi")]
    assert decode(instructions="").messages == [Message("user", "hi")]


def test_items_become_messages_in_order() -> None:
    """What an assistant thought, said and called between two turns is one message of the template."""
    items = [
        {"role": "developer", "content": "rules"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"p": 1}', "namespace": "fs"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": "go on"},
    ]
    calls = (ToolCall("c1", "read", '{"p": 1}', "fs"), ToolCall("c2", "patch", "***", custom=True))
    assert decode(input=items).messages == [
        Message("developer", "rules"),
        Message("user", "a\n\nb"),
        Message("assistant", "ok", "why", calls),
        Message("tool", "one", call_id="c1"),
        Message("tool", "two", call_id="c2"),
        Message("user", "go on"),
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "opaque"}, "input[0].encrypted_content"),
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": "x", "colour": 1}, "input[0].colour"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}, "input[0].arguments"),
        ({"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}, "input[0].name"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input[0].output[0].type",
        ),
        ({"type": ["message"]}, "input[0].type"),
    ],
)
def test_items_that_cannot_be_taken(item: dict[str, Any], param: str) -> None:
    assert refused(input=[item]).param == param


def test_there_must_be_something_to_answer() -> None:
    assert refused(input=[{"role": "system", "content": "x"}]).param == "input"
    assert refused(input=[]).param == "input"


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_fields_that_are_not_built(name: str) -> None:
    for neutral in (None, *UNBUILT[name]):
        decode(**{name: neutral})
    error = refused(**{name: "something"})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_every_field_is_decided() -> None:
    used = {"input", "instructions", "stream", "max_output_tokens", "stop", "tools", "tool_choice"}
    used |= {"parallel_tool_calls", "reasoning", "text"}
    sampling = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"}
    sampling |= {"frequency_penalty", "seed", "stop_token_ids", "ignore_eos"}
    assert set(ResponsesRequest.__struct_fields__) == used | sampling | set(INERT) | set(UNBUILT)


def test_the_documentation_has_both_tables(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    inert = [f"| `{name}` | {reason} |" for name, reason in INERT.items()]
    unbuilt = [f"| `{name}` | {', '.join(f'`{json.dumps(v)}`' for v in values)} |" for name, values in UNBUILT.items()]
    for heading, lines in (("without an effect", inert), ("that are not served", unbuilt)):
        table = text.split(f"### Response fields {heading}\n")[1].split("|---|---|\n")[1].split("\n\n")[0]
        assert table.splitlines() == lines


def test_forms_of_the_answer() -> None:
    decode(text={"format": {"type": "text"}, "verbosity": "medium"}, include=["reasoning.encrypted_content", "what"])
    assert refused(text={"format": {"type": "json_schema", "name": "x", "schema": {}}}).param == "text.format"
    assert refused(text={"verbosity": "low"}).param == "text.verbosity"
    assert refused(include=["message.output_text.logprobs"]).param == "include"
    assert refused(max_output_tokens=0).param == "max_output_tokens"
    assert refused(max_tokens=5).param == "max_tokens"


def test_efforts_take_the_nearest_level() -> None:
    thinking = decode(reasoning={"effort": "high", "summary": "auto"}).thinking
    assert (thinking.level, thinking.nearest) == ("high", True)
    assert refused(reasoning={"effort": "huge"}).param == "reasoning.effort"


def test_tools_keep_their_names() -> None:
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**READ, "name": "spawn"}]}
    custom = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
    tools = decode(tools=[READ, space, custom], parallel_tool_calls=False).tools
    assert tools == Tools(
        (
            Tool("read", None, {"type": "object"}),
            Tool("spawn", None, {"type": "object"}, "agents"),
            Tool("patch", "d", custom=True),
        ),
        parallel=False,
    )
    named = decode(tools=[READ, space], tool_choice={"type": "function", "name": "agents__spawn"}).tools
    assert (named.choice, named.name, named.namespace) == ("named", "spawn", "agents")
    assert decode(tools=[], tool_choice="none").tools == Tools()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**READ, "strict": True}]}, "tools[0].strict"),
        ({"tools": [READ, READ]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [READ], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [READ], "tool_choice": {"type": "function", "name": "write"}}, "tool_choice.name"),
        ({"tools": [READ], "tool_choice": {"type": "custom", "name": "read"}}, "tool_choice.name"),
        ({"tools": [READ], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ],
)
def test_tools_that_cannot_be_offered(body: dict[str, Any], param: str) -> None:
    assert refused(**body).param == param


def test_a_model_without_tools_refuses_them() -> None:
    plain = make_model()
    assert refused(plain, tools=[READ]).param == "tools"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert refused(plain, input=[call]).param == "input[0]"
    decode(plain, tools=[], tool_choice="auto")


# Answers

texts = st.text(max_size=5)
calls = st.builds(
    ToolCall,
    st.just("call_1"),
    st.just("read"),
    st.just('{"a": 1}'),
    st.sampled_from([None, "ns"]),
    st.booleans(),
)
parts = st.lists(
    st.one_of(
        st.builds(Text, st.just(0), texts, st.just(1), st.just(0)),
        st.builds(Reasoning, st.just(0), texts, st.just(1), st.just(0)),
        st.builds(Called, st.just(0), calls, st.just(1), st.just(0)),
    ),
    max_size=8,
)


def response() -> Response:
    decoded = ENDPOINT.decode(json.dumps({"input": "hi", "stream": True, "tools": [READ]}).encode(), MODEL)
    return Response.begin("resp_", MODEL, decoded, 3)


def ending(cause: Any, text: str, tokens: int) -> Finished:
    return Finished(0, text, 1, cause, None, 3, 1, tokens, Timings(), reasoning_tokens=2)


def frames(data: bytes) -> list[dict[str, Any]]:
    found = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, value = frame.split("\n")
        event = json.loads(value.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def stream(answer: Response, events: list[Event]) -> list[dict[str, Any]]:
    encoder = ENDPOINT.stream(answer)
    found = frames(b"".join(encoder.encode(event) for event in events))
    assert encoder.ended
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@given(parts, st.sampled_from(["stop_token", "stop_sequence", "max_tokens", "context_full"]), texts)
def test_a_stream_ends_in_the_buffered_response(events: list[Any], cause: str, held: str) -> None:
    answer = response()
    whole = [*events, ending(cause, held, len(events))]
    collected = Collected(1)
    for event in whole:
        collected.add(event)
    buffered = json.loads(ENDPOINT.encode(answer, collected))
    found = stream(answer, whole)
    cut = cause in ("max_tokens", "context_full")
    assert found[-1]["type"] == ("response.incomplete" if cut else "response.completed")
    last = found[-1]["response"]
    for value in (buffered, last):
        value["completed_at"] = None
    assert last == buffered
    assert buffered["usage"]["total_tokens"] == 3 + len(events)
    assert (buffered["incomplete_details"] is not None) == cut


@given(parts)
def test_items_open_and_close_in_order(events: list[Any]) -> None:
    """Each item: added, its parts and deltas, done; the deltas are the item's text; no two items overlap."""
    found = stream(response(), [*events, ending("stop_token", "", len(events))])
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    items, current, said = 0, None, ""
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == items
        if kind == "output_item.added":
            assert current is None
            current, said = event["item"]["id"], ""
        elif kind == "output_item.done":
            assert event["item"]["id"] == current
            item = event["item"]
            body = item.get("arguments", item.get("input")) or item["content"][0]["text"]
            assert body == said
            current, items = None, items + 1
        else:
            assert event["item_id"] == current
            said += event.get("delta", "")
    assert current is None and items == len(found[-1]["response"]["output"])


def test_a_failure_is_the_response_s_own() -> None:
    """No member `error` stands at the top: SDKs raise on it before they read the response."""
    error = Failed(RequestError("it broke", status=500, type="server_error"))
    for events in ([error], [Text(0, "par", 1, 0), error]):
        found = stream(response(), list(events))
        assert found[0]["type"] == "response.created" and found[-1]["type"] == "response.failed"
        assert not any("error" in event for event in found)
        failed = found[-1]["response"]
        assert failed["status"] == "failed" and failed["error"] == {"code": "server_error", "message": "it broke"}
    assert failed["output"][0]["status"] == "incomplete" and failed["output"][0]["content"][0]["text"] == "par"


def test_hints_are_no_part_of_this_protocol() -> None:
    assert decode().boundaries == () and Boundary(0, 1).characters == 1
