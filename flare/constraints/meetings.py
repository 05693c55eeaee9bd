"""What of a JSON Schema holds for the same value: patterns that llguidance would have to join, which takes it very long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flare.constraints.references import every_schema, resolve
from flare.errors import RequestError

MAX_MEETING = 2
"""Patterns and formats that one value has to match together: how long it takes to join them grows with the power of their
number."""

MAX_MEETINGS = 100_000
"""Schemas that are looked at to find what holds for the same value, where `allOf`, `anyOf`, `oneOf` or a `$ref` stand beside
something else: 0.1 to 0.3 s of work."""

_NEUTRAL = frozenset(("$defs", "$ref", "allOf", "anyOf", "definitions", "oneOf", "required", "type"))
"""Words that are followed, or with which no pattern meets."""


def check_meetings(schema: dict[str, Any], field: str) -> None:
    """Looks at the patterns and multiples that hold for the same value: those of `allOf` and beside `$ref`, there and in what
    such schemas say of the same member or item. Of alternatives each is looked at for itself.

    `schema` has been checked otherwise. Raises RequestError naming `field`.
    """
    _Meetings(schema, field).check()


class _State(NamedTuple):
    """A case of alternatives, partly followed: `todo` and one of each of `groups` hold too."""

    todo: list[Any]
    groups: list[list[Any]]
    seen: dict[int, Mapping[str, Any]]


class _Meetings:
    def __init__(self, schema: dict[str, Any], field: str) -> None:
        self._whole = schema
        self._field = field
        self._left = MAX_MEETINGS
        self._known: set[frozenset[int]] = set()

    def check(self) -> None:
        pending: list[list[Any]] = [[schema] for schema in every_schema(self._whole) if _joins(schema)]
        while pending:
            for own in self._cases(pending.pop()):
                self._weigh(own)
                if len(own) > 1:  # what stands within a lone schema is looked at for itself
                    pending += self._meeting(own)

    def _cases(self, schemas: Iterable[Any]) -> Iterator[list[Mapping[str, Any]]]:
        """Returns the schemas that hold where all the given ones do, themselves and those that they refer to: a list for each
        choice of alternatives, without those that say nothing. A schema that comes again adds nothing."""
        states = [_State(list(schemas), [], {})]
        while states:
            todo, groups, seen = states.pop()
            while todo:
                schema = todo.pop()
                if not isinstance(schema, dict) or id(schema) in seen:
                    continue
                self._spend(1)
                seen[id(schema)] = schema
                todo += schema.get("allOf", ())
                if "$ref" in schema:
                    todo.append(resolve(self._whole, schema["$ref"]))
                groups += [_told_apart(schema[word]) for word in ("anyOf", "oneOf") if word in schema]
            if groups:
                *others, group = groups
                self._spend(len(group) * (1 + len(seen) // 8))
                states += [_State([item], list(others), dict(seen)) for item in group]
            else:
                own = [schema for schema in seen.values() if not _NEUTRAL.issuperset(schema)]
                if self._is_new(own):
                    yield own

    def _weigh(self, own: list[Mapping[str, Any]]) -> None:
        matches = sum(word in schema for schema in own for word in ("pattern", "format"))
        if matches > MAX_MEETING:
            text = f"{matches} patterns and formats hold for the same value, the limit is {MAX_MEETING}; join them"
            raise self._refused(text)
        multiples = sum("multipleOf" in schema for schema in own)
        if multiples > 1:
            raise self._refused(f"{multiples} multipleOf hold for the same value; send one of them")

    def _meeting(self, own: list[Mapping[str, Any]]) -> Iterator[list[Any]]:
        """Returns what holds together for a member or an item of a value for which all of `own` hold."""
        names = {name for schema in own for name in schema.get("properties", ())}
        most = max(len(schema.get("prefixItems", ())) for schema in own)
        self._spend((len(names) + most + 2) * len(own))
        found = [[part for schema in own for part in _of_member(schema, name)] for name in sorted(names)]
        found.append([part for schema in own for part in _of_others(schema)])
        found += [[part for schema in own for part in _of_item(schema, index)] for index in range(most + 1)]
        for parts in found:
            met = {id(part): part for part in parts if isinstance(part, dict)}
            if len(met) > 1:
                yield list(met.values())

    def _is_new(self, schemas: list[Mapping[str, Any]]) -> bool:
        key = frozenset(map(id, schemas))
        known = key in self._known
        self._known.add(key)
        return not known

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise self._refused("joins too many schemas by allOf, anyOf and $ref; send a simpler one")

    def _refused(self, text: str) -> RequestError:
        return RequestError(f"{self._field}: {text}", param=self._field)


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether a schema's words, or its parts, hold together with others: what it only refers to is looked at for itself."""
    sources = len(schema.get("allOf", ())) + sum(word in schema for word in ("$ref", "anyOf", "oneOf"))
    return sources > 1 or (sources == 1 and not _NEUTRAL.issuperset(schema))


def _told_apart(group: list[Any]) -> list[Any]:
    """Returns the alternatives that make a difference: of those that say nothing one is enough."""
    speaking = [item for item in group if isinstance(item, dict) and not _says_nothing(item)]
    return speaking if len(speaking) == len(group) else [*speaking, True]


def _says_nothing(schema: Mapping[str, Any]) -> bool:
    return schema.keys() <= _NEUTRAL - {"$ref", "allOf", "anyOf", "oneOf"}


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
