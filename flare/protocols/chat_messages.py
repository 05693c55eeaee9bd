"""The messages of a Chat Completions request, from clients' spellings to the neutral ones."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.conversation import Message, Role, ToolCall
from flare.protocols.fields import refuse_unbuilt
from flare.protocols.refusals import foreign_type, misplaced, no_tools, not_one_of, required
from flare.protocols.tools import check_arguments, check_tool_name
from flare.served import ServedModel


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message. `cache_control` is a hint without an effect."""

    type: str
    text: str | None = None
    cache_control: Any = None
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`parsed_arguments` is what SDKs add to what they send back: the same, decoded."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class MadeCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an assistant's message. `index` comes from streams that clients put together."""

    id: str
    function: CalledFunction | None = None
    type: str | None = None
    index: int | None = None
    custom: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message as clients send it, and as they send back what this server answered.

    `annotations` and `parsed` are what SDKs add to that, `name` of others than a tool and `cache_control` are hints: all
    are without an effect.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    parsed: Any = None
    cache_control: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None


UNBUILT_MESSAGE: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": (), "refusal": ()}
UNBUILT_PART: dict[str, tuple[Any, ...]] = {"file": (), "image_url": (), "input_audio": (), "refusal": ()}
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
ASSISTANT_ONLY = ("reasoning_content", "reasoning", "tool_calls")


def decode_message(message: ChatMessage, path: str, model: ServedModel) -> Message:
    """Returns the neutral message. Raises RequestError naming the field that cannot be taken."""
    role = ROLES.get(message.role)
    if role is None:
        raise not_one_of(f"{path}.role", message.role, ROLES)
    refuse_unbuilt(message, UNBUILT_MESSAGE, f"{path}.")
    if role == "tool" and not model.takes_tools:
        raise no_tools(f"{path}.role")
    if role != "assistant":
        for field in ASSISTANT_ONLY:
            if getattr(message, field):
                raise misplaced(f"{path}.{field}", "an assistant's message")
    if role != "tool" and message.tool_call_id is not None:
        raise misplaced(f"{path}.tool_call_id", "a tool's message")
    if role == "assistant":
        return _assistant(message, path, model)
    text = _text(message, path)
    if role == "tool":
        return Message(role, text, call_id=message.tool_call_id, name=message.name)
    return Message(role, text)


def _assistant(message: ChatMessage, path: str, model: ServedModel) -> Message:
    """Returns an assistant's message; with calls or reasoning it needs no content."""
    if message.tool_calls and not model.takes_tools:
        raise no_tools(f"{path}.tool_calls")
    calls = tuple(_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ()))
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    empty = message.content is None and bool(calls or reasoning)
    return Message("assistant", "" if empty else _text(message, path), reasoning, calls)


def _call(call: MadeCall, path: str) -> ToolCall:
    if call.type not in (None, "function") or call.custom is not None:
        raise foreign_type(f"{path}.type", call.type or "custom", "calls", ["function"])
    if call.function is None:
        raise required(f"{path}.function")
    name = check_tool_name(call.function.name, f"{path}.function.name")
    arguments = check_arguments(call.function.arguments, f"{path}.function.arguments")
    return ToolCall(call.id, name, arguments)


def _text(message: ChatMessage, path: str) -> str:
    """Returns a message's text; parts are joined with blank lines."""
    if message.content is None:
        raise required(f"{path}.content")
    if isinstance(message.content, str):
        return message.content
    return "\n\n".join([_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)])


def _part(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise foreign_type(f"{path}.type", part.type, "parts", ["text"])
    refuse_unbuilt(part, UNBUILT_PART, f"{path}.")
    if part.text is None:
        raise required(f"{path}.text")
    return part.text
