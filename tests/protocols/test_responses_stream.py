"""Answers of Responses without a server: the response object, and the events that lead to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from flare.conversation import Called, Event, Failed, Finished, Reasoning, Text, Timings, ToolCall
from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.protocols.endpoint import Collected, Response
from flare.protocols.responses import Responses
from tests.support.live_server import make_model

ENDPOINT = Responses()
MODEL = make_model(output=OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")))
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

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
    return Response.begin(ENDPOINT, MODEL, decoded, [[1, 2, 3]])


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


LIFE = {
    "message": ("output_text", "content"),
    "reasoning": ("reasoning_text", "content"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def check_item(events: list[dict[str, Any]], index: int) -> Any:
    """One item from its beginning to its end: the events in order, one id, text that adds up. Returns it as it ended."""
    first, *inner, last = events
    begun, item = first["item"], last["item"]
    text, body = LIFE[begun["type"]]
    parted = body == "content"
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in inner if "delta" in event]
    assert kinds == [
        "output_item.added",
        *["content_part.added"] * parted,
        *[f"{text}.delta"] * len(deltas),
        f"{text}.done",
        *["content_part.done"] * parted,
        "output_item.done",
    ]
    assert deltas and {event["output_index"] for event in events} == {index}
    assert {event["item_id"] for event in inner} == {begun["id"]} == {item["id"]}
    assert begun["status"] == "in_progress" and not begun[body]
    said = "".join(deltas)
    done = next(event for event in inner if event["type"].endswith(f"{text}.done"))
    if parted:
        assert all(event["content_index"] == 0 for event in inner)
        assert item["content"] == [inner[-1]["part"]] and inner[0]["part"]["text"] == ""
        assert said == done["text"] == item["content"][0]["text"]
    else:
        assert len(deltas) == 1 and said == done[body] == item[body]
        assert (begun["call_id"], begun["name"]) == (item["call_id"], item["name"])
        # Some of the SDK's versions require it of functions, others do not know it.
        assert done.get("name") == (item["name"] if body == "arguments" else None)
    return item


@given(parts, st.sampled_from(["stop_token", "max_tokens", None]))
def test_items_begin_and_end_in_order(events: list[Any], cause: Any) -> None:
    """No two items overlap, and the items of the last response are those that were streamed. None: the answer fails."""
    broken = Failed(RequestError("it broke", status=500, type="server_error"))
    found = stream(response(), [*events, ending(cause, "", len(events)) if cause else broken])
    for event in found:
        EVENTS.validate_python(event)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert not any(event.get("error") for event in found), "SDKs raise on it before they read the response"
    middle = found[2:-1]
    items: list[Any] = []
    while middle:
        end = [event["type"] for event in middle].index("response.output_item.done") + 1
        items.append(check_item(middle[:end], len(items)))
        middle = middle[end:]
    assert items == found[-1]["response"]["output"]
    assert len({item["id"] for item in items}) == len(items)
    assert {event["response"]["id"] for event in found if "response" in event} == {found[0]["response"]["id"]}


@given(st.lists(st.tuples(st.booleans(), texts), max_size=6), st.integers(1, 4))
def test_how_the_text_is_cut_changes_no_item(pieces: list[tuple[bool, str]], size: int) -> None:
    """Tokens as they come, or every few characters: the same items."""

    def streamed(cut: int | None) -> Any:
        events: list[Event] = []
        for reasoned, text in pieces:
            kind = Reasoning if reasoned else Text
            for at in range(0, len(text), cut or len(text) or 1):
                events.append(kind(0, text[at : at + (cut or len(text))], 1, 0))
        last = stream(answer, [*events, ending("stop_token", "", 5)])[-1]["response"]
        return last["output"]

    answer = response()
    assert streamed(size) == streamed(None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("it broke", status=500, type="server_error"), "server_error"),
        (RequestError("no call", status=500, type="server_error", code="invalid_output"), "server_error"),
        (RequestError("stopping", status=503, type="server_error"), "server_error"),
        (RequestError("too many", status=429, type="rate_limit_error"), "rate_limit_exceeded"),
    ],
)
def test_a_failure_has_a_code_of_the_protocol(error: RequestError, code: str) -> None:
    """Codex tries again after `server_error`; SDKs take no other codes than the protocol's."""
    for before in ([], [Text(0, "par", 1, 0)]):
        failed = stream(response(), [*before, Failed(error)])[-1]["response"]
        SdkResponse.model_validate(failed, strict=True)
        assert failed["error"] == {"code": code, "message": str(error)} and failed["status"] == "failed"
        assert [item["status"] for item in failed["output"]] == ["incomplete"] * len(before)


def test_an_answer_that_a_limit_cut_has_a_last_item_that_is_incomplete() -> None:
    call = Called(0, ToolCall("c", "read", "{}"), 1, 0)
    text, thought = Text(0, "a", 1, 0), Reasoning(0, "r", 1, 0)
    for events, statuses in (
        ([thought, text], ["completed", "incomplete"]),
        ([thought], ["incomplete"]),
        ([text, call], ["completed", "completed"]),
    ):
        last = stream(response(), [*events, ending("context_full", "", 3)])[-1]["response"]
        assert [item["status"] for item in last["output"]] == statuses
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (last["stop_reason"], last["completed_at"]) == ("context_full", None)


def test_the_request_is_shown_in_the_response() -> None:
    space = {"type": "namespace", "name": "fs", "description": "d", "tools": [READ]}
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    body = {
        "input": "hi",
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "tools": [READ, space, custom],
        "tool_choice": {"type": "custom", "name": "patch"},
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "temperature": 0.5,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    decoded = ENDPOINT.decode(json.dumps(body).encode(), MODEL)
    collected = Collected(1)
    collected.add(ending("stop_token", "ok", 1))
    shown = json.loads(ENDPOINT.encode(Response.begin(ENDPOINT, MODEL, decoded, [[1, 2, 3]]), collected))
    SdkResponse.model_validate(shown, strict=True)
    assert "hi" not in json.dumps(decoded.details), "what is not shown is not kept"
    same = body.keys() - {"input", "tools"}
    assert {name: shown[name] for name in same} == {name: body[name] for name in same}
    assert shown["tools"] == [{**READ, "description": None, "strict": False}, space, custom]
    assert (shown["store"], shown["background"], shown["truncation"]) == (False, False, "disabled")
    details = {"cached_tokens": 1, "cache_write_tokens": 0}
    assert shown["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": details,
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 4,
    }
