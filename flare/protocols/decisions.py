"""POST /v1/decisions: predicates, choices and scores about a text, in an ordered list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flare.decisions.distribution import Distribution, clipped
from flare.decisions.questions import Inquiry, Usage
from flare.decisions.questions import Question as Asked
from flare.errors import RequestError
from flare.protocols.decoding import decode_body
from flare.protocols.encoding import error_object, warnings_member
from flare.protocols.endpoint import encode_json
from flare.protocols.refusals import foreign_type, required, shown
from flare.protocols.responses_fields import converted
from flare.served import ServedModel

MAX_QUESTIONS = 64
MIN_OPTIONS = 2
MAX_CHOICES = 128
MAX_LEVELS = 10
MAX_IDENTIFIER = 128

PARTS = ("input_text", "text")
TEXT_ONLY = "Decisions supports text input only; images are not supported"

INERT: Mapping[str, str] = {
    "model": "the loaded model always answers; its own name is returned",
    "safety_identifier": "not stored",
}
"""Fields that are checked for their type and then have no effect, with the reason."""


class DecisionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body. Messages and questions are decoded one by one, by their types."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    questions: list[dict[str, Any]]
    safety_identifier: str | None = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of `input`."""

    role: str
    content: str | list[dict[str, Any]]
    type: str = "message"


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message."""

    type: str
    text: str


class PredicateQuestion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether something is true."""

    type: str
    instructions: str
    name: str | msgspec.UnsetType = msgspec.UNSET

    def options(self) -> list[str]:
        return ["false", "true"]

    def answer(self, found: Distribution) -> dict[str, Any]:
        return {"probability": found.probabilities[1]}


class Choice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of the values of a choice."""

    value: str | bool
    description: str = ""


class ChoiceQuestion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which one of several values."""

    type: str
    instructions: str
    choices: list[Choice]
    name: str | msgspec.UnsetType = msgspec.UNSET

    def options(self) -> list[str]:
        return [_described(_spelled(choice.value), choice.description) for choice in self.choices]

    def answer(self, found: Distribution) -> dict[str, Any]:
        pairs = zip(self.choices, found.probabilities, strict=True)
        return {
            "choice": self.choices[found.best].value,
            "confidence": _confidence(found),
            "probabilities": [{"value": choice.value, "probability": p} for choice, p in pairs],
        }


class Level(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One level of a score."""

    label: str
    description: str = ""


class ScoreQuestion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which one of several levels in order."""

    type: str
    instructions: str
    levels: list[Level]
    name: str | msgspec.UnsetType = msgspec.UNSET

    def options(self) -> list[str]:
        return [_described(level.label, level.description) for level in self.levels]

    def answer(self, found: Distribution) -> dict[str, Any]:
        pairs = enumerate(zip(self.levels, found.probabilities, strict=True))
        return {
            "score": found.expectation,
            "confidence": _confidence(found),
            "probabilities": [{"value": i, "label": level.label, "probability": p} for i, (level, p) in pairs],
        }


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
QUESTIONS: Mapping[str, type[Question]] = {
    "predicate": PredicateQuestion,
    "choice": ChoiceQuestion,
    "score": ScoreQuestion,
}

_decoder = msgspec.json.Decoder(DecisionRequest)


class Decisions:
    """The route, see `DecisionEndpoint`."""

    path = "/v1/decisions"
    id_prefix = "decision-"
    id_headers = ()

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Inquiry:
        """Raises RequestError (400) naming the field that cannot be taken."""
        request = decode_body(_decoder, body)
        identifier = request.safety_identifier or ""
        if len(identifier) > MAX_IDENTIFIER:
            text = f"safety_identifier: {len(identifier)} characters, the limit is {MAX_IDENTIFIER}; shorten it"
            raise RequestError(text, param="safety_identifier")
        _check_size(request.questions, "questions", 1, MAX_QUESTIONS)
        questions = [_question(value, f"questions[{index}]") for index, value in enumerate(request.questions)]
        return Inquiry(
            state=_input(request.input),
            state_field="input",
            questions=tuple(
                Asked(question.instructions, tuple(question.options()), f"questions[{index}]")
                for index, question in enumerate(questions)
            ),
            details=questions,
        )

    def encode(
        self, inquiry: Inquiry, distributions: Sequence[Distribution], usage: Usage, model: ServedModel
    ) -> bytes:
        questions: list[Question] = inquiry.details
        answers = [
            {
                "type": question.type,
                "name": None if question.name is msgspec.UNSET else question.name,
                **question.answer(found),
            }
            for question, found in zip(questions, distributions, strict=True)
        ]
        used = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        }
        return encode_json({"model": model.id, "answers": answers, "usage": used, **warnings_member(usage.fallbacks)})

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)


