"""System One: what a body may be, where its faults are told, and what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.decisions.distribution import Distribution
from flare.decisions.questions import Inquiry, Usage
from flare.errors import RequestError
from flare.protocols.encoding import error_object
from flare.protocols.systemone import SystemOne
from flare.protocols.systemone_fields import MAX_FAULTS
from flare.service.errors import MAX_ERROR_BYTES, error_reply
from tests.support.live_server import make_model

MODEL = make_model(explicit_ids=128)
NOUL = {"type": "noul"}
ASKED: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is a refund requested?", "criteria": {"true": "asks money back"}},
    "team": {"type": "choice", "criteria": {"billing": None, "support": "Other help", "übrig": {"a": [1]}}},
    "urgency": {"type": "score", "instructions": ["How", "urgent?"], "criteria": ["Routine", {"level": "Urgent"}]},
}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "state": "x", "questions": {"q": NOUL}} | fields


def decode(body: Any) -> Inquiry:
    return SystemOne().decode(body if isinstance(body, bytes) else json.dumps(body).encode(), MODEL)


def refused(body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(body)
    return caught.value


def faults(body: Any) -> list[tuple[list[str | int], str]]:
    """The places and kinds of what a refusal tells; its words are one line each."""
    error = refused(body)
    detail: Any = error.extra["detail"]
    assert error.status == 422
    assert all(set(entry) == {"loc", "msg", "type"} and "\n" not in entry["msg"] for entry in detail)
    return [(entry["loc"], entry["type"]) for entry in detail]


def test_a_request() -> None:
    found = decode(request(state={"z": 1, "a": "b"}, questions=ASKED))
    assert found.state == '{"z":1,"a":"b"}' and found.state_field == "state"
    refund, team, urgency = found.questions
    assert (refund.instructions, refund.options) == (
        "Is a refund requested?",
        ("false", "true: asks money back"),
    )
    assert (team.instructions, team.options) == (
        "Which of these fits best?",
        ("billing", "support: Other help", 'übrig: {"a":[1]}'),
    )
    assert (urgency.instructions, urgency.options) == ('["How","urgent?"]', ("Routine", '{"level":"Urgent"}'))
    assert [question.field for question in found.questions] == [f"questions.{name}.criteria" for name in ASKED]


@pytest.mark.parametrize("state", ["", "text", {}, {"a": {"b": [None]}}, [], ["a", 1]])
def test_states(state: Any) -> None:
    assert decode(request(state=state)).state == (
        state if isinstance(state, str) else json.dumps(state, separators=(",", ":"))
    )


@pytest.mark.parametrize(
    "question",
    [
        NOUL | {"instructions": None, "criteria": None},
        NOUL | {"criteria": {}},
        NOUL | {"criteria": {"false": None, "true": ["a"]}},
        {"type": "choice", "criteria": {"only": None}},
        {"type": "choice", "criteria": {"": "empty"}},
        {"type": "choice", "criteria": dict.fromkeys(map(str, range(128)))},
        {"type": "score", "criteria": ["one"]},
        {"type": "score", "criteria": [{}] * 10},
        NOUL | {"more": 1},
    ],
)
def test_questions_that_are_asked(question: Any) -> None:
    (found,) = decode(request(questions={"q": question})).questions
    assert found.options


def test_names_and_numbers_of_questions() -> None:
    names = ["ticket-1", "q.2", "with space", "질문", "🎯", *map(str, range(59))]
    assert len(decode(request(questions=dict.fromkeys(names, NOUL))).questions) == 64


def test_unknown_fields_are_ignored() -> None:
    assert decode(request(foo=1, stream=True, assets=None)) == decode(request())


Q = ["body", "questions", "q"]


@pytest.mark.parametrize(
    ("change", "place", "kind"),
    [
        ({"model": 5}, ["body", "model"], "string_type"),
        ({"model": None}, ["body", "model"], "string_type"),
        ({"state": 5}, ["body", "state"], "union_type"),
        ({"state": None}, ["body", "state"], "union_type"),
        ({"questions": {}}, ["body", "questions"], "too_short"),
        ({"questions": []}, ["body", "questions"], "dict_type"),
        ({"questions": None}, ["body", "questions"], "dict_type"),
        ({"questions": dict.fromkeys(map(str, range(65)), NOUL)}, ["body", "questions"], "too_long"),
        ({"questions": {"": NOUL}}, ["body", "questions", ""], "string_too_short"),
        ({"questions": {"q": 5}}, Q, "model_attributes_type"),
        ({"questions": {"q": {}}}, Q, "union_tag_not_found"),
        ({"questions": {"q": {"type": "box"}}}, Q, "union_tag_invalid"),
        ({"questions": {"q": {"type": "custom"}}}, Q, "union_tag_invalid"),
        ({"questions": {"q": {"type": {}}}}, Q, "union_tag_invalid"),
        ({"questions": {"q": NOUL | {"instructions": 5}}}, [*Q, "noul", "instructions"], "string_type"),
        ({"questions": {"q": NOUL | {"criteria": {"true": "a", "maybe": "b"}}}}, [*Q, "noul", "criteria"], "model_type"),
        ({"questions": {"q": NOUL | {"criteria": []}}}, [*Q, "noul", "criteria"], "model_type"),
        ({"questions": {"q": NOUL | {"criteria": {"true": 1}}}}, [*Q, "noul", "criteria", "true"], "string_type"),
        ({"questions": {"q": {"type": "choice"}}}, [*Q, "choice", "criteria"], "missing"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, [*Q, "choice", "criteria"], "too_short"),
        ({"questions": {"q": {"type": "choice", "criteria": ["a", "b"]}}}, [*Q, "choice", "criteria"], "dict_type"),
        (
            {"questions": {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(129)))}}},
            [*Q, "choice", "criteria"],
            "too_long",
        ),
        ({"questions": {"q": {"type": "choice", "criteria": {"a": 1}}}}, [*Q, "choice", "criteria", "a"], "string_type"),
        ({"questions": {"q": {"type": "score"}}}, [*Q, "score", "criteria"], "missing"),
        ({"questions": {"q": {"type": "score", "criteria": []}}}, [*Q, "score", "criteria"], "too_short"),
        ({"questions": {"q": {"type": "score", "criteria": {"0": "a"}}}}, [*Q, "score", "criteria"], "list_type"),
        ({"questions": {"q": {"type": "score", "criteria": ["a"] * 11}}}, [*Q, "score", "criteria"], "too_long"),
        ({"questions": {"q": {"type": "score", "criteria": ["a", None]}}}, [*Q, "score", "criteria", 1], "string_type"),
        ({"assets": {}}, ["body", "assets"], "too_short"),
        ({"assets": []}, ["body", "assets"], "dict_type"),
    ],
)  # fmt: skip
def test_faults(change: dict[str, Any], place: list[str | int], kind: str) -> None:
    """The places and kinds are those that the protocol's reference server was recorded with, where it has the fault."""
    assert faults(request(**change)) == [(place, kind)]


