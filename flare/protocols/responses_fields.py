"""The body of a Responses request, and the items and tools inside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from flare.errors import RequestError
from flare.protocols.decoding import invalid_field
from flare.protocols.fields import PositiveTokens, SamplingFields, StreamOptions, TokenCount
from flare.protocols.formats import FlatFormat
from flare.protocols.logprob_fields import Alternatives

T = TypeVar("T")

MAX_METADATA = 16
"""Pairs of `metadata`, which the response gives back; these bounds are OpenAI's."""

MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512
"""Characters of a name and of a value in `metadata`."""


class ReasoningFields(msgspec.Struct, forbid_unknown_fields=True):
    """`summary` and its older name have no effect: reasoning comes back whole."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Any = None
    mode: Any = None


class TextFields(msgspec.Struct, forbid_unknown_fields=True):
    format: FlatFormat | None = None
    verbosity: Any = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body; None is "not sent", `Any` marks the fields of UNBUILT."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: PositiveTokens | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: PositiveTokens | None = None
    top_logprobs: Alternatives | None = None
    logprob_token_ids: list[TokenCount] | None = None
    return_tokens_as_token_ids: bool | None = None

    client_metadata: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    cache_salt: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    multi_agent: Any = None
    previous_response_id: Any = None
    priority: Any = None
    prompt: Any = None
    prompt_logprobs: Any = None
    request_id: Any = None
    service_tier: Any = None
    store: Any = None
    truncation: Any = None


INERT: Mapping[str, str] = {
    "client_metadata": "not stored",
    "metadata": "given back in the response, not stored",
    "model": "the loaded model always answers; its own name is returned",
    "prompt_cache_key": "no cache of prefixes is kept yet",
    "prompt_cache_options": "no cache of prefixes is kept yet",
    "prompt_cache_retention": "no cache of prefixes is kept yet",
    "safety_identifier": "given back in the response, not stored",
    "stream_options": "events are never padded",
    "user": "not stored",
}
"""Fields that are checked for their type and then have no effect on generation, with the reason."""

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "access_programs": ([],),
    "background": (False,),
    "background_options": (),
    "cache_salt": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "multi_agent": (),
    "previous_response_id": (),
    "priority": (0,),
    "prompt": (),
    "prompt_logprobs": (),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Fields without their part of the engine: null and these neutral values pass, anything else is refused by name."""

UNBUILT_REASONING: Mapping[str, tuple[Any, ...]] = {"context": ("auto",), "mode": ("standard",)}
"""As UNBUILT, within `reasoning`: the template decides which reasoning of earlier turns the model sees."""

UNBUILT_TEXT: Mapping[str, tuple[Any, ...]] = {"verbosity": ("medium",)}
"""As UNBUILT, within `text`."""

UNBUILT_TOOL: Mapping[str, tuple[Any, ...]] = {"allowed_callers": ([], ["direct"])}
"""As UNBUILT, within a tool: the model calls tools itself, no program of it does."""


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message. `id`, `status` and `phase` are the server's own words coming back."""

    type: str = "message"
    role: str
    content: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message, of reasoning or of a tool's output. `prompt_cache_breakpoint` is a hint without an effect,
    `parsed` is what SDKs add to answers that they send back."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None
    parsed: Any = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the model thought; `content` is read before `summary`."""

    type: str
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What calls of both kinds of tool have. All below `namespace` says how a call went, and nothing to the model."""

    type: str
    call_id: str
    name: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None
    caller: Any = None
    asynchronous: Any = msgspec.field(default=None, name="async")
    async_: Any = None


class FunctionCallItem(CallItem, kw_only=True):
    """A call of a function. `parsed_arguments` is what SDKs add to calls that they send back."""

    arguments: str
    parsed_arguments: Any = None


class CustomCallItem(CallItem, kw_only=True):
    """A call of a custom tool."""

    input: str


class OutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a tool returned, of a function or a custom tool."""

    type: str
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class ClientTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What functions and custom tools have. `defer_loading` is a hint without an effect: the model sees all tools."""

    type: str
    name: str
    description: str | None = None
    defer_loading: bool | None = None
    allowed_callers: Any = None
    asynchronous: Any = msgspec.field(default=None, name="async")


class FunctionTool(ClientTool, kw_only=True):
    """A function. `response` and `output_schema`, schemas of the result, are not shown to the model."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    response: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(ClientTool, kw_only=True):
    """A tool that takes one text."""

    format: dict[str, Any] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Any text as the input of a custom tool."""

    type: str


class GrammarFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the input of a custom tool must match, as a whole."""

    type: str
    syntax: Literal["lark", "regex"]
    definition: str


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tools under one name. Its `description` is not shown to the model, which knows single tools."""

    type: str
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class SelectedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice` where it is an object."""

    type: str
    name: str
    namespace: str | None = None


def converted(value: Any, kind: type[T], path: str) -> T:
    """Returns a part of the body as the struct it should be. Raises RequestError with the field's whole path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as complaint:
        error = invalid_field(str(complaint), kind, value)
        if error.param is None:
            raise RequestError(f"{path}: {str(error).removeprefix('the body: ')}", param=path) from None
        param = f"{path}.{error.param}"
        raise RequestError(f"{path}.{error}", param=param, code=error.code) from None
