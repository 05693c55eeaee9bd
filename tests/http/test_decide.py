"""Requests for decisions on their way: exact answers of known distributions, places, clients that leave, failures, the end."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Mapping
from math import exp, inf, log
from typing import Any

import pytest

from flare.api import InProcess
from flare.config import ServerSettings
from flare.decisions.prompt import Compiler
from tests.decisions.served import Asked, deciding, logits_of
from tests.support.live_server import EOS, LiveServer

ONE, DECISIONS = "/v1/systemone", "/v1/decisions"
NOUL = {"type": "noul", "instructions": "Refund?"}
TEAMS = {"billing": None, "support": "Other help", "sales": None}
QUESTIONS = {
    "refund": NOUL,
    "team": {"type": "choice", "criteria": TEAMS},
    "urgency": {"type": "score", "criteria": ["Routine", "Soon", "Urgent"]},
}
LISTED = [
    {"type": "predicate", "instructions": "Refund?"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": name} for name in TEAMS]},
    {
        "type": "score",
        "instructions": "Urgent?",
        "levels": [{"label": "Routine"}, {"label": "Soon"}, {"label": "Urgent"}],
    },
]
BODIES: Mapping[str, Any] = {
    ONE: {"model": "m", "state": "Charged twice", "questions": QUESTIONS},
    DECISIONS: {"input": "Charged twice", "questions": LISTED},
}
WEIGHTS = {"A": 0.08, "B": 0.64, "C": 0.08}
"""Of three labels together 0.8; the rest is other tokens'."""


def post(server: LiveServer, path: str, **fields: Any) -> Any:
    status, answer = server.post(path, BODIES[path] | fields)
    assert status == 200, answer
    return answer


def close(values: Any) -> Any:
    """Log probabilities are rounded to f32 once."""
    return pytest.approx(values, abs=1e-6)


def test_system_one() -> None:
    server, asked = deciding(WEIGHTS)
    with server:
        answer = post(server, ONE)
        server.idle()
    assert answer["model"] == "org/tiny" and list(answer["answers"]) == list(QUESTIONS)
    assert answer["answers"] == {
        "refund": {"type": "noul", "noul": close(0.64 / 0.72)},
        "team": {
            "type": "choice",
            "choice": "support",
            "confidence": close(0.7),
            "probabilities": {"billing": close(0.1), "support": close(0.8), "sales": close(0.1)},
        },
        "urgency": {
            "type": "score",
            "score": close(1.0),
            "confidence": close(1 - 0.2 / (2 / 3)),
            "legend": {"0": "Routine", "1": "Soon", "2": "Urgent"},
            "probabilities": {"0": close(0.1), "1": close(0.8), "2": close(0.1)},
        },
    }
    assert answer["usage"] == {"input_tokens": sum(map(len, asked.prompts)), "output_tokens": 3}


def test_decisions() -> None:
    server, asked = deciding(WEIGHTS)
    with server:
        answer = post(server, DECISIONS)
        server.idle()
    spread = zip(TEAMS, (0.1, 0.8, 0.1), strict=True)
    assert answer["answers"] == [
        {"type": "predicate", "name": None, "probability": close(0.64 / 0.72)},
        {
            "type": "choice",
            "name": None,
            "choice": "support",
            "confidence": close(0.64),
            "probabilities": [{"value": name, "probability": close(p)} for name, p in spread],
        },
        {
            "type": "score",
            "name": None,
            "score": close(1.0),
            "confidence": close(0.64),
            "probabilities": [
                {"value": value, "label": label, "probability": close(p)}
                for value, label, p in ((0, "Routine", 0.1), (1, "Soon", 0.8), (2, "Urgent", 0.1))
            ],
        },
    ]
    prompts = sum(map(len, asked.prompts))
    assert answer["usage"] == {
        "input_tokens": prompts,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompts + 3,
    }


def test_nothing_but_the_distribution_counts() -> None:
    """Neither what the model is sampled with nor what it draws: not even an end token, and no format of replies."""
    answers = []
    for defaults, more in (
        ({"temperature": 0.0}, {}),
        ({"temperature": 1.7, "top_k": 1, "repetition_penalty": 1.9, "presence_penalty": 2.0}, {"max_tokens_cap": 1}),
    ):
        for top in (None, EOS, ord("{")):

            def logits(tokens: Any, top: int | None = top) -> list[float]:
                row = logits_of({"A": 0.1, "B": 0.3})
                row[0], row[1 if top is None else top] = -inf, log(0.6)
                return row

            server, _ = deciding({}, model={"defaults": defaults, **more}, replay={"logits": logits})
            with server:
                answers.append(
                    (post(server, ONE, questions={"q": NOUL})["answers"], post(server, DECISIONS)["answers"][0])
                )
    assert answers[0][0]["q"]["noul"] == close(0.75)
    assert all(answer == answers[0] for answer in answers)


