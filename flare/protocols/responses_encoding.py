"""Answers of Responses: the response object with its items, and the events of a stream."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from flare.conversation import Called, Event, Failed, Finished, Reasoning, Text, ToolCall
from flare.errors import RequestError
from flare.protocols.encoding import context_object, timings_object
from flare.protocols.endpoint import Outcome, Response, encode_json
from flare.protocols.responses_fields import ResponsesRequest
from flare.protocols.responses_tools import shown_tools

CUT = ("max_tokens", "context_full")


def response_object(response: Response, **changes: Any) -> dict[str, Any]:
    """Returns the response as it is before any output; `changes` are the members that an ending sets."""
    request: ResponsesRequest = response.decoded.details
    generation, model = response.decoded.generation, response.model
    sampling = model.resolve_sampling(generation.sampling)
    asked = request.reasoning
    return {
        "id": response.id,
        "object": "response",
        "created_at": response.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model.id,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": asked.effort if asked else None, "summary": asked.summary if asked else None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling["temperature"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": shown_tools(request.tools),
        "top_logprobs": 0,
        "top_p": sampling["top_p"],
        "presence_penalty": sampling["presence_penalty"],
        "frequency_penalty": sampling["frequency_penalty"],
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        **changes,
    }


def finished_object(response: Response, output: list[dict[str, Any]], end: Finished) -> dict[str, Any]:
    """Returns the response at its end: completed, or incomplete where a limit cut it."""
    cut = end.cause in CUT
    return response_object(
        response,
        status="incomplete" if cut else "completed",
        completed_at=None if cut else int(time.time()),
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=output,
        usage=_usage(end),
        stop_reason=end.cause,
        flare_context=context_object([end], response.model),
        timings=timings_object([end]),
    )


def failed_object(response: Response, output: list[dict[str, Any]], error: RequestError) -> dict[str, Any]:
    return response_object(
        response, status="failed", output=output, error={"code": error.code or error.type, "message": str(error)}
    )


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def item_id(prefix: str, response: Response, index: int) -> str:
    """Returns an id that is stable within the response: made from its own and the item's place."""
    return f"{prefix}_{response.id.removeprefix('resp_')}{index:02d}"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(response: Response, index: int, text: str | None, status: str) -> dict[str, Any]:
    """Returns a message; `text` is None while it has no content yet."""
    content = [] if text is None else [text_part(text)]
    id = item_id("msg", response, index)
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def reasoning_item(response: Response, index: int, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    id = item_id("rs", response, index)
    return {
        "type": "reasoning",
        "id": id,
        "status": status,
        "summary": [],
        "content": content,
        "encrypted_content": None,
    }


def call_item(response: Response, index: int, call: ToolCall, *, begun: bool = False) -> dict[str, Any]:
    """Returns a call; `begun` as it is before its arguments."""
    body = "" if begun else call.arguments
    status = "in_progress" if begun else "completed"
    if call.custom:
        item = {"type": "custom_tool_call", "id": item_id("ctc", response, index), "status": status}
        item |= {"call_id": call.id, "name": call.name, "input": body}
    else:
        item = {"type": "function_call", "id": item_id("fc", response, index), "status": status}
        item |= {"call_id": call.id, "name": call.name, "arguments": body}
    return item if call.namespace is None else {**item, "namespace": call.namespace}


def output_items(response: Response, outcome: Outcome) -> list[dict[str, Any]]:
    """Returns the items of a complete answer; only the last one can have been cut."""
    items: list[dict[str, Any]] = []
    cut = outcome.end.cause in CUT
    for index, block in enumerate(outcome.blocks):
        status = "incomplete" if cut and index == len(outcome.blocks) - 1 else "completed"
        if block.call is not None:
            items.append(call_item(response, index, block.call))
        elif block.kind == "text":
            items.append(message_item(response, index, block.text, status))
        else:
            items.append(reasoning_item(response, index, block.text, status))
    return items


class _Kind(NamedTuple):
    """How the events of a text item are called, for answer text and for reasoning."""

    make: Any
    prefix: str
    delta: str
    done: str
    part: Any
    logprobs: bool


KINDS: dict[type, _Kind] = {
    Text: _Kind(message_item, "msg", "response.output_text.delta", "response.output_text.done", text_part, True),
    Reasoning: _Kind(
        reasoning_item,
        "rs",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        lambda text: {"type": "reasoning_text", "text": text},
        False,
    ),
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
        self._delta = b""
        self._delta_end = b""

    def encode(self, event: Event) -> bytes:
        """Returns the frames of one event; empty when it shows nothing."""
        kind = type(event)
        if kind is self._type:
            assert isinstance(event, Text | Reasoning)
            return self._text(event.text) if event.text else b""
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

    def _frame(self, name: str, **members: Any) -> bytes:
        value = {"type": name, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))

    def _begin(self) -> bytes:
        value = response_object(self._response)
        return self._frame("response.created", response=value) + self._frame("response.in_progress", response=value)

    def _open(self, kind: type) -> bytes:
        frames = self._close("completed")
        self._type, self._kind = kind, KINDS[kind]
        index = len(self._items)
        id = item_id(self._kind.prefix, self._response, index)
        item = self._kind.make(self._response, index, None, "in_progress")
        frames += self._frame("response.output_item.added", output_index=index, item=item)
        part = self._kind.part("")
        frames += self._frame("response.content_part.added", item_id=id, output_index=index, content_index=0, part=part)
        name = self._kind.delta.encode()
        self._delta = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        members = b'"item_id":"%b","output_index":%d,"content_index":0' % (id.encode(), index)
        self._delta_end = b"," + members + (b',"logprobs":[]' if self._kind.logprobs else b"") + b',"delta":'
        return frames

    def _text(self, text: str) -> bytes:
        self._pieces.append(text)
        number, self._number = self._number, self._number + 1
        return b"%b%d%b%b}\n\n" % (self._delta, number, self._delta_end, encode_json(text))

    def _close(self, status: str) -> bytes:
        """Returns the end of the item that is open, if one is."""
        kind = self._kind
        if kind is None:
            return b""
        index, text = len(self._items), "".join(self._pieces)
        place = {"item_id": item_id(kind.prefix, self._response, index), "output_index": index, "content_index": 0}
        more = {"logprobs": []} if kind.logprobs else {}
        item = kind.make(self._response, index, text, status)
        self._items.append(item)
        self._kind, self._type, self._pieces = None, None, []
        return (
            self._frame(kind.done, **place, text=text, **more)
            + self._frame("response.content_part.done", **place, part=kind.part(text))
            + self._frame("response.output_item.done", output_index=index, item=item)
        )

    def _call(self, call: ToolCall) -> bytes:
        """Returns an item of its own; calls arrive complete."""
        index = len(self._items)
        item = call_item(self._response, index, call)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        if call.custom:
            name, member = "response.custom_tool_call_input", "input"
        else:
            name, member = "response.function_call_arguments", "arguments"
        begun = call_item(self._response, index, call, begun=True)
        return (
            self._frame("response.output_item.added", output_index=index, item=begun)
            + self._frame(f"{name}.delta", **place, delta=call.arguments)
            + self._frame(f"{name}.done", **place, **{member: call.arguments})
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
