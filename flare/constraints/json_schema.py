"""JSON Schemas that a request brings: what of them can be kept is passed on, everything else is refused by its place.

llguidance enforces schemas while a model writes. It takes no notice of words that it does not know, and some that it knows
take it very long together; neither gets past `checked_schema`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from flare.errors import RequestError

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

MAX_STEPS = 10_000
"""`multipleOf` in units of its last decimal place: so many remainders are told apart."""

MAX_MEETING = 2
"""Patterns and formats that one value has to match together: how long it takes to join them grows with the power of their
number."""

MAX_MEETINGS = 10_000
"""Schemas that are looked at to find what holds for the same value."""

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""The values of `format` that are enforced. Of dates the shape is, not the calendar."""

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

NEUTRAL: Mapping[str, Any] = {
    "nullable": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
"""Values of words that are not enforced, by which they ask for nothing."""

_SCHEMA = frozenset(("additionalProperties", "items"))
_SCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_SCHEMA_TABLES = frozenset(("$defs", "definitions", "patternProperties", "properties"))
_COUNTS = frozenset(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"))
_BOUNDS = frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"))
_OTHERS = frozenset(("$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type"))

KEYWORDS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_TABLES | _COUNTS | _BOUNDS | _OTHERS
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
    _Meetings(checked, field).check()
    return checked


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
            if word not in ANNOTATIONS and not word.startswith("x-") and (value is not NEUTRAL.get(word, KEYWORDS))
        }

    def _word(self, word: str, value: Any, place: str) -> Any:
        """Returns the value of a word as it is passed on."""
        if word not in KEYWORDS:
            raise _refused(place, f"not supported in schemas of answers; {_instead(word)}", "unsupported_parameter")
        if word in _SCHEMA:
            if word == "items" and isinstance(value, list):
                raise _refused(place, "an array of schemas is not supported; send it as prefixItems")
            return self._any(value, place)
        if word == "oneOf" and isinstance(value, list) and len(value) > MAX_ALTERNATIVES:
            raise _refused(place, f"{len(value)} schemas, the limit is {MAX_ALTERNATIVES}; send fewer, or anyOf")
        if word in _SCHEMA_LISTS:
            return [self._any(item, f"{place}[{i}]") for i, item in enumerate(_listed(value, place))]
        if word in _SCHEMA_TABLES:
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
        return {name: self._any(item, f"{place}.{_shown(name)}") for name, item in value.items()}

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
        return value

    def _const(self, value: Any, place: str) -> Any:
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
        return value

    def _format(self, value: Any, place: str) -> Any:
        if value not in FORMATS:
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
        if not self._holds_schemas(value):
            raise _refused(place, f"{value[:80]!r} is a place where no schema stands; put the schema into $defs")
        return value

    def _holds_schemas(self, reference: str) -> bool:
        """Whether a reference goes through words that hold schemas, so that what it points at is checked too."""
        steps = iter(_steps(reference))
        for word in steps:
            if word in _SCHEMA:
                continue
            if word not in _SCHEMA_LISTS and word not in _SCHEMA_TABLES:
                return False
            if next(steps, None) is None:
                return False
        return True


class _Node(NamedTuple):
    """What holds for one value: a schema's own words, all of several nodes, or one of several."""

    kind: Literal["own", "all", "one"]
    schema: Mapping[str, Any] = {}
    parts: tuple[_Node, ...] = ()


class _Meetings:
    """Finds patterns that hold for the same value: those of `allOf` and beside `$ref`, there and in what such schemas say of
    the same member or item."""

    def __init__(self, schema: dict[str, Any], field: str) -> None:
        self._whole = schema
        self._field = field
        self._left = MAX_MEETINGS
        self._seen: set[frozenset[int]] = set()

    def check(self) -> None:
        schemas: list[Any] = [self._whole]
        met = []
        while schemas:
            schema = schemas.pop()
            if isinstance(schema, dict):
                met.append(self._all([schema]))
                schemas += _inner(schema)
        while met:
            node = met.pop()
            matches, multiples = self._weight(node)
            if matches > MAX_MEETING:
                text = f"{matches} patterns and formats hold for the same value, the limit is {MAX_MEETING}; join them"
                raise _refused(self._field, text)
            if multiples > 1:
                raise _refused(self._field, f"{multiples} multipleOf hold for the same value; send one of them")
            own = list(_own(node))
            key = frozenset(map(id, own))
            if len(own) < 2 or key in self._seen:
                continue  # what stands within a lone schema is checked for itself
            self._seen.add(key)
            names = {name for schema in own for name in schema.get("properties", ())}
            met += [self._within(node, partial(_of_member, name=name)) for name in sorted(names)]
            met.append(self._within(node, _of_others))
            most = max(len(schema.get("prefixItems", ())) for schema in own)
            met += [self._within(node, partial(_of_item, index=index)) for index in range(most + 1)]

    def _all(self, schemas: Iterable[Any], around: frozenset[int] = frozenset()) -> _Node:
        """Returns what holds where all of some schemas hold; a schema within itself adds nothing to it."""
        parts: list[_Node] = []
        for schema in schemas:
            if not isinstance(schema, dict) or id(schema) in around:
                continue
            self._left -= 1
            if self._left < 0:
                raise _refused(self._field, "joins too many schemas by allOf, anyOf and $ref; send a simpler one")
            inner = around | {id(schema)}
            joined = [*schema.get("allOf", ()), *([resolve(self._whole, schema["$ref"])] if "$ref" in schema else [])]
            parts += [_Node("own", schema), self._all(joined, inner)]
            for word in ("anyOf", "oneOf"):
                alternatives = tuple(self._all([item], inner) for item in schema.get(word, ()))
                parts.append(_Node("one", parts=alternatives))
        return _Node("all", parts=tuple(parts))

    def _within(self, node: _Node, step: Callable[[Mapping[str, Any]], Iterable[Any]]) -> _Node:
        """Returns what holds for a member or an item of the value; `step` finds it in a schema."""
        if node.kind == "own":
            return self._all(step(node.schema))
        return _Node(node.kind, parts=tuple(self._within(part, step) for part in node.parts))

    def _weight(self, node: _Node) -> tuple[int, int]:
        """Returns how many patterns, and how many multiples, may have to be matched together."""
        if node.kind == "own":
            return sum(word in node.schema for word in ("pattern", "format")), int("multipleOf" in node.schema)
        weights = [self._weight(part) for part in node.parts]
        join = sum if node.kind == "all" else partial(max, default=0)
        return join(one for one, _ in weights), join(other for _, other in weights)


def _own(node: _Node) -> Iterator[Mapping[str, Any]]:
    if node.kind == "own":
        yield node.schema
    for part in node.parts:
        yield from _own(part)


def resolve(schema: Any, reference: str) -> Any:
    """Returns what a reference within a schema points at, None where that is nothing."""
    for step in _steps(reference):
        if isinstance(schema, Mapping):
            schema = schema.get(step)
        elif isinstance(schema, list) and step.isdecimal() and len(step) < 9 and int(step) < len(schema):
            schema = schema[int(step)]
        else:
            return None
    return schema


def _steps(reference: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[1:].split("/")[1:]]


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """Returns the schemas right within a schema."""
    for word, value in schema.items():
        if word in _SCHEMA:
            yield value
        elif word in _SCHEMA_LISTS:
            yield from value
        elif word in _SCHEMA_TABLES:
            yield from value.values()


def _of_member(schema: Mapping[str, Any], name: str) -> Iterator[Any]:
    named = schema.get("properties", {})
    if name in named:
        yield named[name]
        yield from schema.get("patternProperties", {}).values()
    else:
        yield from _of_others(schema)


def _of_others(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from schema.get("patternProperties", {}).values()
    if "additionalProperties" in schema:
        yield schema["additionalProperties"]


def _of_item(schema: Mapping[str, Any], index: int) -> Iterator[Any]:
    firsts = schema.get("prefixItems", ())
    if index < len(firsts):
        yield firsts[index]
    elif "items" in schema:
        yield schema["items"]


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
