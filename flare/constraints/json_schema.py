"""JSON Schemas that a request brings: what of them can be kept is passed on, everything else is refused by its place.

llguidance enforces schemas while a model writes. It takes no notice of words that it does not know, and some that it knows
take it very long together; neither gets past `checked_schema`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flare.constraints.exclusion import pass_exclusive
from flare.constraints.meetings import check_meetings
from flare.constraints.patterns import without_nul
from flare.constraints.references import (
    SCHEMA_LISTS,
    SCHEMA_TABLES,
    SCHEMA_WORDS,
    as_uri,
    every_schema,
    is_of_schema,
    resolve,
)
from flare.errors import RequestError
from flare.grammar import check_regex

MAX_SCHEMA = 256 << 10
"""Most bytes of UTF-8 of a schema, written compactly."""

MAX_DEPTH = 64
"""Arrays and objects within each other in a schema."""

MAX_SCHEMAS = 5000
"""Schemas within a schema."""

MAX_MEMBERS = 500
"""Members that one object's schema names: each is several open alternatives in every step."""

MAX_ALTERNATIVES = 200
"""Schemas of one `oneOf`: each is compared with each."""

MAX_PATTERNS = 20
"""Patterns of all `patternProperties` of a schema: those of an object are compared each with each, a millisecond a pair."""

MAX_VALUES = 10_000
"""Values of all `enum`s of a schema."""

MAX_BOUND = 2**53
"""What the bounds of numbers are held to on both sides of zero: beyond it JSON's readers disagree about numbers."""

MAX_COUNT = 1_000_000
"""The most of `minLength`, `maxItems` and their like."""

MAX_STEPS = 5000
"""`multipleOf` in units of its last decimal place: so many remainders are told apart."""

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""The values of `format` that are enforced. Of dates the shape is, not the calendar."""

DESCRIPTIVE_FORMATS = frozenset(("binary", "double", "float", "int32", "int64", "password", "path"))
"""Values of `format` by which OpenAPI and generators of schemas describe a type: they are passed over."""

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

ANNOTATIONS = frozenset(
    (
        "$comment",
        "$schema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
    )
)
"""Words that describe and do not constrain; so do all that begin with `x-`. None is passed on."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "nullable": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values of words that are not enforced, by which they ask for nothing."""

_COUNTS = frozenset(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"))
_BOUNDS = frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"))
_OTHERS = frozenset(("$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type"))

KEYWORDS = SCHEMA_WORDS | SCHEMA_LISTS | SCHEMA_TABLES | _COUNTS | _BOUNDS | _OTHERS
"""The words that are enforced."""


def checked_schema(schema: Any, field: str) -> dict[str, Any]:
    """Returns the schema that is enforced: the same one without annotations. `field` is where the request has it.

    Raises RequestError naming the place of the first word that is not enforced, or that is too much.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        wrong = "false, which no value is of" if schema is False else "not a schema"
        raise RequestError(f"{field}: {wrong}; send a JSON Schema, which is an object", param=field)
    _check_depth(schema, field)
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA:
        raise _refused(field, f"{size} bytes of UTF-8, the limit is {MAX_SCHEMA}; send a smaller schema")
    checked = _Checker(schema, field).root()
    check_meetings(checked, field)
    pass_exclusive(checked)
    _spell_names_out(checked)
    return checked


def _spell_names_out(schema: dict[str, Any]) -> None:
    """Says of free names beside `properties` that they match a pattern, in place: llguidance takes escapes such as `\\u0061`
    for free names, and none in names of a pattern, so that an escaped one could stand for one of `properties`."""
    schemas = list(every_schema(schema))
    if any("patternProperties" in found for found in schemas):
        return  # of two patterns that the same name may match nothing is known
    for found in schemas:
        if found.get("properties") and found.get("additionalProperties", True) is True:
            found |= {"patternProperties": {"": {}}, "additionalProperties": False}


def patterns(schema: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yields the place of each pattern of a schema that has been checked, and the pattern; `field` is where the request has
    the schema."""
    pending = [(schema, field)]
    while pending:
        part, place = pending.pop()
        if not isinstance(part, dict):
            continue
        for word, value in part.items():
            inner = f"{place}.{word}"
            if word == "pattern":
                yield inner, value
            elif word in SCHEMA_WORDS:
                pending.append((value, inner))
            elif word in SCHEMA_LISTS:
                pending += [(item, f"{inner}[{index}]") for index, item in enumerate(value)]
            elif word in SCHEMA_TABLES:
                named = [(name, f"{inner}.{_shown(name)}") for name in value]
                pending += [(value[name], there) for name, there in named]
                if word == "patternProperties":
                    yield from ((there, name) for name, there in named)


def _refused(place: str, text: str, code: str | None = None) -> RequestError:
    return RequestError(f"{place}: {text}", param=place, code=code)


def _check_depth(schema: Any, field: str) -> None:
    pending = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _refused(field, f"nests arrays and objects more than {MAX_DEPTH} levels deep; flatten it")
        inner = value.values() if isinstance(value, dict) else value
        pending += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]


