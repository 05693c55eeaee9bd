"""Events to messages and streams: the exact order of the protocol, and a stream that adds up to the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Called, Failed, Finished, Reasoning, Text, Timings, ToolCall
from flare.errors import RequestError
from flare.protocols.endpoint import Collected, Response
from flare.protocols.messages import CLIENT_MARGIN, Messages
from flare.protocols.messages_encoding import message_error
from flare.protocols.messages_thinking import MARKER, Marker
from tests.support.live_server import make_model

TIMES = Timings(queued=0.001, prompt=0.02, first_token=0.03, predicted=0.5)
BODY = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


def response(name: str = "m", id: str = "msg_1") -> Response:
    served = make_model(id=name)
    decoded = Messages().decode(json.dumps(BODY).encode(), served)
    return Response(id=id, created=7, model=served, decoded=decoded, prompts=[[1, 2, 3, 4]])


def end(text: str = "", **changes: Any) -> Finished:
    values: dict[str, Any] = {
        "choice": 0,
        "text": text,
        "tokens": 1,
        "cause": "stop_token",
        "stop": None,
        "prompt_tokens": 4,
        "cached_tokens": 1,
        "completion_tokens": 8,
        "timings": TIMES,
        "reasoning_tokens": 2,
    }
    return Finished(**(values | changes))


def said(text: str) -> Text:
    return Text(0, text, 1, 1)


def thought(text: str) -> Reasoning:
    return Reasoning(0, text, 1, 1)


def called(id: str = "call_1", name: str = "f", arguments: str = "{}") -> Called:
    return Called(0, ToolCall(id, name, arguments), 1, 1)


def stream(happened: list[Any], served: Response | None = None) -> list[dict[str, Any]]:
    """The events of a stream; every frame is an `event:` line with the type of the data, and the data on one line."""
    encoder = Messages().stream(served or response())
    data = b""
    for event in happened:
        assert not encoder.ended
        data += encoder.encode(event)
    assert encoder.ended and data.endswith(b"\n\n")
    found = []
    for frame in data[:-2].split(b"\n\n"):
        name, value = frame.split(b"\n")
        assert name.startswith(b"event: ") and value.startswith(b"data: ")
        found.append(json.loads(value[6:]))
        assert found[-1]["type"] == name[7:].decode()
    return found


def whole(happened: list[Any], served: Response | None = None) -> dict[str, Any]:
    collected = Collected(1)
    assert [collected.add(event) for event in happened] == [False] * (len(happened) - 1) + [True]
    return json.loads(Messages().encode(served or response(), collected))


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream; asserts the protocol's order on the way."""
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert events[0]["type"] == "message_start" and message["content"] == []
    blocks: list[dict[str, Any]] = message["content"]
    partial = ""
    is_open = False
    for event in events[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            block = event["content_block"]
            assert block.get("text", "") == block.get("thinking", "") == block.get("signature", "") == ""
            blocks.append(block)
            partial, is_open = "", True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = json.loads(partial)
            continue
        assert kind == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            partial += delta["partial_json"]
        else:
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
            blocks[-1][field] += delta[field]
    assert not is_open
    delta = events[-2]
    usage = message["usage"] | delta["usage"]
    return message | delta["delta"] | {"usage": usage} | {k: delta[k] for k in ("flare_context", "timings")}


PIECES = st.one_of(
    st.builds(said, st.text(max_size=5)),
    st.builds(thought, st.text(max_size=5)),
    st.builds(
        called, st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5), st.sampled_from(['{"a":1.50}', "{}"])
    ),
)


@given(st.lists(PIECES, max_size=12), st.text(max_size=4), st.text(min_size=1, max_size=8))
def test_a_stream_adds_up_to_the_whole_answer(pieces: list[Any], last: str, name: str) -> None:
    happened = [*pieces, end(last, called=any(isinstance(piece, Called) for piece in pieces))]
    served = response(name)
    assert added_up(stream(happened, served)) == whole(happened, served)


def test_the_events_of_thinking_text_and_a_call() -> None:
    happened = [
        thought(""),
        thought("pl"),
        thought("an"),
        said(""),
        said("do"),
        said("ne"),
        called("c", "f", '{"a":1}'),
        end(called=True),
    ]
    events = stream(happened)
    assert [(e["type"], e.get("delta", {}).get("type")) for e in events] == [
        ("message_start", None),
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert [e["index"] for e in events if "index" in e] == [0] * 5 + [1] * 4 + [2] * 3
    assert events[0]["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": USAGE
        | {
            "input_tokens": 4,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    signature = events[4]["delta"]["signature"]
    assert signature == str(Marker("plan")) and signature.startswith(MARKER)
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None, "container": None},
        "usage": USAGE,
        "flare_context": {"tokens_used": 12, "context_length": 512, "tokens_remaining": 500},
        "timings": events[-2]["timings"],
    }
    assert events[-2]["timings"]["prompt_n"] == 3 and events[-1] == {"type": "message_stop"}


USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 1,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "inference_geo": None,
    "server_tool_use": None,
    "service_tier": "standard",
    "output_tokens": 8,
    "output_tokens_details": {"thinking_tokens": 2},
}


