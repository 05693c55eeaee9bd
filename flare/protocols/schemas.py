"""JSON Schemas of the API's description: the words that its requests and its answers have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]

REF = "#/components/schemas/"
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "minimum": 0}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}


def ref(name: str) -> Schema:
    """Returns the reference to a schema by its name in the document."""
    return {"$ref": REF + name}


WARNINGS = {"flare_warnings": {"type": "array", "items": ref("Warning")}}
"""A member of answers where there is something to warn of."""


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def array_of(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def words(known: Iterable[str], *, null: bool = False) -> Schema:
    return {"enum": [*known, None] if null else list(known)}


def word(known: str) -> Schema:
    return words([known])


def members(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with at least the required members."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
