"""References within a JSON Schema, and the schemas that it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

SCHEMA_WORDS = frozenset(("additionalProperties", "items"))
SCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
SCHEMA_TABLES = frozenset(("$defs", "definitions", "patternProperties", "properties"))


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


def is_of_schema(reference: str) -> bool:
    """Whether a reference goes through words that hold schemas, so that what it points at is checked too."""
    steps = iter(_steps(reference))
    for word in steps:
        if word in SCHEMA_WORDS:
            continue
        if word not in SCHEMA_LISTS and word not in SCHEMA_TABLES:
            return False
        if next(steps, None) is None:
            return False
    return True


def as_uri(reference: str) -> str:
    """Returns the reference as URIs write it: clients send names such as `Answer[int]` as they are."""
    return "#" + quote(unquote(reference[1:]), safe="/~")


def every_schema(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Returns the schema and all that stand within it, without true and false."""
    pending: list[Any] = [schema]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            yield found
            pending += _inner_schemas(found)


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Returns the schemas right within a schema."""
    for word, value in schema.items():
        if word in SCHEMA_WORDS:
            yield value
        elif word in SCHEMA_LISTS:
            yield from value
        elif word in SCHEMA_TABLES:
            yield from value.values()


def _steps(reference: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[1:].split("/")[1:]]
