"""From the tools of a Responses request to the neutral ones, and back for the response that shows them."""

from __future__ import annotations

from typing import Any

from flare.conversation import Tool, Tools, qualified
from flare.grammar import TextGrammar
from flare.protocols.fields import refuse_unbuilt
from flare.protocols.refusals import foreign_type, not_one_of, required, unsupported
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
from flare.protocols.tools import (
    check_distinct,
    check_parameters,
    check_strict,
    check_taken,
    check_tool_name,
    undeclared,
    with_mode,
)
from flare.served import ServedModel

SELECTABLE = ("function", "custom")
OFFERABLE = (*SELECTABLE, "namespace")


def decode_tools(request: ResponsesRequest, model: ServedModel) -> Tools:
    """Returns the tools of a request; without any, the fields beside them have nothing to act on.

    Raises RequestError for tools that cannot be offered, for a choice that they do not allow, and for what `check_taken`
    refuses.
    """
    choice = request.tool_choice
    check_taken(bool(request.tools), choice, model)
    found: list[tuple[Tool, str]] = []
    for index, tool in enumerate(request.tools or []):
        found += _tools(tool, f"tools[{index}]", model)
    tools = tuple(tool for tool, _ in found)
    check_distinct(tools, (path for _, path in found))
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, dict):
        selected = _selected(choice, tools)
        return Tools(tools, "named", selected.name, selected.namespace, parallel)
    return with_mode(choice, tools, parallel=parallel)


def _tools(
    value: dict[str, Any], path: str, model: ServedModel, namespace: str | None = None
) -> list[tuple[Tool, str]]:
    """Returns what one member of `tools` offers, each with the path of its name."""
    kind = value.get("type")
    if kind is None:
        raise required(f"{path}.type")
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
    raise foreign_type(f"{path}.type", kind, "tools", OFFERABLE if namespace is None else SELECTABLE)


def _grammar(value: dict[str, Any] | None, path: str) -> TextGrammar | None:
    """Returns the grammar of a custom tool's `format`, None for any text."""
    if value is None:
        return None
    kind = value.get("type")
    if kind not in ("text", "grammar"):
        raise not_one_of(f"{path}.type", kind, ("text", "grammar"))
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
        raise required("tool_choice.type")
    if kind not in SELECTABLE:
        raise foreign_type("tool_choice.type", kind, "choices", SELECTABLE)
    choice = converted(value, SelectedTool, "tool_choice")
    for tool in tools:
        names = ((tool.namespace, tool.name), (None, qualified(tool.namespace, tool.name)))
        if (choice.namespace, choice.name) in names and tool.custom == (kind == "custom"):
            return tool
    raise undeclared("tool_choice.name", choice.name)


def shown_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools as a response gives them back: as sent, with the members that readers expect of a function."""
    absent = {"description": None, "parameters": None, "strict": False}
    return [{**absent, **tool} if tool.get("type") == "function" else tool for tool in tools or []]
