"""Answers of Responses: the response object and its output items."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from flare.conversation import Finished, ToolCall
from flare.errors import RequestError
from flare.protocols.encoding import ending_members
from flare.protocols.endpoint import Outcome, Response
from flare.protocols.logprob_encoding import entry_list
from flare.protocols.responses_fields import ResponsesRequest, TextFields
from flare.protocols.responses_tools import shown_tools

CUT = ("max_tokens", "context_full")


def request_members(request: ResponsesRequest, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a response shows of its request, which is all that is kept of it. `sampling` are the values in force."""
    asked = request.reasoning
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": asked.effort if asked else None, "summary": asked.summary if asked else None},
        "safety_identifier": request.safety_identifier,
        "text": {"format": _shown_format(request.text), "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": shown_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "user": request.user,
        **{name: sampling[name] for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")},
    }


def _shown_format(text: TextFields | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    return {name: value for name, value in msgspec.structs.asdict(text.format).items() if value is not None}


def response_object(response: Response, **changes: Any) -> dict[str, Any]:
    """Returns the response as it is before any output; `changes` are the members that an ending sets."""
    return {
        "id": response.id,
        "object": "response",
        "created_at": response.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_tool_calls": None,
        "model": response.model.id,
        "output": [],
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **response.decoded.details,
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
        **ending_members([end], response.model),
    )


def failed_object(response: Response, output: list[dict[str, Any]], error: RequestError) -> dict[str, Any]:
    """Returns the response that failed while it was streamed, with the items so far.

    Readers take only the protocol's own error codes: of those this server has two to tell.
    """
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return response_object(response, status="failed", output=output, error={"code": code, "message": str(error)})


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


def text_part(text: str, logprobs: Any = ()) -> dict[str, Any]:
    """Returns the part of a message; `logprobs` are its tokens' as `entry_list` makes them."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(text: str, _logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def message_item(response: Response, index: int, text: str | None, status: str, logprobs: Any = ()) -> dict[str, Any]:
    """Returns a message; `text` is None while it has no content yet."""
    content = [] if text is None else [text_part(text, logprobs)]
    id = item_id("msg", response, index)
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def reasoning_item(
    response: Response, index: int, text: str | None, status: str, _logprobs: Any = ()
) -> dict[str, Any]:
    content = [] if text is None else [reasoning_part(text)]
    id = item_id("rs", response, index)
    return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": content}


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
            logprobs = entry_list(response.spelling, outcome.answers[index])
            items.append(message_item(response, index, block.text, status, logprobs))
        else:
            items.append(reasoning_item(response, index, block.text, status))
    return items
