"""Values that a model writes as elements: text, or elements within elements."""

from __future__ import annotations

from typing import Any

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING
from flare.output.argument_types import convert
from flare.output.interface import OutputError
from flare.output.json_objects import ObjectReader, call_arguments
from flare.output.schema_parts import Schema, alternatives, item_schema, kinds, member_schema

ITEM = "item"


class Element:
    """A named value, text or members. The members of an array are named item."""

    __slots__ = ("members", "name", "text")

    def __init__(self, name: str | None) -> None:
        """`name` is None until a closing tag tells it."""
        self.name = name
        self.text = ""
        self.members: list[Element] = []


def arguments_of(element: Element, schema: Schema | None) -> str:
    """Returns the members of an element, converted by the schema of an object, as canonical JSON text.

    Raises OutputError for a name that is empty or occurs twice, and for the bounds of arguments.
    """
    values = _Values(schema)
    parts = values.parts(schema)
    text = call_arguments({name: values.value(member, found) for name, member, found in values.named(element, parts)})
    ObjectReader(limit=MAX_ARGUMENTS_BYTES, max_depth=MAX_NESTING).feed(
        text, 0
    )  # what texts were converted to may nest too
    return text


class _Values:
    """Converts elements by one schema, `root`."""

    def __init__(self, root: Schema | None) -> None:
        self._root = root
        self._parts: dict[int, list[Schema]] = {}  # by the id of a subschema of `root`, which lives as long

    def parts(self, schema: Any) -> list[Schema]:
        found = self._parts.get(id(schema))
        if found is None:
            found = self._parts[id(schema)] = alternatives(schema, self._root)
        return found

    def named(self, element: Element, parts: list[Schema]) -> list[tuple[str, Element, Any]]:
        """Returns name, element and schema of each member of an object."""
        names = [member.name or "" for member in element.members]
        if "" in names:
            raise OutputError("the model wrote a tool call that has an argument without a name")
        if len(set(names)) != len(names):
            raise OutputError("the model wrote a tool call that has the same member twice")
        return [(name, member, member_schema(parts, name)) for name, member in zip(names, element.members, strict=True)]

    def value(self, element: Element, schema: Any) -> Any:
        parts = self.parts(schema)
        types = kinds(parts)
        if not element.members:
            if not element.text.strip() and "string" not in types and not types.isdisjoint(("array", "object")):
                return [] if "array" in types else {}
            return convert(element.text, schema, self._root)
        if all(member.name == ITEM for member in element.members) and (
            "array" in types or "object" not in types or len(element.members) > 1
        ):
            return [self.value(item, item_schema(parts, i)) for i, item in enumerate(element.members)]
        return {name: self.value(member, found) for name, member, found in self.named(element, parts)}
