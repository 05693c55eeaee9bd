"""From the blocks of a Messages request to a neutral conversation."""

from __future__ import annotations

from flare.conversation import Boundary, Conversation, Message, Tool, ToolCall, Tools
from flare.errors import RequestError
from flare.protocols.endpoint import encode_json
from flare.protocols.fields import refuse_unbuilt
from flare.protocols.messages_fields import (
    UNBUILT_TOOL,
    Block,
    ContextManagement,
    CountRequest,
    InputMessage,
    InputTool,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from flare.protocols.messages_thinking import asked_thinking, check_marker
from flare.protocols.refusals import misplaced, no_tools, not_one_of, required
from flare.protocols.tools import (
    check_arguments,
    check_distinct,
    check_parameters,
    check_strict,
    check_taken,
    check_tool_name,
    undeclared,
    with_mode,
)
from flare.served import ServedModel

ROLES = ("user", "assistant", "system")

MAX_BOUNDARIES = 4
"""Cache markers of a request that are passed on; those beyond have no effect."""

BILLING_HEADER = "x-anthropic-billing-header:"
"""How a line of the system text begins that Claude Code adds. It differs between conversations and says nothing to a
model: left in, it would make the beginnings of any two conversations different."""

KEPT_THINKING = ("all", {"type": "all"})
"""The values of `keep` by which all thinking blocks stay."""

SEPARATOR = "\n\n"
"""What stands between two texts that become one message."""


def decode_conversation(request: CountRequest, model: ServedModel) -> Conversation:
    """Returns the prompt that a request describes. Raises RequestError naming the field that cannot be taken."""
    tools = _tools(request, model)
    history = _History(model)
    system = request.system or ""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    history.system([_without_billing_header(text) for text in texts])
    for index, message in enumerate(request.messages):
        history.add(message, f"messages[{index}]")
    check_context_management(request.context_management)
    if not history.messages:
        raise RequestError("messages: all of them are empty; there is nothing to answer", param="messages")
    last = history.messages[-1]
    if last.calls:
        raise RequestError("messages: the last one calls tools; send their results with it", param="messages")
    output = request.output_config
    return Conversation(
        messages=history.messages,
        thinking=asked_thinking(request.thinking, output.effort if output else None, model),
        continue_final=last.role == "assistant",
        tools=tools,
        boundaries=tuple(history.boundaries),
    )


def check_context_management(asked: ContextManagement | None) -> None:
    """Raises RequestError for an edit that would change the history; the only one taken keeps all thinking blocks."""
    for index, edit in enumerate((asked and asked.edits) or ()):
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") not in KEPT_THINKING or len(edit) > 2:
            param = f"context_management.edits[{index}]"
            text = "this server does not edit histories; only clear_thinking_20251015 with keep all is taken"
            raise RequestError(f"{param}: {text}", param=param, code="unsupported_parameter")


class _History:
    """The neutral messages so far, and the places that the client marked in them."""

    def __init__(self, model: ServedModel) -> None:
        self.messages: list[Message] = []
        self.boundaries: list[Boundary] = []
        self._takes_tools = model.takes_tools

    def add(self, message: InputMessage, path: str) -> None:
        content = message.content
        blocks: list[Block] = [TextBlock(text=content)] if isinstance(content, str) else content
        if message.role == "user":
            self._user(blocks, path)
        elif message.role == "assistant":
            self._assistant(blocks, path)
        elif message.role == "system":
            for index, block in enumerate(blocks):
                if not isinstance(block, TextBlock):
                    raise _misplaced(block, f"{path}.content[{index}]", "a system message")
            self.system([block.text for block in blocks if isinstance(block, TextBlock)])
        else:
            raise not_one_of(f"{path}.role", message.role, ROLES)

    def system(self, texts: list[str]) -> None:
        """Adds a system message, unless it is empty."""
        if text := _joined(texts):
            self.messages.append(Message("system", text))

    def _user(self, blocks: list[Block], path: str) -> None:
        """Adds a user's texts and the results between them as messages, in order."""
        before = len(self.messages)
        texts: list[str] = []
        length = 0
        for index, block in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if isinstance(block, TextBlock):
                if block.text:
                    length += len(block.text) + (len(SEPARATOR) if texts else 0)
                    texts.append(block.text)
                if block.cache_control is not None:
                    self._mark(len(self.messages), length)
            elif isinstance(block, ToolResultBlock):
                self._say(texts)
                texts, length = [], 0
                self._result(block, where)
            else:
                raise _misplaced(block, where, "a user's message")
        self._say(texts)
        if len(self.messages) == before:
            self.messages.append(Message("user", ""))

    def _say(self, texts: list[str]) -> None:
        if text := _joined(texts):
            self.messages.append(Message("user", text))

    def _result(self, block: ToolResultBlock, path: str) -> None:
        self._need_tools(block, path)
        content = block.content or ""
        text = content if isinstance(content, str) else _joined([part.text for part in content])
        if block.is_error:
            text = f"<error>\n{text}\n</error>"
        if block.cache_control is not None:
            self._mark(len(self.messages), len(text))
        self.messages.append(Message("tool", text, call_id=block.tool_use_id))

    def _assistant(self, blocks: list[Block], path: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                check_marker(block, where)
                reasoning.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                self._need_tools(block, where)
                name = check_tool_name(block.name, f"{where}.name")
                arguments = check_arguments(encode_json(block.input).decode(), f"{where}.input")
                calls.append(ToolCall(block.id, name, arguments))
            else:
                raise _misplaced(block, where, "an assistant's message")
        self.messages.append(Message("assistant", _joined(texts), _joined(reasoning) or None, tuple(calls)))

    def _mark(self, message: int, characters: int) -> None:
        """Keeps a place that later requests share, `characters` into a message; so many of them as are passed on."""
        if characters and len(self.boundaries) < MAX_BOUNDARIES:
            self.boundaries.append(Boundary(message, characters))

    def _need_tools(self, block: Block, path: str) -> None:
        if not self._takes_tools:
            raise no_tools(f"{path}.type")


def _joined(texts: list[str]) -> str:
    return SEPARATOR.join(text for text in texts if text)


def _without_billing_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def _type(block: Block) -> str:
    return str(block.__struct_config__.tag)


def _misplaced(block: Block, path: str, place: str) -> RequestError:
    return RequestError(f"{path}.type: {_type(block)} blocks have no place in {place}", param=f"{path}.type")


def _tools(request: CountRequest, model: ServedModel) -> Tools:
    """Returns the offered tools and the choice between them."""
    asked, choice = request.tools or [], request.tool_choice or ToolChoice(type="auto")
    check_taken(bool(asked), choice.type, model)
    offered = tuple(_tool(tool, f"tools[{index}]", model) for index, tool in enumerate(asked))
    check_distinct(offered, [f"tools[{index}].name" for index in range(len(offered))])
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise required("tool_choice.name")
        if all(tool.name != choice.name for tool in offered):
            raise undeclared("tool_choice.name", choice.name)
        return Tools(offered, "named", choice.name, parallel=parallel)
    if choice.name is not None:
        raise misplaced("tool_choice.name", "a choice of type tool")
    return with_mode("required" if choice.type == "any" else choice.type, offered, parallel=parallel)


def _tool(tool: InputTool, path: str, model: ServedModel) -> Tool:
    refuse_unbuilt(tool, UNBUILT_TOOL, f"{path}.")
    check_strict(tool.strict, f"{path}.strict", model)
    check_tool_name(tool.name, f"{path}.name")
    kind = tool.input_schema.get("type", "object")
    if kind != "object":
        where = f"{path}.input_schema.type"
        raise RequestError(f"{where}: the input of a tool is an object; the type must be object", param=where)
    return Tool(tool.name, tool.description, check_parameters(tool.input_schema, f"{path}.input_schema"))
