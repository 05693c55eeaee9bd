"""What endpoints check alike of the tools that a client offers, and of the calls that it sends back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tool, Tools, name_fault
from flare.errors import RequestError
from flare.protocols.refusals import no_tools, not_one_of, shown
from flare.served import ServedModel

MODES: Mapping[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


def check_taken(offered: bool, choice: object, model: ServedModel) -> None:
    """Raises RequestError where the model takes no tools and the request needs it to.

    Tools that must not be called (`choice` "none") ask for nothing: neither the model nor its syntax has to do with them.
    """
    if model.takes_tools or choice == "none":
        return
    if offered:
        raise no_tools("tools")
    if choice not in (None, "auto"):
        raise no_tools("tool_choice")


def with_mode(choice: str | None, tools: tuple[Tool, ...], *, parallel: bool) -> Tools:
    """Returns the tools under a choice of no tool in particular.

    Raises RequestError for another choice, and for one that demands a call where there is no tool.
    """
    mode = MODES.get("auto" if choice is None else choice)
    if mode is None:
        raise not_one_of("tool_choice", choice, MODES, "; to select a tool, send an object")
    if mode == "required" and not tools:
        text = "tool_choice: a call is required, and no tool is offered; fill tools"
        raise RequestError(text, param="tool_choice")
    return Tools(tools, mode, parallel=parallel) if tools else Tools()


def undeclared(param: str, name: str) -> RequestError:
    """The refusal of a choice of a tool that the request does not offer."""
    return RequestError(f"{param}: {shown(name)!r} is not declared in tools; select one that is", param=param)


def check_tool_name(name: str, path: str) -> str:
    """Returns the name of a tool, or of a call in a history. Raises RequestError for one that `name_fault` finds bad."""
    if fault := name_fault(name):
        raise RequestError(f"{path}: {shown(name)!r} is no name of a tool: {fault}; rename the tool", param=path)
    return name


def check_parameters(parameters: dict[str, Any] | None, path: str) -> dict[str, Any] | None:
    """Returns a tool's JSON Schema, which only guides. Raises RequestError when it nests too deeply."""
    check_nesting(parameters, path)
    return parameters


def check_strict(strict: bool | None, path: str, model: ServedModel) -> None:
    """Raises RequestError for a tool whose schema is to be enforced, unless the operator has relaxed that."""
    if strict and model.strict_tools != "relax":
        text = f"{path}: this server does not enforce schemas; send false, or start it with strict_tools relax"
        raise RequestError(text, param=path, code="unsupported_parameter")


def check_distinct(tools: Iterable[Tool], paths: Iterable[str]) -> None:
    """Raises RequestError for the second tool of a name within a namespace; `paths` are those of the names."""
    seen: set[tuple[str | None, str]] = set()
    for tool, path in zip(tools, paths, strict=True):
        key = (tool.namespace, tool.name)
        if key in seen:
            raise RequestError(f"{path}: there are two tools named {shown(tool.name)!r}", param=path)
        seen.add(key)


def check_arguments(arguments: str, path: str) -> str:
    """Returns the arguments of a call in a history, `{}` for blank ones: so clients replay calls without any.

    Raises RequestError unless they are the text of a JSON object within the bounds.
    """
    if len(arguments) > MAX_ARGUMENTS_BYTES or len(arguments.encode()) > MAX_ARGUMENTS_BYTES:
        raise RequestError(f"{path}: more than {MAX_ARGUMENTS_BYTES} bytes of UTF-8, the limit", param=path)
    if not arguments.strip():
        return "{}"
    try:
        value = msgspec.json.decode(arguments)
    except RecursionError:
        raise RequestError(f"{path}: nests deeper than {MAX_NESTING} levels, the limit", param=path) from None
    except msgspec.DecodeError:
        raise RequestError(f"{path}: {shown(arguments)!r} is not the text of a JSON object", param=path) from None
    if not isinstance(value, dict):
        raise RequestError(f"{path}: {shown(arguments)!r} is JSON, but not an object", param=path)
    check_nesting(value, path)
    return arguments


def check_nesting(value: Any, path: str, limit: int = MAX_NESTING) -> None:
    """Raises RequestError for arrays and objects that stand deeper inside each other than `limit`."""
    level = [value]
    for _ in range(limit):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return
    raise RequestError(f"{path}: nests deeper than {limit} levels, the limit", param=path)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