def test_answers_do_not_depend_on_other_questions() -> None:
    """Renamed, in another order, beside others or alone: every question has the same answer, to the last bit."""

    def weights(prompt: str) -> dict[str, float]:
        share = (hash(tuple(prompt.encode())) % 97 + 1) / 400
        return {"A": share, "B": 0.3, "C": 0.3 - share}

    server, _ = deciding(weights)
    with server:
        together = post(server, ONE)["answers"]
        renamed = {f"x {name}": question for name, question in reversed(QUESTIONS.items())}
        other = post(server, ONE, questions=renamed)["answers"]
        for name, question in QUESTIONS.items():
            assert other[f"x {name}"] == together[name]
            assert post(server, ONE, questions={"only": question})["answers"]["only"] == together[name]


def test_questions_run_one_after_the_other_on_one_place() -> None:
    server, asked = deciding(WEIGHTS, settings={"max_requests": 1})
    with server:
        server.replay.pause()
        connection = connect(server, ONE)
        for done in range(3):
            server.replay.wait_until_held()
            stats = server.runtime.stats()
            assert (stats.active, stats.waiting, stats.completed) == (1, 0, done)
            assert server.server.generator.admission.used == 1
            status, answer = server.post(DECISIONS, BODIES[DECISIONS])
            assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded"
            server.replay.allow()
        assert received(connection).startswith(b"HTTP/1.1 200")
        server.replay.resume()
        server.idle()
        metrics = server.server.generator.metrics
        assert (metrics.submitted, metrics.completed, metrics.cancelled, metrics.failed) == (3, 3, 0, 0)
    assert len(asked.prompts) == 3


