"""Which schemas of a `oneOf` exclude each other: llguidance enforces `anyOf`, which is the same for those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from flare.constraints.references import every_schema, resolve

MAX_FOLLOWED = 64
"""Schemas that one part of a `oneOf` leads to by `$ref` and `allOf`: what comes behind them is not looked at."""

MAX_TAGS = 32
"""Members of one part whose values are compared."""

_KINDS: Mapping[str, frozenset[str]] = {
    name: frozenset((name,)) for name in ("array", "boolean", "integer", "null", "object", "string")
} | {"number": frozenset(("integer", "fraction"))}
_ALL = frozenset().union(*_KINDS.values())


class _Shape(NamedTuple):
    """What every value of a schema has: a type of `kinds`, is one of `values` (None: any), and has members of these values."""

    kinds: frozenset[str]
    values: frozenset[Any] | None
    tags: Mapping[str, frozenset[Any]]


def pass_exclusive(schema: dict[str, Any]) -> None:
    """Turns each `oneOf` whose schemas exclude each other into `anyOf`, in place; `schema` has been checked.

    They do where their types differ, or the values that they list for the whole or for a member that both require.
    """
    schemas = [found for found in every_schema(schema) if "oneOf" in found or "$ref" in found]
    if any("/oneOf/" in found.get("$ref", "") for found in schemas):
        return  # what is referred to has to stay in its place
    exclusion = _Exclusion(schema)
    exclusive = [found for found in schemas if "oneOf" in found and exclusion.holds(found["oneOf"])]
    for found in exclusive:
        alternatives = found.pop("oneOf")
        if "anyOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": alternatives}]
        else:
            found["anyOf"] = alternatives


class _Exclusion:
    """Tells schemas within one schema apart; each is looked at once."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        self._shapes: dict[int, _Shape] = {}

    def holds(self, parts: Iterable[Any]) -> bool:
        """Whether no value can be of two of these schemas."""
        return all(_exclude(one, other) for one, other in combinations(map(self._shape, parts), 2))

    def _shape(self, schema: Any) -> _Shape:
        found = self._shapes.get(id(schema))
        if found is None:
            found = self._shapes[id(schema)] = self._made(schema)
        return found

    def _made(self, schema: Any) -> _Shape:
        own = self._followed(schema)
        kinds, values = _ALL, None
        for part in own:
            if "type" in part:
                kinds &= frozenset().union(*(_KINDS[name] for name in _listed(part["type"])))
            values = _both(values, _values(part))
        if values is not None:
            kinds &= frozenset(kind for kind, _ in values)
        tags: dict[str, frozenset[Any]] = {}
        required = {name for part in own for name in part.get("required", ())}
        for part in own:
            for name in required & part.get("properties", {}).keys():
                for member in self._followed(part["properties"][name]):
                    listed = _both(tags.get(name), _values(member))
                    if listed is not None and (name in tags or len(tags) < MAX_TAGS):
                        tags[name] = listed
        return _Shape(kinds, values, tags)

    def _followed(self, schema: Any) -> list[Mapping[str, Any]]:
        """Returns the schema and what holds with it."""
        pending, found = [schema], list[Mapping[str, Any]]()
        while pending and len(found) < MAX_FOLLOWED:
            schema = pending.pop()
            if not isinstance(schema, dict) or any(schema is known for known in found):
                continue
            found.append(schema)
            pending += schema.get("allOf", ())
            if "$ref" in schema:
                pending.append(resolve(self._whole, schema["$ref"]))
        return found


def _exclude(one: _Shape, other: _Shape) -> bool:
    kinds = one.kinds & other.kinds
    if not kinds or (one.values is not None and other.values is not None and not one.values & other.values):
        return True
    if kinds != {"object"}:
        return False
    return any(not values & other.tags[name] for name, values in one.tags.items() if name in other.tags)


def _values(schema: Mapping[str, Any]) -> frozenset[Any] | None:
    """Returns the values that a schema lists, None where it lists none."""
    listed = None if "enum" not in schema else frozenset(map(_value, schema["enum"]))
    return listed if "const" not in schema else _both(listed, frozenset((_value(schema["const"]),)))


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return other if one is None else one if other is None else one & other


def _value(value: Any) -> tuple[str, Any]:
    """Returns a value's type and what is equal exactly for equal JSON: 1 and 1.0 are, 1 and true are not."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), value
    if isinstance(value, int | float):
        return ("integer" if value == int(value) else "fraction"), value
    if isinstance(value, str):
        return "string", value
    if isinstance(value, list):
        return "array", tuple(map(_value, value))
    return "object", frozenset((name, _value(item)) for name, item in value.items())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