def test_a_body_that_is_no_object() -> None:
    assert faults([1]) == [(["body"], "dict_type")]


def test_all_faults_are_told_at_once() -> None:
    body = {"state": 1, "questions": {"a": {}, "b": {"type": "score", "criteria": [1, 2]}}}
    assert faults(body) == [
        (["body", "model"], "missing"),
        (["body", "state"], "union_type"),
        (["body", "questions", "a"], "union_tag_not_found"),
        (["body", "questions", "b", "score", "criteria", 0], "string_type"),
        (["body", "questions", "b", "score", "criteria", 1], "string_type"),
    ]


@pytest.mark.parametrize("name", ["x", "é" * 5000, "\0\n\ud7ff😊" * 3000, '"\\' * 3000])
def test_what_is_told_is_bounded(name: str) -> None:
    """However many faults there are and however long their names, the reply keeps its form."""
    many = {f"{name}{index}": {"type": "choice", "criteria": {name: 1}} for index in range(200)}
    error = refused(request(questions=many))
    reply = error_reply(error, SystemOne().error)
    assert reply.status == 422 and len(reply.body) <= MAX_ERROR_BYTES
    told = reply.json()["detail"]
    assert 1 <= len(told) <= MAX_FAULTS
    assert all(len(step) <= 103 for entry in told for step in entry["loc"])


@pytest.mark.parametrize("body", [b'{"model":', b"", b"{'a': 1}", b'{"a": NaN}', b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_400(body: bytes) -> None:
    error = refused(body)
    assert error.status == 400 and "detail" not in error.extra
    assert SystemOne().error(error) == error_object(error)


@pytest.mark.parametrize("field", ["state", "questions"])
def test_nesting_is_bounded(field: str) -> None:
    deep: Any = []
    for _ in range(70):
        deep = [deep]
    body = request(state=deep) if field == "state" else request(questions={"q": NOUL | {"instructions": deep}})
    error = refused(body)
    assert error.status == 400 and f"{field}: nests deeper than 64 levels" in str(error)


def test_images_are_refused() -> None:
    assets = {"<image:1>": {"type": "image", "format": "png", "data_base64": "AA=="}}
    error = refused(request(state="<image:1>", assets=assets))
    assert (error.status, error.param) == (400, "assets")
    assert "TypeSafe-Danger-Zone-Images: true" in str(error) and "this core takes text alone" in str(error)


def encode(questions: dict[str, Any], *probabilities: tuple[float, ...]) -> Any:
    found = [Distribution(values, 0.5) for values in probabilities]
    body = SystemOne().encode(decode(request(questions=questions)), found, Usage(100, 40, 3), MODEL)
    return json.loads(body)


def test_an_answer() -> None:
    assert encode(ASKED, (0.25, 0.75), (0.8, 0.1, 0.1), (0.25, 0.75)) == {
        "model": "org/tiny",
        "answers": {
            "refund": {"type": "noul", "noul": 0.75},
            "team": {
                "type": "choice",
                "choice": "billing",
                "confidence": pytest.approx(0.7),
                "probabilities": {"billing": 0.8, "support": 0.1, "übrig": 0.1},
            },
            "urgency": {
                "type": "score",
                "score": 0.75,
                "confidence": 0.5,
                "legend": {"0": "Routine", "1": {"level": "Urgent"}},
                "probabilities": {"0": 0.25, "1": 0.75},
            },
        },
        "usage": {"input_tokens": 100, "output_tokens": 3},
    }


def test_lone_options_are_certain_and_first_options_win() -> None:
    answers = encode(
        {
            "one": {"type": "choice", "criteria": {"a": None}},
            "two": {"type": "choice", "criteria": {"b": None, "a": None}},
        },
        (1.0,),
        (0.5, 0.5),
    )["answers"]
    assert answers["one"]["confidence"] == 1 and answers["one"]["choice"] == "a"
    assert answers["two"]["confidence"] == 0 and answers["two"]["choice"] == "b"
