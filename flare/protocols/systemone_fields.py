"""What is wrong with the body of a System One request: every fault with its place, in the form of the protocol's 422.

The kinds of faults are those of the protocol's own server, as its clients know them; the words are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare.errors import RequestError
from flare.protocols.endpoint import encode_json
from flare.protocols.refusals import shown

TYPES = ("noul", "choice", "score")
MAX_QUESTIONS = 64
MAX_CRITERIA = 128
MAX_LEVELS = 10
SIDES = ("true", "false")

MAX_FAULTS = 16
MAX_FAULTS_BYTES = 3600
"""What one refusal tells at most: with its envelope it stays under the bound of all error bodies."""

STRUCTURE = (str, dict, list)
TEXT = "a string, an object or an array"

Step = str | int


class Faults:
    """The faults found so far; those beyond the bounds are not told."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._bytes = 0
        self.full = False

    def add(self, place: Sequence[Step], kind: str, text: str) -> None:
        loc = ["body", *(shown(step) if isinstance(step, str) else step for step in place)]
        entry = {"loc": loc, "msg": text, "type": kind}
        self._bytes += len(encode_json(entry)) + 1
        self.full = self.full or len(self.entries) == MAX_FAULTS or self._bytes > MAX_FAULTS_BYTES
        if not self.full:
            self.entries.append(entry)

    def missing(self, *place: Step) -> None:
        self.add(place, "missing", "this field is required")

    def size(self, place: Sequence[Step], seen: int, least: int, most: int, what: str) -> None:
        """Checks a number of things."""
        if seen < least:
            self.add(place, "too_short", f"{seen} {what}, send at least {least}")
        elif seen > most:
            self.add(place, "too_long", f"{seen} {what}, the limit is {most}; send fewer")


def check_body(body: Any) -> None:
    """Raises RequestError (422) for a body that is no System One request; its `detail` lists the faults."""
    faults = Faults()
    if not isinstance(body, dict):
        faults.add((), "dict_type", "expected an object")
    else:
        _check_members(body, faults)
    if faults.entries:
        first = faults.entries[0]
        place = ".".join(map(str, first["loc"][1:])) or "the body"
        raise RequestError(f"{place}: {first['msg']}", status=422, extra={"detail": faults.entries})


def _check_members(body: dict[str, Any], faults: Faults) -> None:
    for name in ("model", "state", "questions"):
        if name not in body:
            faults.missing(name)
    if not isinstance(body.get("model", ""), str):
        faults.add(("model",), "string_type", "expected a string")
    if not isinstance(body.get("state", ""), STRUCTURE):
        faults.add(("state",), "union_type", f"expected {TEXT}")
    assets = body.get("assets")
    if assets is not None and not isinstance(assets, dict):
        faults.add(("assets",), "dict_type", "expected an object or null")
    elif assets is not None:
        faults.size(("assets",), len(assets), 1, len(assets), "assets")
    if "questions" in body:
        _check_questions(body["questions"], faults)


def _check_questions(questions: Any, faults: Faults) -> None:
    if not isinstance(questions, dict):
        faults.add(("questions",), "dict_type", "expected an object")
    else:
        faults.size(("questions",), len(questions), 1, MAX_QUESTIONS, "questions")
        for name, question in questions.items():
            if faults.full:
                break
            _check_question(question, name, faults)


def _check_question(question: Any, name: str, faults: Faults) -> None:
    place: tuple[Step, ...] = ("questions", name)
    if not name:
        faults.add(place, "string_too_short", "the name of a question must not be empty")
    if not isinstance(question, dict):
        faults.add(place, "model_attributes_type", "expected an object")
        return
    if "type" not in question:
        faults.add(place, "union_tag_not_found", f"type: this field is required; send one of {', '.join(TYPES)}")
        return
    kind = question["type"]
    if kind not in TYPES:
        seen = repr(shown(kind)) if isinstance(kind, str) else "what it holds"
        faults.add(place, "union_tag_invalid", f"type: {seen} is not one of {', '.join(TYPES)}")
        return
    place = (*place, kind)
    _check_text(question.get("instructions"), (*place, "instructions"), faults, nullable=True)
    criteria, place = question.get("criteria"), (*place, "criteria")
    if kind == "noul":
        _check_sides(criteria, place, faults)
    elif kind == "choice":
        _check_criteria(criteria, place, faults)
    else:
        _check_levels(criteria, place, faults)


def _check_text(value: Any, place: Sequence[Step], faults: Faults, *, nullable: bool) -> None:
    if not isinstance(value, STRUCTURE) and not (nullable and value is None):
        faults.add(place, "string_type", f"expected {TEXT}" + (", or null" if nullable else ""))


def _check_sides(criteria: Any, place: Sequence[Step], faults: Faults) -> None:
    if criteria is None:
        return
    if not isinstance(criteria, dict) or not criteria.keys() <= set(SIDES):
        faults.add(place, "model_type", f"expected an object with {' or '.join(SIDES)}, or both")
        return
    for side, text in criteria.items():
        _check_text(text, (*place, side), faults, nullable=True)


def _check_criteria(criteria: Any, place: Sequence[Step], faults: Faults) -> None:
    if criteria is None:
        faults.missing(*place)
    elif not isinstance(criteria, dict):
        faults.add(place, "dict_type", "expected an object")
    else:
        faults.size(place, len(criteria), 1, MAX_CRITERIA, "criteria")
        for name, text in criteria.items():
            if faults.full:
                break
            _check_text(text, (*place, name), faults, nullable=True)


def _check_levels(levels: Any, place: Sequence[Step], faults: Faults) -> None:
    if levels is None:
        faults.missing(*place)
    elif not isinstance(levels, list):
        faults.add(place, "list_type", "expected an array")
    else:
        faults.size(place, len(levels), 1, MAX_LEVELS, "levels")
        for index, text in enumerate(levels[: MAX_LEVELS + 1]):
            _check_text(text, (*place, index), faults, nullable=False)
