"""JSON Schemas of System One: its bodies are checked by hand, so that they are described by hand."""

from __future__ import annotations

from collections.abc import Mapping

from flare.protocols.schemas import (
    COUNT,
    NULL,
    NUMBER,
    OBJECT,
    SOME_TEXT,
    TEXT,
    WARNINGS,
    Schema,
    any_of,
    array_of,
    members,
    ref,
    word,
)
from flare.protocols.systemone_fields import MAX_CRITERIA, MAX_LEVELS, MAX_QUESTIONS, SIDES

STRUCTURE = any_of(TEXT, OBJECT, array_of({}))
MAYBE_STRUCTURE = any_of(TEXT, OBJECT, array_of({}), NULL)
CERTAINTY: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def _map(values: Schema, **bounds: int) -> Schema:
    return {"type": "object", "additionalProperties": values, **bounds}


PROBABILITIES = _map(CERTAINTY)


def _question(kind: str, criteria: Schema, *, required: bool) -> Schema:
    given = {"criteria": criteria}
    optional: dict[str, Schema] = {"instructions": MAYBE_STRUCTURE, **({} if required else given)}
    return members({"type": word(kind), **(given if required else {})}, optional)


SIDE_TEXTS: Schema = {
    "type": ["object", "null"],
    "properties": dict.fromkeys(SIDES, MAYBE_STRUCTURE),
    "additionalProperties": False,
}
CRITERIA = _map(MAYBE_STRUCTURE, minProperties=1, maxProperties=MAX_CRITERIA)
LEVELS = array_of(STRUCTURE, minItems=1, maxItems=MAX_LEVELS)
QUESTIONS = ("Noul", "Choice", "Score")

SCHEMAS: Mapping[str, Schema] = {
    "SystemOneNoul": _question("noul", SIDE_TEXTS, required=False),
    "SystemOneChoice": _question("choice", CRITERIA, required=True),
    "SystemOneScore": _question("score", LEVELS, required=True),
    "SystemOneRequest": {
        **members(
            {
                "model": TEXT,
                "state": STRUCTURE,
                "questions": {
                    **_map(
                        any_of(*(ref(f"SystemOne{kind}") for kind in QUESTIONS)),
                        minProperties=1,
                        maxProperties=MAX_QUESTIONS,
                    ),
                    "propertyNames": SOME_TEXT,
                },
            },
            {"assets": {"enum": [None], "description": "Not served: the model takes text alone."}},
        ),
        "title": "SystemOneRequest",
        "description": "Other members are ignored.",
    },
    "SystemOneAnswers": members(
        {
            "model": TEXT,
            "answers": _map(
                any_of(
                    members({"type": word("noul"), "noul": CERTAINTY}),
                    members(
                        {
                            "type": word("choice"),
                            "choice": TEXT,
                            "confidence": CERTAINTY,
                            "probabilities": PROBABILITIES,
                        }
                    ),
                    members(
                        {
                            "type": word("score"),
                            "score": NUMBER,
                            "confidence": CERTAINTY,
                            "legend": _map(STRUCTURE),
                            "probabilities": PROBABILITIES,
                        }
                    ),
                )
            ),
            "usage": members({"input_tokens": COUNT, "output_tokens": COUNT}),
        },
        WARNINGS,
    ),
    "SystemOneFaults": members(
        {
            "detail": array_of(
                members({"loc": array_of(any_of(TEXT, {"type": "integer"})), "msg": TEXT, "type": TEXT}), minItems=1
            )
        }
    ),
}
"""Schemas by their names in the document."""
