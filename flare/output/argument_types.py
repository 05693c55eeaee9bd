"""The values that parameters written as text stand for, by the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare.conversation import Tools
from flare.output.interface import OutputError
from flare.output.json_objects import read_object
from flare.output.rules import qualified


def schema_of(tools: Tools, name: str) -> Mapping[str, Any] | None:
    """Returns the schema of a tool's parameters, by the name that the model knows; None where it has none."""
    for tool in tools.offered:
        if qualified(tool.namespace, tool.name) == name:
            return {"properties": {"input": {"type": "string"}}} if tool.custom else tool.parameters
    return None


def convert(text: str, schema: Mapping[str, Any] | bool | None, root: Mapping[str, Any] | None) -> Any:
    """Returns the value that a parameter's text stands for, the text itself where it stands for none."""
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return text
    try:
        return read_object(f'{{"value":{text}}}')["value"]
    except (OutputError, KeyError):
        return text
