"""From the items of a Responses request to the neutral conversation."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.conversation import Conversation, Message, Role, ToolCall, qualified
from flare.errors import RequestError
from flare.logprobs import LogprobsWanted
from flare.protocols.fields import refuse_unbuilt
from flare.protocols.logprob_fields import wanted
from flare.protocols.refusals import foreign_type, no_tools, not_one_of, required, shown
from flare.protocols.responses_fields import (
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_VALUE,
    UNBUILT_REASONING,
    UNBUILT_TEXT,
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
    converted,
)
from flare.protocols.responses_tools import decode_tools
from flare.protocols.thinking import Asked, agreed, decode_template
from flare.protocols.tools import check_arguments, check_tool_name
from flare.served import ServedModel
from flare.thinking import check_effort

DECODER = msgspec.json.Decoder(ResponsesRequest)

ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""

TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")


def decode_conversation(request: ResponsesRequest, model: ServedModel) -> Conversation:
    """Returns the conversation. Raises RequestError naming the item or field that cannot be taken."""
    messages = [Message("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        messages.append(Message("user", request.input))
    else:
        messages += _Items(model).messages(request.input)
        if not messages:
            raise RequestError("input: there is no message to answer", param="input")
    thinking, variables = _asked(request, model)
    return Conversation(messages, thinking, tools=decode_tools(request, model), variables=variables)


def _asked(request: ResponsesRequest, model: ServedModel) -> Asked:
    """Returns what is asked of the thinking controls, and the further variables of the template.

    `reasoning.effort` takes the nearest level that the template has, the template's own variables take exactly theirs.
    Raises RequestError for an effort that no level has as its name, and where the two disagree.
    """
    effort = request.reasoning.effort if request.reasoning is not None else None
    template = decode_template(request.chat_template_kwargs, model)
    if effort is None:
        return Asked(agreed(template.levels, template.switches, model.levels), template.variables)
    check_effort(effort, "reasoning.effort", model.levels)
    thinking = agreed([("reasoning.effort", effort), *template.levels], template.switches, model.levels)
    return Asked(msgspec.structs.replace(thinking, nearest=True), template.variables)


class _Items:
    """Items to messages: what an assistant said, thought and called without anything between is one message."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.found: list[Message] = []
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def messages(self, items: list[dict[str, Any]]) -> list[Message]:
        for index, item in enumerate(items):
            self._take(item, f"input[{index}]")
        self._flush()
        return self.found

    def _take(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type")
        match kind:
            case "message" | None:
                self._message(converted(item, MessageItem, path), path)
            case "reasoning":
                self._reasoning(converted(item, ReasoningItem, path), path)
            case "function_call":
                function = converted(item, FunctionCallItem, path)
                arguments = check_arguments(function.arguments, f"{path}.arguments")
                self._call(function, arguments, path)
            case "custom_tool_call":
                custom = converted(item, CustomCallItem, path)
                self._call(custom, custom.input, path, custom=True)
            case "function_call_output" | "custom_tool_call_output":
                output = converted(item, OutputItem, path)
                self._check_tools(path)
                self._flush()
                text = _text(output.output, f"{path}.output")
                name = None if output.name is None else qualified(output.namespace, output.name)
                self.found.append(Message("tool", text, call_id=output.call_id, name=name))
            case _:
                raise foreign_type(f"{path}.type", kind, "items", ITEMS)

    def _message(self, item: MessageItem, path: str) -> None:
        role = ROLES.get(item.role)
        if role is None:
            raise not_one_of(f"{path}.role", item.role, ROLES)
        text = _text(item.content, f"{path}.content")
        if role == "assistant":
            self.texts.append(text)
            return
        self._flush()
        self.found.append(Message(role, text))

    def _reasoning(self, item: ReasoningItem, path: str) -> None:
        content = _joined(item.content or [], f"{path}.content", REASONING_PARTS)
        summary = _joined(item.summary or [], f"{path}.summary", REASONING_PARTS)
        if text := content or summary:
            self.reasoning.append(text)
        elif item.encrypted_content is not None:
            text = f"{path}.encrypted_content: only its provider can read this reasoning; leave the item out"
            raise RequestError(text, param=f"{path}.encrypted_content", code="unsupported_parameter")

    def _call(self, item: CallItem, arguments: str, path: str, *, custom: bool = False) -> None:
        self._check_tools(path)
        name = check_tool_name(item.name, f"{path}.name")
        namespace = None if item.namespace is None else check_tool_name(item.namespace, f"{path}.namespace")
        self.calls.append(ToolCall(item.call_id, name, arguments, namespace, custom))

    def _check_tools(self, path: str) -> None:
        if not self.model.takes_tools:
            raise no_tools(path)

    def _flush(self) -> None:
        if not (self.texts or self.reasoning or self.calls):
            return
        reasoning = "\n\n".join(self.reasoning) or None
        self.found.append(Message("assistant", "\n\n".join(self.texts), reasoning, tuple(self.calls)))
        self.texts, self.reasoning, self.calls = [], [], []


def _text(content: str | list[dict[str, Any]], path: str) -> str:
    return content if isinstance(content, str) else _joined(content, path, (*TEXT_PARTS, "refusal"))


def _joined(parts: list[dict[str, Any]], path: str, kinds: tuple[str, ...]) -> str:
    """Returns the texts of parts, joined with blank lines. Raises RequestError for parts of other kinds."""
    texts = []
    for index, value in enumerate(parts):
        where = f"{path}[{index}]"
        kind = value.get("type")
        if kind is None:
            raise required(f"{where}.type")
        if kind not in kinds:
            raise foreign_type(f"{where}.type", kind, "parts", kinds)
        part = converted(value, TextPart, where)
        name = "refusal" if kind == "refusal" else "text"
        said: str | None = getattr(part, name)
        if said is None:
            raise required(f"{where}.{name}")
        texts.append(said)
    return "\n\n".join(texts)


def check_reasoning(request: ResponsesRequest) -> None:
    """Raises RequestError for what is asked of reasoning beside its effort."""
    if request.reasoning is not None:
        refuse_unbuilt(request.reasoning, UNBUILT_REASONING, "reasoning.")


def check_text(request: ResponsesRequest) -> None:
    """Raises RequestError for what is asked of the answer beside its format."""
    if request.text is not None:
        refuse_unbuilt(request.text, UNBUILT_TEXT, "text.")


def logprobs_wanted(request: ResponsesRequest, model: ServedModel) -> LogprobsWanted | None:
    """Returns what is wanted for each token, by `include`, whose other values are ignored. Raises RequestError, also for
    alternatives without log probabilities."""
    included = LOGPROBS in (request.include or ())
    count = request.top_logprobs or 0
    if count and not included:
        text = f"top_logprobs: {count} alternatives of no log probabilities; send {LOGPROBS!r} in include with it"
        raise RequestError(text, param="top_logprobs")
    field = "top_logprobs" if count and model.max_top_logprobs else "include"
    switch = f"{LOGPROBS!r} in include"
    return wanted(count if included else None, field, request.logprob_token_ids, model, switch=switch)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises RequestError for more than a response gives back."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        text = f"metadata: {len(metadata)} pairs, the limit is {MAX_METADATA}; send fewer"
        raise RequestError(text, param="metadata")
    for name, value in metadata.items():
        for what, said, most in (("name", name, MAX_METADATA_NAME), ("value", value, MAX_METADATA_VALUE)):
            if len(said) > most:
                param = f"metadata.{shown(name)}"
                text = f"{param}: a {what} of {len(said)} characters, the limit is {most}; shorten it"
                raise RequestError(text, param=param)
