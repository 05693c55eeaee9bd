"""Values of arguments that a model writes as plain text, converted by the tool's JSON Schema.

Formats that mark every argument by tags do not say whether `10` is a number or a text: only the schema does. Conversion is
best effort and never fails; what does not fit stays the text that the model wrote. Where several types are allowed, JSON of
one of them is taken as such, and text is what remains. Without a type (an undeclared tool, an unknown argument, a schema
that allows anything) the value stays text.
"""

from __future__ import annotations

from typing import Any

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tools
from flare.output.faults import nameless, nameless_argument, repeated
from flare.output.interface import OutputError
from flare.output.json_objects import ObjectReader, call_arguments, canonical, read_value
from flare.output.scanning import SPACE
from flare.output.schemas import Schema, Schemas, type_of

_NOTHING: Any = object()


class TypedArguments:
    """The arguments of one call, added in order as they are written."""

    __slots__ = ("_schemas", "_values", "name")

    def __init__(self, tools: Tools, name: str) -> None:
        """`name` is the one by which the model knows the tool. Raises OutputError for an empty one."""
        if not name.strip():
            raise nameless()
        self.name = name
        self._schemas = Schemas.of_tool(tools, name)
        self._values: dict[str, Any] = {}

    def add(self, name: str, text: str) -> None:
        """Raises OutputError for an argument without a name, and for one that is there already."""
        if not name.strip():
            raise nameless_argument()
        if name in self._values:
            raise repeated([*self._values, name])
        self._values[name] = convert(text, self._schemas.member(self._schemas.root, name), self._schemas)

    def text(self) -> str:
        """Returns all of them as canonical JSON text. Raises OutputError for too long ones."""
        return call_arguments(self._values)


def convert(text: str, schema: Schema, schemas: Schemas) -> Any:
    """Returns the value that a text stands for: JSON of a type that the schema allows, or the text itself.

    Numbers are as written (`msgspec.Raw` where Python would change them). Where no text is allowed, any JSON is taken, and
    the usual misspellings of null, booleans and numbers are read as what they mean. Never raises.
    """
    types = schemas.types(schema, text)
    if not types or types == {"string"}:
        return text
    written = text.strip(SPACE)
    value = _json(written)
    kind = None if value is _NOTHING else type_of(value)
    if kind in types or (kind == "integer" and "number" in types):
        return text if kind == "string" else value
    if "string" in types:
        return text
    meant = _meant(written, types)
    if meant is not _NOTHING:
        return meant
    return text if value is _NOTHING else value


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
