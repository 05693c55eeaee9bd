"""The body of a Messages request as types, and what becomes of the fields that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from flare.errors import RequestError
from flare.protocols.decoding import decode_body
from flare.protocols.fields import PositiveTokens, SamplingFields
from flare.protocols.formats import FlatFormat
from flare.protocols.refusals import foreign_type, shown

T = TypeVar("T")

CacheControl = dict[str, Any]
"""A marker behind which the client expects later requests to differ. Its `type` and `ttl` have no effect."""


class _Block(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """A content block."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    """`citations` only annotate the text; `parsed_output` is what an SDK made of it."""

    text: str
    citations: Any = None
    parsed_output: Any = None


class OnlyText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A TextBlock where no other block may stand. A tag may be missing there, `type` may not."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None
    parsed_output: Any = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking", kw_only=True):
    """An assistant's reasoning; `signature` is its maker's mark."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, tag="tool_use"):
    """A call of an assistant. `caller` and `toolset_name` say who made it and whose tool it is: the model, the client's."""

    id: Annotated[str, Meta(min_length=1)]
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(_Block, tag="tool_result"):
    """What came of the call `tool_use_id`."""

    tool_use_id: Annotated[str, Meta(min_length=1)]
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    """A message. Other members are control metadata of the client's provider, such as `output_config`: not for this server."""

    role: str
    content: str | list[Block]


class InputTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Any = None
    input_examples: Any = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`name` goes with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`display` has no effect: all reasoning is returned, since the next request can only hold what this one returned."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    format: FlatFormat | None = None
    task_budget: Any = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    edits: list[dict[str, Any]] | None = None


class CountRequest(SamplingFields, kw_only=True):
    """The body of a count_tokens request: a Messages request whose `max_tokens` may be missing, since none is generated.

    `Any` marks the fields of UNBUILT.
    """

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[OnlyText] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    thinking_token_budget: PositiveTokens | None = None
    max_tokens: PositiveTokens | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    cache_control: CacheControl | None = None
    metadata: dict[str, Any] | None = None

    billing_policy: Any = None
    chat_template_kwargs: Any = None
    compaction: Any = None
    container: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    logprob_token_ids: Any = None
    logprobs: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    safeguards: Any = None
    service_tier: Any = None
    speed: Any = None
    thread: Any = None
    top_logprobs: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of a Messages request."""

    max_tokens: PositiveTokens


INERT: Mapping[str, str] = {
    "model": "the loaded model always answers; its own name is returned",
    "metadata": "not stored",
    "cache_control": "no cache of prefixes is kept yet",
    "thinking.display": "all reasoning is returned: the next request can only hold what this one returned",
    "tools[].defer_loading": "every tool is shown to the model from the start",
    "tools[].eager_input_streaming": "a call is sent when it is complete",
    "messages[].output_config": "the controls of the request apply; so with all members of a message but role and content",
    "messages[].content[].caller": "every call is the model's own",
    "messages[].content[].toolset_name": "every tool is the client's own",
    "messages[].content[].citations": "they annotate text, which is kept",
    "messages[].content[].parsed_output": "SDKs make it of the text, which is kept",
}
"""Fields that are checked for their type and then have no effect, with the reason."""

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "billing_policy": ({"type": "billing_policy", "bill_to": "self"},),
    "chat_template_kwargs": ({},),
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": (),
    "inference_geo": (),
    "logprob_token_ids": (),
    "logprobs": (),
    "mcp_servers": ([],),
    "output_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (),
    "return_tokens_as_token_ids": (),
    "safeguards": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
    "top_logprobs": (),
}
"""Fields of the request without a part here: null and these neutral values pass, anything else is refused by name."""

UNBUILT_TOOL: Mapping[str, tuple[Any, ...]] = {"allowed_callers": ([], ["direct"]), "input_examples": ([],)}
UNBUILT_OUTPUT: Mapping[str, tuple[Any, ...]] = {"task_budget": ()}

TYPES: Mapping[str, Sequence[str]] = {
    "messages.content": ("text", "thinking", "tool_use", "tool_result"),
    "messages.content.content": ("text",),
    "system": ("text",),
    "tools": ("custom",),
}
"""The types that are at home in a list of objects, by its path without indices."""


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decodes a body, see `decode_body`. Of a block or a tool of a type that is not known, the type is what is refused."""
    try:
        return decode_body(decoder, body)
    except RequestError as error:
        raise _foreign_type(error, body) or error from None


def _foreign_type(error: RequestError, body: bytes | bytearray) -> RequestError | None:
    """Returns the refusal of the type of a block or tool on the way to the field that `error` names, if it is foreign.

    The fields of such an object are foreign too, and any of them may be what the decoder met first.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    path, place = "", ""
    for step in (error.param or "").split("."):
        name, _, index = step.partition("[")
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
        path += f".{name}" if path else name
        place = f"{place}.{name}" if place else name
        index = index.removesuffix("]")
        if not index.isdecimal():
            continue
        if not isinstance(value, list) or int(index) >= len(value):
            return None
        value = value[int(index)]
        path += f"[{index}]"
        type = value.get("type") if isinstance(value, dict) else None
        if isinstance(type, str) and type not in (known := TYPES.get(place, (type,))):
            return _foreign(f"{path}.type", type, known)
    return None


def _foreign(param: str, type: str, known: Sequence[str]) -> RequestError:
    """The refusal of a type where only `known` are at home."""
    if type == "redacted_thinking":
        text = f"{param}: 'redacted_thinking' holds nothing that a model could read; leave it out"
        return RequestError(text, param=param, code="unsupported_parameter")
    if known is TYPES["tools"]:
        text = f"{param}: {shown(type)!r} tools run at a provider; offer tools of type custom, which the client runs"
        return RequestError(text, param=param, code="unsupported_parameter")
    return foreign_type(param, type, "blocks", known)
