"""Values of arguments that a model writes as plain text, converted by the tool's JSON Schema.

Formats that mark every argument by tags do not say whether `10` is a number or a text: only the schema does. Conversion is
best effort and never fails; what does not fit stays the text that the model wrote. Where several types are allowed, JSON of
one of them is taken as such, and text is what remains. Without a type (an undeclared tool, an unknown argument, a schema
that allows anything) the value stays text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tools, qualified
from flare.output.interface import OutputError
from flare.output.json_objects import ObjectReader, call_arguments, canonical, read_value

Schema = Mapping[str, Any] | bool | None

MAX_SCHEMAS = 1000
"""Most schemas that are looked at for one value; a schema that takes more says nothing about the type."""

MAX_LEVELS = 64
"""Most references and combinations within each other."""

_SPACE = " \t\n\r"
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

_NOTHING: Any = object()


class TypedArguments:
    """The arguments of one call, added in order as they are written."""

    __slots__ = ("_schema", "_values", "name")

    def __init__(self, tools: Tools, name: str) -> None:
        """`name` is the one by which the model knows the tool. Raises OutputError for an empty one."""
        if not name.strip():
            raise OutputError("the model wrote a tool call without a name")
        self.name = name
        self._schema = schema_of(tools, name)
        self._values: dict[str, Any] = {}

    def add(self, name: str, text: str) -> None:
        """Raises OutputError for an argument without a name, and for one that is there already."""
        if not name.strip():
            raise OutputError("the model wrote a tool call that has an argument without a name")
        if name in self._values:
            raise OutputError(f"the model wrote a tool call that has the argument {name[:80]!r} twice")
        self._values[name] = convert(text, property_schema(self._schema, name, self._schema), self._schema)

    def text(self) -> str:
        """Returns all of them as canonical JSON text. Raises OutputError for too long ones."""
        return call_arguments(self._values)


def schema_of(tools: Tools, name: str) -> Mapping[str, Any] | None:
    """Returns the schema of a tool's arguments, None for an undeclared tool and for one without a schema."""
    for tool in tools.offered:
        if qualified(tool.namespace, tool.name) == name:
            return tool.parameters
    return None


def property_schema(schema: Schema, name: str, root: Mapping[str, Any] | None) -> Schema:
    """Returns the schema of an object's member, wherever references and combinations put it; None if there is none.

    `root` is what references begin at.
    """
    named: list[Any] = []
    other: list[Any] = []
    pending: list[Any] = [schema]
    for _ in range(MAX_SCHEMAS):
        if not pending:
            break
        part = pending.pop()
        if not isinstance(part, Mapping):
            continue
        members, rest = part.get("properties"), part.get("additionalProperties")
        if isinstance(members, Mapping) and name in members:
            named.append(members[name])
        elif isinstance(rest, Mapping):
            other.append(rest)
        if "$ref" in part:
            pending.append(_resolve(part["$ref"], root))
        for combination in ("allOf", "anyOf", "oneOf"):
            if len(pending) < MAX_SCHEMAS:
                pending += _schemas(part.get(combination))
    found = named or other
    if len(found) < 2:
        return found[0] if found else None
    return {"anyOf": found}


def convert(text: str, schema: Schema, root: Mapping[str, Any] | None) -> Any:
    """Returns the value that a text stands for: JSON of a type that the schema allows, or the text itself.

    Numbers are as written (`msgspec.Raw` where Python would change them). Where no text is allowed, any JSON is taken, and
    the usual misspellings of null, booleans and numbers are read as what they mean. Never raises.
    """
    types = _Types(text, root).of(schema, MAX_LEVELS)
    if not types or types == {"string"}:
        return text
    written = text.strip(_SPACE)
    value = _json(written)
    kind = None if value is _NOTHING else _kind(value)
    if kind in types or (kind == "integer" and "number" in types):
        return text if kind == "string" else value
    if "string" in types:
        return text
    meant = _meant(written, types)
    if meant is not _NOTHING:
        return meant
    return text if value is _NOTHING else value


class _Types:
    """Which types a schema allows for one text; None says nothing of types."""

    __slots__ = ("_left", "_root", "_text")

    def __init__(self, text: str, root: Mapping[str, Any] | None) -> None:
        self._text = text
        self._root = root
        self._left = MAX_SCHEMAS

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
        for part in _schemas(schema.get("allOf")):
            yield self.of(part, levels - 1)
        for combination in ("anyOf", "oneOf"):
            alternatives = [self.of(part, levels - 1) for part in _schemas(schema.get(combination))]
            if alternatives:
                yield frozenset().union(*alternatives) if None not in alternatives else None  # type: ignore[arg-type]

    def _of_values(self, values: list[Any]) -> frozenset[str]:
        """The types of some values; of a text that is one of them, only its own."""
        self._left -= len(values) // 100
        if self._text in values:
            return frozenset({"string"})
        return frozenset(map(_kind, values[:MAX_SCHEMAS]))


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


def _schemas(value: Any) -> list[Any]:
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


def _json(written: str) -> Any:
    """Returns the value of a JSON text, `_NOTHING` if it is none or one that a call's arguments cannot hold."""
    try:
        if written.startswith(("{", "[")):
            reader = ObjectReader(limit=MAX_ARGUMENTS_BYTES, max_depth=MAX_NESTING - 1)
            if reader.feed(written, 0) != len(written) or not reader.complete:
                return _NOTHING
        value = read_value(written)
        if "\\u" in written:
            canonical({"": value})  # half a surrogate pair
    except OutputError:
        return _NOTHING
    return value


def _kind(value: Any) -> str:
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


def _meant(written: str, types: frozenset[str]) -> Any:
    """Returns what other spellings mean, `_NOTHING` for all else. No text is among the types."""
    word = written.lower() if len(written) < 6 else ""
    if "null" in types and word in ("null", "none"):
        return None
    if "boolean" in types:
        if word in ("true", "false"):
            return word == "true"
        if word in ("0", "1"):
            return word == "1"
    if types & {"integer", "number"} and written[:1] in tuple("+-0"):
        sign = "-" if written.startswith("-") else ""
        digits = written[written[0] in "+-" :]
        value = _json(sign + (digits.lstrip("0") if digits.strip("0") else "0"))
        if digits[:1].isdecimal() and value is not _NOTHING:
            return value
    return _NOTHING