def test_a_whole_message() -> None:
    message = whole([thought("plan"), said("done"), called("c", "f", '{"b": 1e400, "a": 1.0}'), end(called=True)])
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0]["signature"] == str(Marker("plan"))
    assert (message["usage"], message["stop_reason"], message["type"], message["role"]) == (
        USAGE,
        "tool_use",
        "message",
        "assistant",
    )
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 4


def test_arguments_come_as_the_model_wrote_them() -> None:
    collected = Collected(1)
    for event in (called(arguments='{"b": 1.50, "a": 12345678901234567890123}'), end()):
        collected.add(event)
    assert b'"input":{"b": 1.50, "a": 12345678901234567890123}' in Messages().encode(response(), collected)


def test_an_answer_without_anything_to_show() -> None:
    assert whole([end()])["content"] == []
    assert [e["type"] for e in stream([said(""), end()])] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({"cause": "stop_token"}, "end_turn", None),
        ({"cause": "stop_sequence", "stop": "END"}, "stop_sequence", "END"),
        ({"cause": "max_tokens"}, "max_tokens", None),
        ({"cause": "context_full"}, "max_tokens", None),
        ({"cause": "stop_token", "called": True}, "tool_use", None),
        ({"cause": "max_tokens", "called": True}, "max_tokens", None),
        ({"cause": "cancelled"}, "end_turn", None),
    ],
)
def test_causes_and_stop_reasons(changes: dict[str, Any], reason: str, sequence: str | None) -> None:
    for shown in (whole([end(**changes)]), stream([end(**changes)])[-2]["delta"]):
        assert (shown["stop_reason"], shown["stop_sequence"]) == (reason, sequence)


def test_a_failure_is_an_error_event_and_the_last_one() -> None:
    failed = Failed(RequestError("it broke", status=500, type="server_error"))
    error = {"type": "error", "error": {"type": "api_error", "message": "it broke"}}
    assert stream([failed]) == [error]
    assert [e["type"] for e in stream([said("a"), failed])] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]


@pytest.mark.parametrize(
    ("error", "type"),
    [
        (RequestError("x", param="y", code="z", extra={"levels": []}), "invalid_request_error"),
        (RequestError("x", status=401, type="authentication_error"), "authentication_error"),
        (RequestError("x", status=404, code="not_found"), "not_found_error"),
        (RequestError("x", status=413, type="request_too_large"), "request_too_large"),
        (RequestError("x", status=429, type="rate_limit_error"), "rate_limit_error"),
        (RequestError("x", status=500, type="server_error"), "api_error"),
        (RequestError("x", status=503, type="server_error"), "api_error"),
    ],
)
def test_errors_have_the_protocols_types(error: RequestError, type: str) -> None:
    assert message_error(error) == {"type": "error", "error": {"type": type, "message": "x"}}
    assert Messages().error(error) == message_error(error)


def refused_room(prompt_tokens: int, max_tokens: int, context: int) -> str | None:
    model = make_model(context_length=context)
    decoded = Messages().decode(json.dumps(BODY | {"max_tokens": max_tokens}).encode(), model)
    try:
        Messages().admit(prompt_tokens, 0, decoded, model)
    except RequestError as error:
        assert error.status == 400
        return message_error(error)["error"]["message"]
    return None


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know() -> None:
    model = make_model(context_length=512)
    for tokens in (512, 600):
        with pytest.raises(RequestError) as caught:
            model.check_room(tokens, "messages")
        message = message_error(caught.value)["error"]["message"]
        assert message.startswith(f"prompt is too long: {tokens} tokens > 511 maximum")


def test_a_limit_over_the_rest_of_the_context_is_refused_where_the_client_can_ask_for_less() -> None:
    words = refused_room(40_000, 32_000, 65_536)
    assert words is not None
    assert words.startswith("input length and `max_tokens` exceed context limit: 40000 + 32000 > 65536")
    assert refused_room(40_000, 25_536, 65_536) is None
    assert refused_room(40_000, 25_537, 65_536) is not None
    assert refused_room(500, 100, 512) is None, "the context bounds the answer"
    assert refused_room(65_536 - CLIENT_MARGIN, 32_000, 65_536) is None
    assert refused_room(65_535 - CLIENT_MARGIN, 32_000, 65_536) is not None