def connect(server: LiveServer, path: str) -> socket.socket:
    """Sends a request and returns its connection without reading."""
    body = json.dumps(BODIES[path]).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def received(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    connection.close()
    return data


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("done", range(3))
def test_a_client_that_leaves_ends_its_question_and_no_other_is_asked(
    path: str, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another compiled."""
    server, asked = deciding(WEIGHTS)
    read, compiled = Compiler._read, []

    def counted(compiler: Compiler, inquiry: Any, question: Any, variables: Any) -> Any:
        compiled.append(question)
        return read(compiler, inquiry, question, variables)

    monkeypatch.setattr(Compiler, "_read", counted)
    with server:
        server.replay.pause()
        connection = connect(server, path)
        for _ in range(done):
            server.replay.wait_until_held()
            server.replay.allow()
        server.replay.wait_until_held()
        connection.close()
        server.until(lambda: not server.server.generator.answers)
        server.replay.resume()
        server.idle()
        metrics = server.server.generator.metrics
        assert len(asked.prompts) == len(compiled) == done + 1
        assert (metrics.submitted, metrics.completed, metrics.cancelled) == (done + 1, done, 1)
        assert server.post(path, BODIES[path])[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_later_question_that_does_not_fit_is_refused_when_it_is_due(path: str) -> None:
    server, asked = deciding(WEIGHTS)
    long = "why " * 2000
    later: Any = {"last": NOUL | {"instructions": long}}
    questions = QUESTIONS | later if path == ONE else [*LISTED, LISTED[0] | {"instructions": long}]
    with server:
        status, headers, body = server.request("POST", path, BODIES[path] | {"questions": questions})
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (
            400,
            "context_full",
            {ONE: "state", DECISIONS: "input"}[path],
        )
        assert error["message"].startswith(f"state and question together are {error['flare_context']['tokens_used']} ")
        assert headers["x-request-id"] and len(asked.prompts) == 3
        server.idle()


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_ends_the_request(path: str) -> None:
    server, asked = deciding(WEIGHTS)
    with server:
        server.replay.fail_next_step(RuntimeError("a secret"))
        status, headers, body = server.request("POST", path, BODIES[path])
        error = json.loads(body)["error"]
        assert status == 500 and error["type"] == "server_error" and "secret" not in error["message"]
        assert headers["x-request-id"] == headers["request-id"]
        server.idle()
        metrics = server.server.generator.metrics
        assert (metrics.submitted, metrics.failed) == (1, 1) and not asked.prompts
        assert server.post(path, BODIES[path])[0] == 200


def test_a_model_that_gives_labels_nothing_has_failed() -> None:
    server, _ = deciding({"z": 0.5})
    with server:
        status, answer = server.post(ONE, BODIES[ONE])
        assert status == 500
        assert (answer["error"]["type"], answer["error"]["code"]) == ("server_error", "invalid_output")
        server.idle()
        metrics = server.server.generator.metrics
        assert (metrics.submitted, metrics.failed, metrics.completed) == (1, 1, 0)


def test_a_question_whose_logits_are_none_fails() -> None:
    server, _ = deciding(WEIGHTS)
    with server:
        server.replay.fail_rows(0)
        status, answer = server.post(ONE, BODIES[ONE])
        assert status == 500 and answer["error"]["type"] == "server_error"
        server.idle()
        assert server.post(ONE, BODIES[ONE])[0] == 200


def test_the_end_of_the_server() -> None:
    """The question that runs fails, and no other is asked."""
    server, asked = deciding(WEIGHTS)
    with server:
        server.replay.pause()
        connection = connect(server, ONE)
        server.replay.wait_until_held()
        server.on_loop(fail(server))
        server.replay.resume()
        data = received(connection)
        assert data.startswith(b"HTTP/1.1 503") and b"the server is shutting down" in data
    assert len(asked.prompts) <= 1


async def fail(server: LiveServer) -> None:
    from flare.service.generate import shutting_down

    server.server.generator.fail_all(shutting_down())


def test_headers() -> None:
    server, _ = deciding(WEIGHTS)
    with server:
        _, one, _ = server.request("POST", ONE, BODIES[ONE])
        _, listed, _ = server.request("POST", DECISIONS, BODIES[DECISIONS])
        _, refused, _ = server.request("POST", ONE, {})
    assert one["x-request-id"] == one["request-id"] == one["x-typesafe-request-id"]
    assert one["x-request-id"].startswith("systemone-") and listed["x-request-id"].startswith("decision-")
    assert "x-typesafe-request-id" not in listed and "x-request-id" not in refused


def test_faults_have_the_protocols_form_and_other_refusals_that_of_chat() -> None:
    server, _ = deciding(WEIGHTS, settings={"api_key": "k", "max_body_bytes": 5000})
    key = {"Authorization": "Bearer k"}
    with server:
        status, _, data = server.request("POST", ONE, {"model": "m"}, key)
        assert status == 422 and [entry["loc"] for entry in json.loads(data)["detail"]] == [
            ["body", "state"],
            ["body", "questions"],
        ]
        for wanted, method, path, body, headers in (
            (400, "POST", ONE, b"{", key),
            (400, "POST", DECISIONS, b"{}", key),
            (401, "POST", ONE, BODIES[ONE], {}),
            (401, "POST", DECISIONS, BODIES[DECISIONS], {"x-api-key": "k"}),
            (405, "GET", ONE, None, key),
            (413, "POST", ONE, BODIES[ONE] | {"state": "x" * 6000}, key),
            (415, "POST", ONE, BODIES[ONE], key | {"Content-Encoding": "lzma"}),
        ):
            status, _, data = server.request(method, path, body, headers)
            assert status == wanted and set(json.loads(data)["error"]) == {"message", "type", "param", "code"}, data
        assert (
            server.request(
                "POST", ONE, gzip.compress(json.dumps(BODIES[ONE]).encode()), key | {"Content-Encoding": "gzip"}
            )[0]
            == 200
        )
        server.idle()


MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}
FORM = b'--b\r\nContent-Disposition: form-data; name="request"\r\nContent-Type: application/json\r\n\r\n{}\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("path", "headers", "status", "says"),
    [
        (ONE, {}, 400, "TypeSafe-Danger-Zone-Images: true and a core that sees, this core takes text alone"),
        (ONE, {"TypeSafe-Danger-Zone-Images": "true"}, 400, "this core takes text alone"),
        (ONE, {"Content-Encoding": "identity"}, 400, "this core takes text alone"),
        (ONE, {"Content-Encoding": "zstd"}, 415, "Content-Encoding: zstd is not served here"),
        (ONE, {"Origin": "http://127.0.0.1"}, 415, "multipart/form-data is not served here"),
        (ONE, {"Content-Type": "multipart/mixed; boundary=b"}, 415, "multipart/mixed is not served here"),
        (DECISIONS, {}, 415, "multipart/form-data is not served here"),
    ],
)
def test_multipart(path: str, headers: dict[str, str], status: int, says: str) -> None:
    server, asked = deciding(WEIGHTS)
    with server:
        seen, _, data = server.request("POST", path, FORM, MULTIPART | headers)
        assert seen == status and says in json.loads(data)["error"]["message"]
        assert server.server.generator.metrics.submitted == 0 and not asked.prompts


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            {"explicit_ids": 0},
            "takes no token ids for log probabilities, by which options are read; export the core again with this",
        ),
        ({"explicit_ids": 2}, "3 options, this model has labels for 2; ask with fewer"),
        ({"context_length": 60}, "the context holds 60"),
        ({"opens_reasoning": True}, "cannot switch thinking off"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_what_a_core_cannot_do_is_refused_before_any_question_runs(path: str, model: dict[str, Any], says: str) -> None:
    server, asked = deciding(WEIGHTS, model=model)
    with server:
        status, answer = server.post(path, BODIES[path])
        assert status == 400 and says in answer["error"]["message"]
        if "context_length" in model:
            assert (
                answer["error"]["code"] == "context_full" and answer["error"]["flare_context"]["context_length"] == 60
            )
            assert answer["error"]["param"] == {ONE: "state", DECISIONS: "input"}[path]
        server.idle()
        assert server.server.generator.metrics.submitted == 0 and not asked.prompts


def test_without_a_template() -> None:
    server, _ = deciding(WEIGHTS)
    server.runtime.template = None
    with LiveServer(runtime=server.runtime) as bare:
        status, answer = bare.post(ONE, BODIES[ONE])
        assert status == 400 and "no chat template" in answer["error"]["message"]
    server.sock.close()


def test_within_a_process() -> None:
    server, asked = deciding(WEIGHTS)
    server.sock.close()
    with InProcess(server.runtime, ServerSettings()) as local:
        answer: Any = local.request(ONE, BODIES[ONE])
        assert answer.status == 200 and answer.json()["answers"]["refund"]["noul"] == close(0.64 / 0.72)
        refused: Any = local.request(ONE, {})
        assert refused.status == 422 and refused.json()["detail"]
        listed: Any = local.request(DECISIONS, BODIES[DECISIONS])
        assert listed.json()["answers"][0]["probability"] == close(0.64 / 0.72)


def test_the_time_to_a_first_response_knows_no_decisions() -> None:
    """There is no text whose first letter somebody waits for."""
    server, _ = deciding(WEIGHTS)
    with server:
        post(server, ONE)
        assert server.server.generator.metrics._first_responses == 0
        status, _, data = server.request("GET", "/metrics")
        assert b'flare_http_requests_total{route="/v1/systemone",status="200"} 1' in data


def test_probabilities_of_sixty_options() -> None:
    """Each option has its own label's probability."""
    names = [f"option {index}" for index in range(60)]
    weights = {label: (index + 1) / 4000 for index, label in enumerate(LABELS[:60])}
    server, _ = deciding(weights)
    with server:
        choice = {"type": "choice", "criteria": dict.fromkeys(names)}
        answer = post(server, ONE, questions={"q": choice})["answers"]["q"]
    total = sum(weights.values())
    assert answer["choice"] == "option 59"
    assert answer["probabilities"] == {name: close((i + 1) / 4000 / total) for i, name in enumerate(names)}


def test_probabilities_are_those_of_chat() -> None:
    """The log probabilities that Chat Completions gives the same messages say the same, label by label, to the bit."""
    server, asked = deciding({"A": 0.1, "B": 0.2, "C": 0.4})
    with server:
        decision = post(server, DECISIONS, questions=LISTED[1:2])["answers"][0]
        _, state, question = asked.prompts[0].split("\0user\n")
        messages = [{"role": "user", "content": text.partition("\0")[0]} for text in (state, question)]
        ids = [ord(label) for label in "ABC"]
        wanted = {"logprobs": True, "logprob_token_ids": ids, "max_tokens": 1, "ignore_eos": True}
        status, chat = server.post("/v1/chat/completions", {"messages": messages, **wanted})
    assert status == 200 and set(asked.prompts) == {asked.prompts[0]}
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    weights = [exp(found["logprob"]) for found in entry["top_logprobs"][:3]]
    assert [found["token"] for found in entry["top_logprobs"][:3]] == ["A", "B", "C"]
    assert [item["probability"] for item in decision["probabilities"]] == pytest.approx(
        [weight / sum(weights) for weight in weights], rel=1e-14
    )
    assert decision["confidence"] == pytest.approx(max(weights), rel=1e-14)


LABELS = [*map(chr, range(65, 91)), *map(chr, range(97, 123)), *map(chr, range(48, 58))]
"""The labels of byte tokens in the order in which options get them."""


def test_the_hook_keeps_prompts() -> None:
    """The scripted distribution is what the model reports: these tests compare with something."""
    asked = Asked(lambda prompt: {"A": 0.25})
    row = asked((256, 65))
    assert sum(map(exp, row)) == pytest.approx(1) and row[ord("A")] == log(0.25) and asked.prompts == ["\0A"]
