"""From the tools of a Responses request to the neutral ones, and back for the response that shows them."""

from __future__ import annotations

from typing import Any, Literal

from flare.conversation import Tool, Tools
from flare.errors import RequestError
from flare.grammar import TextGrammar
from flare.output.rules import qualified
from flare.protocols.chat_tools import MODES, no_tools
from flare.protocols.decoding import shown
from flare.protocols.fields import refuse_unbuilt, unsupported
from flare.protocols.responses_fields import (
    UNBUILT_TOOL,
    ClientTool,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    NamespaceTool,
    ResponsesRequest,
    SelectedTool,
    TextFormat,
    converted,
)
from flare.protocols.tools import check_distinct, check_parameters, check_strict, check_tool_name
from flare.served import ServedModel

SELECTABLE = ("function", "custom")


def decode_tools(request: ResponsesRequest, model: ServedModel) -> Tools:
    """Returns the tools of a request; without any, the fields beside them have nothing to act on.

    Raises RequestError for tools that cannot be offered, for a choice that they do not allow, and for any of it where
    the model takes no tools.
    """
    choice = request.tool_choice
    if not model.takes_tools:
        if request.tools:
            raise no_tools("tools")
        if choice not in (None, "none", "auto"):
            raise no_tools("tool_choice")
        return Tools()
    found: list[tuple[Tool, str]] = []
    for index, tool in enumerate(request.tools or []):
        found += _tools(tool, f"tools[{index}]", model)
    tools = tuple(tool for tool, _ in found)
    check_distinct(tools, (path for _, path in found))
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, dict):
        selected = _selected(choice, tools)
        return Tools(tools, "named", selected.name, selected.namespace, parallel)
    mode: Literal["auto", "none", "required"] | None = MODES.get("auto" if choice is None else choice)
    if mode is None:
        text = f"tool_choice: {shown(str(choice))!r} is not one of {', '.join(MODES)}; to select a tool, send an object"
        raise RequestError(text, param="tool_choice")
    if mode == "required" and not tools:
        raise RequestError("tool_choice: 'required' needs at least one tool in tools", param="tool_choice")
    return Tools(tools, mode, parallel=parallel) if tools else Tools()


def _tools(
    value: dict[str, Any], path: str, model: ServedModel, namespace: str | None = None
) -> list[tuple[Tool, str]]:
    """Returns what one member of `tools` offers, each with the path of its name."""
    kind = value.get("type")
    if kind is None:
        raise RequestError(f"{path}.type: this field is required", param=f"{path}.type")
    if kind == "function":
        function = converted(value, FunctionTool, path)
        check_strict(function.strict, f"{path}.strict", model)
        name = _name(function, path)
        parameters = check_parameters(function.parameters, f"{path}.parameters")
        return [(Tool(name, function.description, parameters, namespace), f"{path}.name")]
    if kind == "custom":
        custom = converted(value, CustomTool, path)
        name = _name(custom, path)
        grammar = _grammar(custom.format, f"{path}.format")
        return [(Tool(name, custom.description, None, namespace, True, grammar), f"{path}.name")]
    if kind == "namespace" and namespace is None:
        space = converted(value, NamespaceTool, path)
        name = check_tool_name(space.name, f"{path}.name")
        found: list[tuple[Tool, str]] = []
        for index, tool in enumerate(space.tools):
            found += _tools(tool, f"{path}.tools[{index}]", model, name)
        return found
    text = f"{path}.type: {shown(str(kind))!r} tools are not run here; only function, custom and namespace are"
    raise RequestError(text, param=f"{path}.type", code="unsupported_parameter")


def _grammar(value: dict[str, Any] | None, path: str) -> TextGrammar | None:
    """Returns the grammar of a custom tool's `format`, None for any text."""
    if value is None:
        return None
    kind = value.get("type")
    if kind not in ("text", "grammar"):
        text = f"{path}.type: {shown(str(kind))!r} is not one of 'text', 'grammar'"
        raise RequestError(text, param=f"{path}.type")
    if kind == "text":
        converted(value, TextFormat, path)
        return None
    grammar = converted(value, GrammarFormat, path)
    return TextGrammar(grammar.syntax, grammar.definition, field=f"{path}.definition")


def _name(tool: ClientTool, path: str) -> str:
    refuse_unbuilt(tool, UNBUILT_TOOL, f"{path}.")
    if tool.asynchronous not in (None, False):
        raise unsupported(f"{path}.async")
    return check_tool_name(tool.name, f"{path}.name")


def _selected(value: dict[str, Any], tools: tuple[Tool, ...]) -> Tool:
    """Returns the tool that `tool_choice` selects: by its name and namespace, or by the name that the model knows."""
    kind = value.get("type")
    if kind is None:
        raise RequestError("tool_choice.type: this field is required", param="tool_choice.type")
    if kind not in SELECTABLE:
        text = f"tool_choice.type: {shown(str(kind))!r} is not supported here; only {' and '.join(SELECTABLE)} are"
        raise RequestError(text, param="tool_choice.type", code="unsupported_parameter")
    choice = converted(value, SelectedTool, "tool_choice")
    for tool in tools:
        names = ((tool.namespace, tool.name), (None, qualified(tool.namespace, tool.name)))
        if (choice.namespace, choice.name) in names and tool.custom == (kind == "custom"):
            return tool
    text = f"tool_choice.name: no {kind} {shown(choice.name)!r} is declared in tools"
    raise RequestError(text, param="tool_choice.name")


def shown_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools as a response gives them back: as sent, with the members that readers expect of a function."""
    absent = {"description": None, "parameters": None, "strict": False}
    return [{**absent, **tool} if tool.get("type") == "function" else tool for tool in tools or []]
