"""Decisions: what a body may be, what is refused by which name, and what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.decisions.distribution import Distribution
from flare.decisions.questions import Inquiry, Usage
from flare.errors import RequestError
from flare.protocols.decisions import Decisions
from tests.support.live_server import make_model

MODEL = make_model(explicit_ids=128)
PREDICATE = {"type": "predicate", "instructions": "Refund?"}
CHOICE = {"type": "choice", "instructions": "Which team?"}
SCORE = {"type": "score", "instructions": "Urgency?"}
TWO = [{"value": "a"}, {"value": "b"}]
LEVELS = [{"label": "Routine"}, {"label": "Urgent", "description": "Act today"}]
ASKED: list[dict[str, Any]] = [
    PREDICATE | {"name": "refund"},
    CHOICE | {"choices": [{"value": "billing", "description": "Payments"}, {"value": False}]},
    SCORE | {"levels": LEVELS, "name": ""},
]


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "x", "questions": [PREDICATE]} | fields


def decode(body: Any) -> Inquiry:
    return Decisions().decode(json.dumps(body).encode(), MODEL)


def refused(body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(body)
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    return caught.value


def test_a_request() -> None:
    found = decode(request(questions=ASKED))
    assert found.state == "x" and found.state_field == "input"
    assert [(question.instructions, question.options) for question in found.questions] == [
        ("Refund?", ("false", "true")),
        ("Which team?", ("billing: Payments", "false")),
        ("Urgency?", ("Routine", "Urgent: Act today")),
    ]
    assert [question.field for question in found.questions] == ["questions[0]", "questions[1]", "questions[2]"]


def message(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | fields


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", ""),
        ([message("a"), message("b", type="message")], "a\n\nb"),
        ([message([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]), message("c")], "a\nb\n\nc"),
        ([message([])], ""),
    ],
)
def test_input(given: Any, text: str) -> None:
    assert decode(request(input=given)).state == text


@pytest.mark.parametrize(
    "change",
    [
        {"safety_identifier": None},
        {"safety_identifier": "x" * 128},
        {"questions": [PREDICATE | {"name": "same"}, PREDICATE | {"name": "same"}]},
        {"questions": [PREDICATE] * 64},
        {"questions": [CHOICE | {"choices": [{"value": str(i)} for i in range(128)]}]},
        {"questions": [CHOICE | {"choices": [{"value": "true"}, {"value": True}]}]},
        {"questions": [SCORE | {"levels": [{"label": "same"}] * 10}]},
        {"questions": [PREDICATE | {"instructions": ""}]},
    ],
)
def test_what_is_taken(change: dict[str, Any]) -> None:
    assert decode(request(**change)).questions


def test_the_model_may_be_missing() -> None:
    body = request()
    del body["model"]
    assert decode(body)


IMAGES = "Decisions supports text input only; images are not supported"


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"stream": True}, "stream", "unknown field"),
        ({"assets": {}}, "assets", "unknown field"),
        ({"prompt_cache_key": "k"}, "prompt_cache_key", "unknown field"),
        ({"model": 5}, "model", "expected a string"),
        ({"safety_identifier": "x" * 129}, "safety_identifier", "129 characters, the limit is 128"),
        ({"safety_identifier": 5}, "safety_identifier", "expected a string"),
        ({"input": None}, "input", "expected a string or an array"),
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a"]}, "input[0]", "expected an object"),
        ({"input": [message("a", role="system")]}, "input[0].role", "'system' messages are not supported here; send user"),
        ({"input": [message("a", role="assistant")]}, "input[0].role", "'assistant' messages are not supported"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type", "'function_call' items are not supported"),
        ({"input": [{"role": "user"}]}, "input[0].content", "this field is required"),
        ({"input": [message("a", id="m")]}, "input[0].id", "unknown field"),
        ({"input": [message([{"text": "a"}])]}, "input[0].content[0].type", "this field is required"),
        ({"input": [message([{"type": "input_text"}])]}, "input[0].content[0].text", "this field is required"),
        ({"input": [message([{"type": "input_image", "image_url": "x"}])]}, "input[0].content[0]", IMAGES),
        ({"input": [message([{"type": "image_url", "image_url": {}}])]}, "input[0].content[0]", IMAGES),
        ({"input": [message([{"type": "input_json", "json": 1}])]}, "input[0].content[0].type", "parts are not supported"),
        ({"questions": []}, "questions", "0 items, there must be 1 to 64"),
        ({"questions": [PREDICATE] * 65}, "questions", "65 items, there must be 1 to 64"),
        ({"questions": {}}, "questions", "expected an array"),
        ({"questions": [5]}, "questions[0]", "expected an object"),
        ({"questions": [{"instructions": "x"}]}, "questions[0].type", "this field is required"),
        ({"questions": [PREDICATE | {"type": "rank"}]}, "questions[0].type", "'rank' questions are not supported here; send"),
        ({"questions": [PREDICATE | {"type": 5}]}, "questions[0].type", "'5' questions are not supported here"),
        ({"questions": [PREDICATE, {"type": "predicate"}]}, "questions[1].instructions", "this field is required"),
        ({"questions": [PREDICATE | {"instructions": None}]}, "questions[0].instructions", "expected a string, got null"),
        ({"questions": [PREDICATE | {"instructions": ["a"]}]}, "questions[0].instructions", "expected a string"),
        ({"questions": [PREDICATE | {"name": None}]}, "questions[0].name", "expected a string, got null"),
        ({"questions": [PREDICATE | {"criteria": {}}]}, "questions[0].criteria", "unknown field"),
        ({"questions": [CHOICE]}, "questions[0].choices", "this field is required"),
        ({"questions": [CHOICE | {"choices": TWO[:1]}]}, "questions[0].choices", "1 items, there must be 2 to 128"),
        ({"questions": [CHOICE | {"choices": [{"value": str(i)} for i in range(129)]}]}, "questions[0].choices", "129 items"),
        ({"questions": [CHOICE | {"choices": [*TWO, TWO[0]]}]}, "questions[0].choices[2].value", "choices[0] too; send each"),
        ({"questions": [CHOICE | {"choices": [{"value": True}] * 2}]}, "questions[0].choices[1].value", "'true' is the value"),
        ({"questions": [CHOICE | {"choices": [*TWO, {"value": 1}]}]}, "questions[0].choices[2].value", "expected"),
        ({"questions": [CHOICE | {"choices": [*TWO, {}]}]}, "questions[0].choices[2].value", "this field is required"),
        (
            {"questions": [CHOICE | {"choices": [*TWO, {"value": "c", "description": None}]}]},
            "questions[0].choices[2].description",
            "expected a string, got null",
        ),
        ({"questions": [SCORE | {"levels": LEVELS[:1]}]}, "questions[0].levels", "1 items, there must be 2 to 10"),
        ({"questions": [SCORE | {"levels": LEVELS * 6}]}, "questions[0].levels", "12 items, there must be 2 to 10"),
        ({"questions": [SCORE | {"levels": ["a", "b"]}]}, "questions[0].levels[0]", "expected an object"),
        ({"questions": [SCORE | {"levels": [*LEVELS, {"label": True}]}]}, "questions[0].levels[2].label", "expected a string"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], param: str, text: str) -> None:
    error = refused(request(**change))
    assert error.param == param and text in str(error)


@pytest.mark.parametrize("field", ["input", "questions"])
def test_what_has_to_be_there(field: str) -> None:
    body = request()
    del body[field]
    assert refused(body).param == field


def test_an_answer() -> None:
    found = [Distribution((0.25, 0.75), 1.0), Distribution((0.2, 0.8), 0.5), Distribution((0.5, 0.5), 0.9)]
    body = Decisions().encode(decode(request(questions=ASKED)), found, Usage(100, 40, 3), MODEL)
    assert json.loads(body) == {
        "model": "org/tiny",
        "answers": [
            {"type": "predicate", "name": "refund", "probability": 0.75},
            {
                "type": "choice",
                "name": None,
                "choice": False,
                "confidence": 0.4,
                "probabilities": [{"value": "billing", "probability": 0.2}, {"value": False, "probability": 0.8}],
            },
            {
                "type": "score",
                "name": "",
                "score": 0.5,
                "confidence": 0.45,
                "probabilities": [
                    {"value": 0, "label": "Routine", "probability": 0.5},
                    {"value": 1, "label": "Urgent", "probability": 0.5},
                ],
            },
        ],
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 103,
        },
    }
