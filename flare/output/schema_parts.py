"""Where a JSON Schema speaks of the members and items of a value that is written as elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_PARTS = 256
"""Most subschemas that are looked at for one value; what comes behind them is not regarded."""

Schema = Mapping[str, Any]


def alternatives(schema: Any, root: Schema | None) -> list[Schema]:
    """Returns the subschemas that may describe the same value: references followed, combinations taken apart.

    References are local to `root`; one that leads nowhere is left out.
    """
    found: list[Schema] = []
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < MAX_PARTS:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        more = [_referred(part["$ref"], root)] if "$ref" in part else []
        for combination in ("allOf", "anyOf", "oneOf"):
            subschemas = part.get(combination)
            more += subschemas if isinstance(subschemas, list) else []
        waiting += reversed(more[:MAX_PARTS])
    return found


def kinds(schemas: list[Schema]) -> frozenset[str]:
    """Returns the types that subschemas name, or let one guess; empty where they say nothing."""
    return frozenset(kind for schema in schemas for kind in _kinds(schema))


def member_schema(schemas: list[Schema], name: str) -> Schema | None:
    """Returns what subschemas of an object say of a member, None where they say nothing."""
    named = (schema["properties"].get(name) for schema in schemas if isinstance(schema.get("properties"), Mapping))
    return _first(*named, *(schema.get("additionalProperties") for schema in schemas))


def item_schema(schemas: list[Schema], index: int) -> Schema | None:
    """Returns what subschemas of an array say of an item, None where they say nothing."""
    firsts = (schema["prefixItems"] for schema in schemas if isinstance(schema.get("prefixItems"), list))
    return _first(
        *(first[index] for first in firsts if index < len(first)), *(schema.get("items") for schema in schemas)
    )


def _first(*schemas: Any) -> Schema | None:
    return next((schema for schema in schemas if isinstance(schema, Mapping)), None)


def _kinds(schema: Schema) -> Iterator[str]:
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (kind for kind in named if isinstance(kind, str))
    else:
        if "properties" in schema or "additionalProperties" in schema:
            yield "object"
        if "items" in schema or "prefixItems" in schema:
            yield "array"


def _referred(reference: Any, root: Schema | None) -> Any:
    """Returns what a JSON Pointer within the schema refers to, None where it leads nowhere."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found: Any = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
