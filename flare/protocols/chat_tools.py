"""The tools of a Chat Completions request: what is offered, and which of it the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from flare.conversation import Tool, Tools
from flare.errors import RequestError
from flare.protocols.decoding import shown
from flare.protocols.tools import check_distinct, check_parameters, check_strict, check_tool_name
from flare.served import ServedModel

MODES: Mapping[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


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

    Raises RequestError for tools that cannot be offered, for a choice that they do not allow, and for any of it where
    the model takes no tools.
    """
    if not model.takes_tools:
        if offered:
            raise no_tools("tools")
        if choice not in (None, "none", "auto"):
            raise no_tools("tool_choice")
        return Tools()
    tools = tuple(_tool(tool, f"tools[{i}]", model) for i, tool in enumerate(offered or ()))
    check_distinct(tools, (f"tools[{i}].function.name" for i in range(len(tools))))
    all_parallel = parallel is not False
    if isinstance(choice, ToolChoice):
        return Tools(tools, "named", _selected(choice, tools), parallel=all_parallel)
    choice = "auto" if choice is None else choice
    mode = MODES.get(choice)
    if mode is None:
        text = f"tool_choice: {shown(choice)!r} is not one of {', '.join(MODES)}; to select a tool, send an object"
        raise RequestError(text, param="tool_choice")
    if mode == "required" and not tools:
        raise RequestError("tool_choice: 'required' needs at least one tool in tools", param="tool_choice")
    return Tools(tools, mode, parallel=all_parallel) if tools else Tools()


def no_tools(param: str) -> RequestError:
    """Returns the refusal of a field that only a model with tools takes."""
    return RequestError(f"{param}: this model takes no tools; leave it out", param=param, code="unsupported_parameter")


def _tool(tool: OfferedTool, path: str, model: ServedModel) -> Tool:
    _check_type(tool.type, path)
    if tool.custom is not None:
        raise RequestError(f"{path}.custom: a function tool has none; leave it out", param=f"{path}.custom")
    function = tool.function
    if function is None:
        raise RequestError(f"{path}.function: this field is required", param=f"{path}.function")
    path += ".function"
    check_strict(function.strict, f"{path}.strict", model)
    return Tool(
        check_tool_name(function.name, f"{path}.name"),
        function.description,
        check_parameters(function.parameters, f"{path}.parameters"),
    )


def _selected(choice: ToolChoice, tools: tuple[Tool, ...]) -> str:
    """Returns the name of the tool that must be called."""
    _check_type(choice.type, "tool_choice")
    for field in ("custom", "allowed_tools"):
        if getattr(choice, field) is not None:
            param = f"tool_choice.{field}"
            raise RequestError(f"{param}: goes with another type; leave it out", param=param)
    if choice.function is None:
        raise RequestError("tool_choice.function: this field is required", param="tool_choice.function")
    name = choice.function.name
    if all(tool.name != name for tool in tools):
        text = f"tool_choice.function.name: {shown(name)!r} is not declared in tools"
        raise RequestError(text, param="tool_choice.function.name")
    return name


def _check_type(kind: str, path: str) -> None:
    if kind != "function":
        text = f"{path}.type: {shown(kind)!r} is not supported here; only 'function' is"
        raise RequestError(text, param=f"{path}.type", code="unsupported_parameter")
