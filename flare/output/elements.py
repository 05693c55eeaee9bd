"""Values that a model writes as elements: text, or elements within elements."""

from __future__ import annotations

from typing import Any

from flare.output.argument_types import convert
from flare.output.faults import nameless_argument, repeated
from flare.output.json_objects import ObjectReader, call_arguments
from flare.output.schemas import Schema, Schemas

ITEM = "item"


class Element:
    """A named value, text or members. The members of an array are named item."""

    __slots__ = ("members", "name", "text")

    def __init__(self, name: str | None) -> None:
        """`name` is None until a closing tag tells it."""
        self.name = name
        self.text = ""
        self.members: list[Element] = []


def arguments_of(element: Element, schemas: Schemas) -> str:
    """Returns the members of an element, converted by the schema of an object, as canonical JSON text.

    Raises OutputError for a name that is empty or occurs twice, and for the bounds of arguments.
    """
    text = call_arguments(_members(element, schemas.root, schemas))
    ObjectReader().feed(text, 0)  # what texts were converted to may nest too
    return text


def _members(element: Element, schema: Schema, schemas: Schemas) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for member in element.members:
        if not member.name:
            raise nameless_argument()
        if member.name in values:
            raise repeated([*values, member.name])
        values[member.name] = _value(member, schemas.member(schema, member.name), schemas)
    return values


def _value(element: Element, schema: Schema, schemas: Schemas) -> Any:
    types = schemas.types(schema, element.text)
    if not element.members:
        if not element.text.strip() and "string" not in types and not types.isdisjoint(("array", "object")):
            return [] if "array" in types else {}
        return convert(element.text, schema, schemas)
    if all(member.name == ITEM for member in element.members) and (
        "array" in types or "object" not in types or len(element.members) > 1
    ):
        return [_value(item, schemas.item(schema, at), schemas) for at, item in enumerate(element.members)]
    return _members(element, schema, schemas)