class _Checker:
    """One walk over a schema."""

    def __init__(self, schema: dict[str, Any], field: str) -> None:
        self._whole = schema
        self._field = field
        self._schemas = MAX_SCHEMAS
        self._values = MAX_VALUES
        self._patterns = MAX_PATTERNS

    def root(self) -> dict[str, Any]:
        schema = {name: value for name, value in self._whole.items() if name != "$id"}
        return self._schema(schema, self._field)

    def _any(self, schema: Any, place: str) -> dict[str, Any] | bool:
        return schema if isinstance(schema, bool) else self._schema(schema, place)

    def _schema(self, schema: Any, place: str) -> dict[str, Any]:
        if not isinstance(schema, dict):
            raise _refused(place, f"{_kind(schema)} is not a schema; send an object, true or false")
        self._schemas -= 1
        if self._schemas < 0:
            raise _refused(self._field, f"holds more than {MAX_SCHEMAS} schemas; send a smaller one")
        return {
            word: self._word(word, value, f"{place}.{_shown(word)}")
            for word, value in schema.items()
            if word not in ANNOTATIONS and not word.startswith("x-") and not _asks_nothing(word, value)
        }

    def _word(self, word: str, value: Any, place: str) -> Any:
        """Returns the value of a word as it is passed on."""
        if word not in KEYWORDS:
            raise _refused(place, f"not supported in schemas of answers; {_instead(word)}", "unsupported_parameter")
        if word in SCHEMA_WORDS:
            if word == "items" and isinstance(value, list):
                raise _refused(place, "an array of schemas is not supported; send it as prefixItems")
            return self._any(value, place)
        if word == "oneOf" and isinstance(value, list) and len(value) > MAX_ALTERNATIVES:
            raise _refused(place, f"{len(value)} schemas, the limit is {MAX_ALTERNATIVES}; send fewer, or anyOf")
        if word in SCHEMA_LISTS:
            return [self._any(item, f"{place}[{i}]") for i, item in enumerate(_listed(value, place))]
        if word in SCHEMA_TABLES:
            return self._table(word, value, place)
        if word in _COUNTS:
            return _count(value, place)
        if word in _BOUNDS:
            return _bound(value, place)
        check = getattr(self, f"_{word.removeprefix('$')}")
        return check(value, place)

    def _table(self, word: str, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _refused(place, f"expected an object of schemas, got {_kind(value)}")
        if word == "properties" and len(value) > MAX_MEMBERS:
            raise _refused(place, f"{len(value)} members, the limit is {MAX_MEMBERS}; send fewer")
        if word == "patternProperties":
            self._patterns -= len(value)
            if self._patterns < 0:
                raise _refused(place, f"the schema has more than {MAX_PATTERNS} of these patterns; send fewer")
            for name in value:
                check_regex(name, f"{place}.{_shown(name)}")
        checked = {name: self._any(item, f"{place}.{_shown(name)}") for name, item in value.items()}
        return checked if word != "patternProperties" else {without_nul(name): item for name, item in checked.items()}

    def _type(self, value: Any, place: str) -> Any:
        for name in value if isinstance(value, list) else [value]:
            if name not in TYPES:
                shown = repr(name[:40]) if isinstance(name, str) else _kind(name)
                raise _refused(place, f"{shown} is not one of {', '.join(TYPES)}")
        if value == []:
            raise _refused(place, "names no type; name one or leave it out")
        return value

    def _enum(self, value: Any, place: str) -> Any:
        self._values -= len(_listed(value, place))
        if self._values < 0:
            raise _refused(place, f"the schema lists more than {MAX_VALUES} values; list fewer")
        for index, item in enumerate(value):
            _check_numbers(item, f"{place}[{index}]")
        return value

    def _const(self, value: Any, place: str) -> Any:
        _check_numbers(value, place)
        return value

    def _required(self, value: Any, place: str) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _refused(place, "expected an array of names")
        if len(value) > MAX_MEMBERS:
            raise _refused(place, f"{len(value)} members, the limit is {MAX_MEMBERS}; send fewer")
        return value

    def _pattern(self, value: Any, place: str) -> Any:
        if not isinstance(value, str):
            raise _refused(place, f"expected a regular expression, got {_kind(value)}")
        check_regex(value, place)
        return without_nul(value)

    def _format(self, value: Any, place: str) -> Any:
        if not isinstance(value, str) or value not in FORMATS:
            shown = repr(value[:40]) if isinstance(value, str) else _kind(value)
            text = f"{shown} is not enforced; send {', '.join(sorted(FORMATS))}, or a pattern"
            raise _refused(place, text, "unsupported_parameter")
        return value

    def _multipleOf(self, value: Any, place: str) -> Any:
        if not _is_number(value) or value <= 0:
            raise _refused(place, f"expected a number greater than 0, got {_kind(value)}")
        digits = _decimal_digits(value)
        if digits is None or digits > MAX_STEPS:
            text = f"{value} has too many digits, its last decimal place must go into it at most {MAX_STEPS} times"
            raise _refused(place, f"{text}; send a rounder number")
        return value

    def _ref(self, value: Any, place: str) -> Any:
        if not isinstance(value, str) or (value != "#" and not value.startswith("#/")):
            shown = repr(value[:80]) if isinstance(value, str) else _kind(value)
            raise _refused(place, f"{shown} is not within this schema; send # or #/$defs/... and the like")
        found = resolve(self._whole, value)
        if not isinstance(found, dict | bool):
            raise _refused(place, f"{value[:80]!r} is no schema of this one; correct it")
        if not is_of_schema(value):
            raise _refused(place, f"{value[:80]!r} is a place where no schema stands; put the schema into $defs")
        return as_uri(value)


def _count(value: Any, place: str) -> int:
    if not _is_number(value) or value < 0 or value != int(value):
        raise _refused(place, f"expected a whole number of at least 0, got {_kind(value)}")
    if value > MAX_COUNT:
        raise _refused(place, f"{int(value)} is more than can be counted, the limit is {MAX_COUNT}; send less")
    return int(value)


def _bound(value: Any, place: str) -> Any:
    if not _is_number(value):
        raise _refused(place, f"expected a number, got {_kind(value)}")
    if abs(value) > MAX_BOUND:
        text = f"{value} is beyond {MAX_BOUND} on either side of 0, to which bounds are held"
        raise _refused(place, f"{text}; send a smaller one, or leave it out")
    return value


def _check_numbers(value: Any, place: str) -> None:
    """Raises RequestError for numbers of a listed value that would be written as others."""
    if _is_number(value) and abs(value) > MAX_BOUND:
        text = f"{value!r:.40} is beyond {MAX_BOUND} on either side of 0 and would be written as another number"
        raise _refused(place, f"{text}; send it as a string")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        _check_numbers(item, f"{place}[{name}]" if isinstance(value, list) else f"{place}.{_shown(name)}")


def _asks_nothing(word: str, value: Any) -> bool:
    if word == "format" and isinstance(value, str) and value in DESCRIPTIVE_FORMATS:
        return True
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(word, ()))


def _decimal_digits(value: float) -> int | None:
    """Returns a number in units of its last decimal place, None where it has too many."""
    for places in range(10):
        scaled = value * 10**places
        if scaled == math.floor(scaled):
            return int(scaled)
    return None


def _listed(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _refused(place, f"expected an array with at least one value, got {_kind(value)}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return f"the number {value!r:.40}"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= 80 else ascii(name[:80])[1:-1]


_INSTEAD = {
    "$anchor": "refer to the schema by #/$defs/...",
    "$dynamicRef": "refer to the schema by $ref",
    "$id": "leave it out, and refer to schemas by #/$defs/...",
    "additionalItems": "send items, behind prefixItems",
    "nullable": 'send "null" among the types',
}


def _instead(word: str) -> str:
    return _INSTEAD.get(word, "leave it out, or say it in the prompt")
