"""What a tool's JSON Schema says of a value: its types, and the schemas of its members and items.

References are followed and combinations taken apart, as far as `MAX_SCHEMAS` and `MAX_LEVELS` go: schemas are the client's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from flare.conversation import Tools, qualified

Schema = Mapping[str, Any] | bool | None

MAX_SCHEMAS = 1000
"""Most schemas that are looked at for one value; a schema that takes more says nothing about the type."""

MAX_LEVELS = 64
"""Most references and combinations within each other."""

_TYPES = {
    "null": "null",
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "object": "object",
    "array": "array",
    "string": "string",
    # No JSON Schema, but what people write in tools for models.
    "none": "null",
    "bool": "boolean",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "dict": "object",
    "list": "array",
    "str": "string",
    "text": "string",
}
_KEYWORDS = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
"""What a schema without a type speaks of."""


class Schemas:
    """One tool's schema, `root`, where all references begin, and what has been found in it for the values of one call."""

    __slots__ = ("_kept", "_parts", "_types", "root")

    def __init__(self, root: Mapping[str, Any] | None) -> None:
        self.root = root
        # By identity: what is in `root` lives as long as it does, and what is made here is kept.
        self._types: dict[int, frozenset[str]] = {}
        self._parts: dict[int, list[Mapping[str, Any]]] = {}
        self._kept: dict[tuple[int, str | int], Schema] = {}

    @staticmethod
    def of_tool(tools: Tools, name: str) -> Schemas:
        """The schema of a tool's arguments; it says nothing of an undeclared tool, and of one without a schema."""
        for tool in tools.offered:
            if qualified(tool.namespace, tool.name) == name:
                return Schemas(tool.parameters)
        return Schemas(None)

    def types(self, schema: Schema, text: str) -> frozenset[str]:
        """Returns the types that a schema allows for the value that `text` stands for; none where it says nothing."""
        found = self._types.get(id(schema))
        if found is None:
            read = _Types(text, self.root)
            found = read.of(schema, MAX_LEVELS) or frozenset()
            if not read.depends_on_text:
                self._types[id(schema)] = found
        return found

    def member(self, schema: Schema, name: str) -> Schema:
        """Returns the schema of an object's member, None if there is none: any of those that speak of it by name, or
        else of those for all other members."""
        key = (id(schema), name)
        if key not in self._kept:
            parts = self._of_value(schema)
            tables = [part["properties"] for part in parts if isinstance(part.get("properties"), Mapping)]
            named = [table[name] for table in tables if name in table]
            self._kept[key] = _any(named or _mappings(parts, "additionalProperties"))
        return self._kept[key]

    def item(self, schema: Schema, index: int) -> Schema:
        """Returns the schema of an array's item, None if there is none."""
        parts = self._of_value(schema)
        firsts = [part["prefixItems"] for part in parts if isinstance(part.get("prefixItems"), list)]
        key = (id(schema), min(index, max(map(len, firsts), default=0)))
        if key not in self._kept:
            placed = [first[index] for first in firsts if index < len(first)]
            self._kept[key] = _any(placed or _mappings(parts, "items"))
        return self._kept[key]

    def _of_value(self, schema: Schema) -> list[Mapping[str, Any]]:
        """Returns the schemas that may describe the same value."""
        found = self._parts.get(id(schema))
        if found is not None:
            return found
        found = self._parts[id(schema)] = []
        seen: set[int] = set()
        pending: list[Any] = [schema]
        while pending and len(seen) < MAX_SCHEMAS:
            part = pending.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            found.append(part)
            more = [_resolve(part["$ref"], self.root)] if "$ref" in part else []
            for combination in ("allOf", "anyOf", "oneOf"):
                more += _listed(part.get(combination))
            pending += reversed(more[:MAX_SCHEMAS])
        return found


class _Types:
    """Which types a schema allows for one text; None says nothing of types."""

    __slots__ = ("_left", "_root", "_text", "depends_on_text")

    def __init__(self, text: str, root: Mapping[str, Any] | None) -> None:
        self._text = text
        self._root = root
        self._left = MAX_SCHEMAS
        self.depends_on_text = False

    def of(self, schema: Any, levels: int) -> frozenset[str] | None:
        self._left -= 1
        if not isinstance(schema, Mapping) or levels == 0 or self._left < 0:
            return None
        types: frozenset[str] | None = None
        for some in self._constraints(schema, levels):
            if some is not None:
                types = some if types is None else _both(types, some)
        if types is None:
            types = frozenset(kind for keyword, kind in _KEYWORDS.items() if keyword in schema) or None
        if types is not None and schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _constraints(self, schema: Mapping[str, Any], levels: int) -> Iterator[frozenset[str] | None]:
        """What must hold together."""
        if "type" in schema:
            yield _named(schema["type"])
        if isinstance(values := schema.get("enum"), list):
            yield self._of_values(values)
        if "const" in schema:
            yield self._of_values([schema["const"]])
        if "$ref" in schema:
            yield self.of(_resolve(schema["$ref"], self._root), levels - 1)
        for part in _listed(schema.get("allOf")):
            yield self.of(part, levels - 1)
        for combination in ("anyOf", "oneOf"):
            alternatives = [self.of(part, levels - 1) for part in _listed(schema.get(combination))]
            if alternatives:
                yield frozenset().union(*alternatives) if None not in alternatives else None  # type: ignore[arg-type]

    def _of_values(self, values: list[Any]) -> frozenset[str]:
        """The types of some values; of a text that is one of them, only its own."""
        self._left -= len(values) // 100
        kinds = frozenset(map(type_of, values[:MAX_SCHEMAS]))
        if kinds != {"string"} or len(values) > MAX_SCHEMAS:
            self.depends_on_text = True
            if self._text in values:
                return frozenset({"string"})
        return kinds


def type_of(value: Any) -> str:
    """Returns the type of a JSON value, see `json_objects.read_value`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, msgspec.Raw):
        return "number" if any(char in b".eE" for char in bytes(value)) else "integer"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _mappings(parts: list[Mapping[str, Any]], keyword: str) -> list[Any]:
    return [part[keyword] for part in parts if isinstance(part.get(keyword), Mapping)]


def _any(schemas: list[Any]) -> Schema:
    """Returns the schema of what fits any of some."""
    if len(schemas) < 2:
        return schemas[0] if schemas else None
    return {"anyOf": schemas}


def _named(names: Any) -> frozenset[str] | None:
    """The types of a `type` keyword; None where one is unknown."""
    listed = names if isinstance(names, list) else [names]
    types = {_TYPES.get(name.strip().lower()) if isinstance(name, str) else None for name in listed[:MAX_SCHEMAS]}
    return frozenset(kind for kind in types if kind is not None) if types and None not in types else None


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types that are in both; every integer is a number."""
    common = one & other
    if ("integer" in one and "number" in other) or ("number" in one and "integer" in other):
        common |= {"integer"}
    return common


def _listed(value: Any) -> list[Any]:
    return value[:MAX_SCHEMAS] if isinstance(value, list) else []


def _resolve(reference: Any, root: Mapping[str, Any] | None) -> Any:
    """Returns what a reference within the schema points at, None for any other."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and len(step) < 9 and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place
