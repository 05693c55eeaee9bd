"""Answers of Messages: the message object, and the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.conversation import Called, Event, Failed, Finished, Reasoning, Text, ToolCall
from flare.errors import RequestError
from flare.output import Piece
from flare.protocols.encoding import ending_members
from flare.protocols.endpoint import Outcome, Response, encode_json
from flare.protocols.messages_thinking import Marker

STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def message_error(error: RequestError) -> dict[str, Any]:
    """Returns the error envelope of the Messages routes. Failures of the server are `api_error`."""
    type = "api_error" if error.status >= 500 else "not_found_error" if error.status == 404 else error.type
    return {"type": "error", "error": {"type": type, "message": overflow_message(error) or str(error)}}


def overflow_message(error: RequestError) -> str | None:
    """Returns the words by which clients of this protocol recognise a prompt that is too long, and begin to compact."""
    context = error.extra.get("flare_context")
    if error.code != "context_full" or not isinstance(context, dict):
        return None
    used, most = context["tokens_used"], context["context_length"] - 1
    many = f"at least {used}" if context.get("at_least") else used
    return f"prompt is too long: {many} tokens > {most} maximum, which leaves room for one token of the answer"


def message_object(response: Response, outcome: Outcome) -> dict[str, Any]:
    """Returns the whole message of a complete answer."""
    end = outcome.end
    return {
        **_head(response),
        "content": [_content_block(block) for block in outcome.blocks],
        **_stop(end),
        "container": None,
        "usage": _usage(end),
        **ending_members([end], response.model),
    }


def _head(response: Response) -> dict[str, Any]:
    return {"id": response.id, "type": "message", "role": "assistant", "model": response.model.id}


def _content_block(block: Piece) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": str(Marker(block.text))}
    assert block.call is not None
    return _tool_use(block.call, msgspec.Raw(block.call.arguments.encode()))


def _tool_use(call: ToolCall, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input, "caller": {"type": "direct"}}


def stop_reason(end: Finished) -> str:
    """Returns the protocol's word for the end of an answer. A limit is one whatever was completed before it."""
    if end.cause in ("max_tokens", "context_full"):
        return "max_tokens"
    if end.called:
        return "tool_use"
    return "stop_sequence" if end.cause == "stop_sequence" and end.stop is not None else "end_turn"


def _stop(end: Finished) -> dict[str, Any]:
    reason = stop_reason(end)
    sequence = end.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _usage(end: Finished) -> dict[str, Any]:
    """Returns the usage of a complete answer: input tokens are those that no cache held."""
    return {
        **_input_usage(end.prompt_tokens - end.cached_tokens, end.cached_tokens),
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"thinking_tokens": end.reasoning_tokens},
    }


def _input_usage(computed: int, cached: int) -> dict[str, Any]:
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }


def event_frame(value: dict[str, Any]) -> bytes:
    """Returns one SSE frame, named by the value's type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode_json(value))


class MessageStream:
    """Events to the frames of a Messages stream.

    `message_start` goes out with the first event of the answer, so that a failure before it is an error and nothing
    else. At most one block is open. A token costs one escaped string and one join.
    """

    def __init__(self, response: Response) -> None:
        self.ended = False
        self._response = response
        self._begun = False
        self._index = -1
        self._kind: type[Text] | type[Reasoning] | None = None
        self._delta = b""
        self._marker = Marker()

    def encode(self, event: Event) -> bytes:
        """Returns the frames of one event; empty when it shows nothing."""
        kind = type(event)
        if kind is Text or kind is Reasoning:
            assert isinstance(event, Text | Reasoning)
            if kind is self._kind and event.text:
                return self._text(event.text)
            return self._begin() + (self._open(kind) + self._text(event.text) if event.text else b"")
        if kind is Called:
            assert isinstance(event, Called)
            return self._begin() + self._call(event.call)
        if kind is Finished:
            assert isinstance(event, Finished)
            return self._finish(event)
        assert isinstance(event, Failed)
        self.ended = True
        return event_frame(message_error(event.error))

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = {
            **_head(self._response),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                **_input_usage(self._response.prompt_tokens, 0),
                "output_tokens": 0,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        }
        return event_frame({"type": "message_start", "message": message})

    def _text(self, text: str) -> bytes:
        if self._kind is Reasoning:
            self._marker.add(text)
        return self._delta + encode_json(text) + b"}}\n\n"

    def _open(self, kind: type[Text] | type[Reasoning]) -> bytes:
        """Returns the end of the block before, if one is open, and the start of a block of `kind`."""
        closed = self._close()
        self._kind = kind
        if kind is Text:
            block, delta = {"type": "text", "text": "", "citations": None}, b'"text_delta","text":'
        else:
            block, delta = {"type": "thinking", "thinking": "", "signature": ""}, b'"thinking_delta","thinking":'
            self._marker = Marker()
        start = self._start(block)
        before = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
        self._delta = before % self._index + delta
        return closed + start

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return event_frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        frames = b""
        if self._kind is Reasoning:
            frames = self._block_delta({"type": "signature_delta", "signature": str(self._marker)})
        self._kind = None
        return frames + self._end_of_block()

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return event_frame({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _end_of_block(self) -> bytes:
        return event_frame({"type": "content_block_stop", "index": self._index})

    def _call(self, call: ToolCall) -> bytes:
        """Returns a block of its own; calls arrive complete."""
        frames = self._close() + self._start(_tool_use(call, {}))
        frames += self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
        return frames + self._end_of_block()

    def _finish(self, end: Finished) -> bytes:
        frames = self._begin()
        if end.text:
            frames += (b"" if self._kind is Text else self._open(Text)) + self._text(end.text)
        self.ended = True
        last = {
            "type": "message_delta",
            "delta": {**_stop(end), "container": None},
            "usage": _usage(end),
            **ending_members([end], self._response.model),
        }
        return frames + self._close() + event_frame(last) + STOP
