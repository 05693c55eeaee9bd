"""POST /v1/systemone: TypeSafe's System One, named questions about one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flare.decisions.distribution import Distribution, choice_confidence, score_confidence
from flare.decisions.questions import Inquiry, Question, Usage, as_text
from flare.errors import RequestError
from flare.protocols.decoding import decode_body
from flare.protocols.encoding import error_object, warnings_member
from flare.protocols.endpoint import encode_json
from flare.protocols.refusals import shown
from flare.protocols.systemone_fields import check_body
from flare.protocols.tools import check_nesting
from flare.served import ServedModel

PATH = "/v1/systemone"
IMAGES_HEADER = "TypeSafe-Danger-Zone-Images"
DEFAULT_INSTRUCTIONS = {
    "noul": "Is this true?",
    "choice": "Which of these fits best?",
    "score": "Which of these levels fits best?",
}
"""What is asked where a question says nothing but its criteria."""

_decoder = msgspec.json.Decoder(Any)


class SystemOne:
    """The route, see `DecisionEndpoint`. Unknown fields are ignored, as the protocol has it."""

    path = PATH
    id_prefix = "systemone-"
    id_headers = ("x-typesafe-request-id",)

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Inquiry:
        """Raises RequestError: 400 for what is no JSON, for assets and for deep nesting, 422 for what breaks the schema."""
        request = decode_body(_decoder, body)
        check_body(request)
        check_nesting(request["state"], "state")
        check_nesting(request["questions"], "questions")
        if request.get("assets") is not None:
            raise no_images("assets")
        questions: Mapping[str, Any] = request["questions"]
        return Inquiry(
            state=as_text(request["state"]),
            state_field="state",
            questions=tuple(_question(question, name) for name, question in questions.items()),
            details=questions,
        )

    def encode(
        self, inquiry: Inquiry, distributions: Sequence[Distribution], usage: Usage, model: ServedModel
    ) -> bytes:
        asked: Mapping[str, Any] = inquiry.details
        answers = {
            name: _answer(question, distribution)
            for (name, question), distribution in zip(asked.items(), distributions, strict=True)
        }
        used = {"input_tokens": usage.prompt, "output_tokens": usage.generated}
        return encode_json({"model": model.id, "answers": answers, "usage": used, **warnings_member(usage.fallbacks)})

    def error(self, error: RequestError) -> dict[str, Any]:
        """A fault of the schema has the protocol's own form, everything else that of Chat Completions."""
        detail = error.extra.get("detail")
        return error_object(error) if detail is None else {"detail": detail}


def no_images(param: str) -> RequestError:
    """The refusal of images, wherever they come."""
    text = f"{param}: images need the header {IMAGES_HEADER}: true and a core that sees, this core takes text alone"
    return RequestError(f"{text}; leave them out", param=param, code="unsupported_parameter")


def _question(question: Mapping[str, Any], name: str) -> Question:
    kind, criteria, instructions = question["type"], question.get("criteria"), question.get("instructions")
    if kind == "noul":
        said = criteria or {}
        options = [_described(side, said.get(side)) for side in ("false", "true")]
    elif kind == "choice":
        options = [_described(option, description) for option, description in criteria.items()]
    else:
        options = [as_text(level) for level in criteria]
    text = DEFAULT_INSTRUCTIONS[kind] if instructions is None else as_text(instructions)
    return Question(text, tuple(options), f"questions.{shown(name)}.criteria")


def _described(name: str, description: Any) -> str:
    return name if description is None else f"{name}: {as_text(description)}"


def _answer(question: Mapping[str, Any], found: Distribution) -> dict[str, Any]:
    kind, probabilities = question["type"], found.probabilities
    if kind == "noul":
        return {"type": kind, "noul": probabilities[1]}
    if kind == "choice":
        names = list(question["criteria"])
        return {
            "type": kind,
            "choice": names[found.best],
            "confidence": choice_confidence(probabilities),
            "probabilities": dict(zip(names, probabilities, strict=True)),
        }
    indices = [str(index) for index in range(len(probabilities))]
    return {
        "type": kind,
        "score": found.expectation,
        "confidence": score_confidence(probabilities),
        "legend": dict(zip(indices, question["criteria"], strict=True)),
        "probabilities": dict(zip(indices, probabilities, strict=True)),
    }