def _input(given: str | list[dict[str, Any]]) -> str:
    """Returns the text of the input: parts are joined with line breaks, messages with blank lines."""
    if isinstance(given, str):
        return given
    if not given:
        raise RequestError("input: an empty list; send text or user messages", param="input")
    return "\n\n".join(_message(value, f"input[{index}]") for index, value in enumerate(given))


def _message(value: dict[str, Any], path: str) -> str:
    if value.get("type", "message") != "message":
        raise foreign_type(f"{path}.type", value["type"], "items", ["message"])
    message = converted(value, InputMessage, path)
    if message.role != "user":
        raise foreign_type(f"{path}.role", message.role, "messages", ["user"])
    if isinstance(message.content, str):
        return message.content
    parts = enumerate(message.content)
    return "\n".join(_part(part, f"{path}.content[{index}]") for index, part in parts)


def _part(value: dict[str, Any], path: str) -> str:
    kind = value.get("type")
    if kind is None:
        raise required(f"{path}.type")
    if isinstance(kind, str) and "image" in kind:
        raise RequestError(f"{path}: {TEXT_ONLY}", param=path, code="unsupported_parameter")
    if kind not in PARTS:
        raise foreign_type(f"{path}.type", kind, "parts", PARTS)
    return converted(value, InputPart, path).text


def _question(value: dict[str, Any], path: str) -> Question:
    kind = value.get("type")
    if kind is None:
        raise required(f"{path}.type")
    if not isinstance(kind, str) or kind not in QUESTIONS:
        raise foreign_type(f"{path}.type", kind, "questions", QUESTIONS)
    question = converted(value, QUESTIONS[kind], path)
    if isinstance(question, ChoiceQuestion):
        _check_size(question.choices, f"{path}.choices", MIN_OPTIONS, MAX_CHOICES)
        _check_distinct(question.choices, f"{path}.choices")
    elif isinstance(question, ScoreQuestion):
        _check_size(question.levels, f"{path}.levels", MIN_OPTIONS, MAX_LEVELS)
    return question


def _check_size(items: Sequence[Any], path: str, least: int, most: int) -> None:
    if not least <= len(items) <= most:
        raise RequestError(f"{path}: {len(items)} items, there must be {least} to {most}", param=path)


def _check_distinct(choices: Sequence[Choice], path: str) -> None:
    """Raises RequestError for a value that comes twice; the text "true" and the boolean are different values."""
    first: dict[tuple[type, str | bool], int] = {}
    for index, choice in enumerate(choices):
        before = first.setdefault((type(choice.value), choice.value), index)
        if before != index:
            where = f"{path}[{index}].value"
            text = f"{where}: {shown(_spelled(choice.value))!r} is the value of {path}[{before}] too; send each once"
            raise RequestError(text, param=where)


def _spelled(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _described(name: str, description: str) -> str:
    return f"{name}: {description}" if description else name


def _confidence(found: Distribution) -> float:
    """Returns the probability of the likeliest option's label in the complete vocabulary."""
    return clipped(found.probabilities[found.best] * found.mass)
