"""The tools of a Chat Completions request: what is offered, and which of it the model may or must call."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.conversation import Tool, Tools
from flare.protocols.refusals import foreign_type, misplaced, required
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


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the client runs. `response`, a schema of its result, is checked and not shown to the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    response: dict[str, Any] | None = None


class OfferedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A member of `tools`. `cache_control` is a hint without an effect."""

    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: Any = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` where it is an object."""

    type: str
    function: NamedFunction | None = None
    custom: Any = None
    allowed_tools: Any = None


def decode_tools(
    offered: list[OfferedTool] | None, choice: str | ToolChoice | None, parallel: bool | None, model: ServedModel
) -> Tools:
    """Returns the tools of a request; without any, the other two fields have nothing to act on.

    Raises RequestError for tools that cannot be offered, for a choice that they do not allow, and for what `check_taken`
    refuses.
    """
    check_taken(bool(offered), choice, model)
    tools = tuple(_tool(tool, f"tools[{i}]", model) for i, tool in enumerate(offered or ()))
    check_distinct(tools, (f"tools[{i}].function.name" for i in range(len(tools))))
    all_parallel = parallel is not False
    if isinstance(choice, ToolChoice):
        return Tools(tools, "named", _selected(choice, tools), parallel=all_parallel)
    return with_mode(choice, tools, parallel=all_parallel)


def _tool(tool: OfferedTool, path: str, model: ServedModel) -> Tool:
    if tool.type != "function":
        raise foreign_type(f"{path}.type", tool.type, "tools", ["function"])
    if tool.custom is not None:
        raise misplaced(f"{path}.custom", "a custom tool")
    function = tool.function
    if function is None:
        raise required(f"{path}.function")
    path += ".function"
    check_strict(function.strict, f"{path}.strict", model)
    return Tool(
        check_tool_name(function.name, f"{path}.name"),
        function.description,
        check_parameters(function.parameters, f"{path}.parameters"),
    )


def _selected(choice: ToolChoice, tools: tuple[Tool, ...]) -> str:
    """Returns the name of the tool that must be called."""
    if choice.type != "function":
        raise foreign_type("tool_choice.type", choice.type, "choices", ["function"])
    for field in ("custom", "allowed_tools"):
        if getattr(choice, field) is not None:
            raise misplaced(f"tool_choice.{field}", "a choice of another type")
    if choice.function is None:
        raise required("tool_choice.function")
    name = choice.function.name
    if all(tool.name != name for tool in tools):
        raise undeclared("tool_choice.function.name", name)
    return name
