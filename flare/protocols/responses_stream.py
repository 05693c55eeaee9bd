"""The stream of Responses: events to the events of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from flare.conversation import Called, Event, Failed, Finished, Logprobed, Reasoning, Text, ToolCall
from flare.logprobs import TokenLogprobs
from flare.protocols.endpoint import Response, answering, encode_json
from flare.protocols.logprob_encoding import entry_list
from flare.protocols.responses_encoding import (
    CUT,
    call_item,
    failed_object,
    finished_object,
    message_item,
    reasoning_item,
    reasoning_part,
    response_object,
    text_part,
)

NO_LOGPROBS = b',"logprobs":[]'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How an item of text is called in events. `item` makes it from its response, place, text and status; `part` makes
    its one part, both with the log probabilities where there are any (`rated`)."""

    text: str
    item: Callable[[Response, int, str | None, str, Any], dict[str, Any]]
    part: Callable[[str, Any], dict[str, Any]]
    rated: bool


KINDS: dict[type, _Kind] = {
    Text: _Kind(text="response.output_text", item=message_item, part=text_part, rated=True),
    Reasoning: _Kind(text="response.reasoning_text", item=reasoning_item, part=reasoning_part, rated=False),
}


class ResponseStream:
    """Events to the events of a Responses stream, numbered from 0.

    `response.created` goes out with the first event of the answer, whatever it is, so that every stream has the same
    beginning. At most one item is open. A token costs one escaped string and one join.
    """

    def __init__(self, response: Response) -> None:
        self.ended = False
        self._response = response
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._kind: _Kind | None = None
        self._type: type | None = None
        self._pieces: list[str] = []
        self._coming: list[TokenLogprobs] = []  # of the text that comes next
        self._entries: list[TokenLogprobs] = []  # of the open item's text
        self._delta = self._place = self._delta_end = b""

    def encode(self, event: Event) -> bytes:
        """Returns the frames of one event; empty when it shows nothing."""
        kind = type(event)
        if kind is self._type:
            assert isinstance(event, Text | Reasoning)
            return self._text(event.text) if event.text else b""
        if kind is Logprobed:
            assert isinstance(event, Logprobed)
            self._coming += answering(event)
            return b""
        frames = b"" if self._number else self._begin()
        if kind is Text or kind is Reasoning:
            assert isinstance(event, Text | Reasoning)
            return frames + (self._open(kind) + self._text(event.text) if event.text else b"")
        if kind is Called:
            assert isinstance(event, Called)
            return frames + self._close("completed") + self._call(event.call)
        if kind is Finished:
            assert isinstance(event, Finished)
            return frames + self._finish(event)
        assert isinstance(event, Failed)
        self.ended = True
        frames += self._close("incomplete")
        return frames + self._frame("response.failed", response=failed_object(self._response, self._items, event.error))

    def _frame(self, name: str, /, **members: Any) -> bytes:
        value = {"type": name, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))

    def _begin(self) -> bytes:
        value = msgspec.Raw(encode_json(response_object(self._response)))
        return self._frame("response.created", response=value) + self._frame("response.in_progress", response=value)

    def _open(self, kind: type) -> bytes:
        frames = self._close("completed")
        self._type, self._kind = kind, KINDS[kind]
        index = len(self._items)
        item = self._kind.item(self._response, index, None, "in_progress", [])
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        frames += self._frame("response.output_item.added", output_index=index, item=item)
        frames += self._frame("response.content_part.added", **place, part=self._kind.part("", []))
        name = f"{self._kind.text}.delta".encode()
        self._delta = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        self._place = b"," + encode_json(place)[1:-1]
        self._delta_end = self._place + (NO_LOGPROBS if self._kind.rated else b"") + b',"delta":'
        return frames

    def _text(self, text: str) -> bytes:
        self._pieces.append(text)
        number, self._number = self._number, self._number + 1
        if self._coming and self._type is Text:
            entries, self._coming = self._coming, []
            self._entries += entries
            logprobs = bytes(entry_list(self._response.spelling, entries))
            end = b'%b,"logprobs":%b,"delta":' % (self._place, logprobs)
            return b"%b%d%b%b}\n\n" % (self._delta, number, end, encode_json(text))
        return b"%b%d%b%b}\n\n" % (self._delta, number, self._delta_end, encode_json(text))

    def _close(self, status: str) -> bytes:
        """Returns the end of the item that is open, if one is."""
        kind = self._kind
        if kind is None:
            return b""
        index, text = len(self._items), "".join(self._pieces)
        logprobs = entry_list(self._response.spelling, self._entries)
        rating = {"logprobs": logprobs} if kind.rated else {}
        item = kind.item(self._response, index, text, status, logprobs)
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._items.append(item)
        self._kind, self._type, self._pieces, self._entries = None, None, [], []
        return (
            self._frame(f"{kind.text}.done", **place, text=text, **rating)
            + self._frame("response.content_part.done", **place, part=kind.part(text, logprobs))
            + self._frame("response.output_item.done", output_index=index, item=item)
        )

    def _call(self, call: ToolCall) -> bytes:
        """Returns an item of its own; calls arrive complete."""
        index = len(self._items)
        item = call_item(self._response, index, call)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        if call.custom:
            name, done = "response.custom_tool_call_input", {"input": call.arguments}
        else:
            name, done = "response.function_call_arguments", {"arguments": call.arguments, "name": call.name}
        begun = call_item(self._response, index, call, begun=True)
        return (
            self._frame("response.output_item.added", output_index=index, item=begun)
            + self._frame(f"{name}.delta", **place, delta=call.arguments)
            + self._frame(f"{name}.done", **place, **done)
            + self._frame("response.output_item.done", output_index=index, item=item)
        )

    def _finish(self, end: Finished) -> bytes:
        frames = b""
        if end.text:
            frames += (b"" if self._type is Text else self._open(Text)) + self._text(end.text)
        cut = end.cause in CUT
        frames += self._close("incomplete" if cut else "completed")
        self.ended = True
        value = finished_object(self._response, self._items, end)
        return frames + self._frame("response.incomplete" if cut else "response.completed", response=value)
