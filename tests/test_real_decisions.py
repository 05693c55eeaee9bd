"""Decisions of a real core: many labels of its tokenizer, what Chat says of the same messages, the same bits in any company."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

import pytest

import flare
from flare.api import InProcess
from flare.decisions.labels import SPELLINGS
from flare.decisions.prompt import question_text
from flare.decisions.questions import Question

STATE = "I was charged twice for my March invoice. Please give me my money back, or I will ask my bank."
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Does the customer want money back?"},
    "team": {"type": "choice", "criteria": {"billing": "Invoices, refunds", "support": "Bugs", "sales": None}},
    "anger": {"type": "score", "instructions": "How angry is the customer?", "criteria": ["Calm", "Angry", "Furious"]},
}


@pytest.fixture(scope="module")
def model(smollm2_core: Path) -> Iterator[InProcess]:
    with flare.open(smollm2_core, threads=2) as opened:
        yield opened


def ask(model: InProcess, path: str, body: dict[str, Any]) -> Any:
    reply: Any = model.request(path, body)
    assert reply.status == 200, reply.text
    return reply.json()


def decide(model: InProcess, questions: dict[str, Any], state: Any = STATE) -> Any:
    return ask(model, "/v1/systemone", {"model": "m", "state": state, "questions": questions})


def test_128_options(model: InProcess) -> None:
    """The tokenizer has as many labels; each option has a probability, and they sum to 1."""
    options = [f"Queue {index}" for index in range(128)]
    found = decide(model, {"q": {"type": "choice", "instructions": "Which queue?", "criteria": dict.fromkeys(options)}})
    answer = found["answers"]["q"]
    assert list(answer["probabilities"]) == options and sum(answer["probabilities"].values()) == pytest.approx(1)
    assert all(p > 0 for p in answer["probabilities"].values())
    assert answer["choice"] == max(options, key=answer["probabilities"].__getitem__)
    assert found["usage"]["output_tokens"] == 1


def test_the_same_as_chat(model: InProcess) -> None:
    """The answer is what Chat's log probabilities of the same messages say: usage, and probabilities to the bits of f32."""
    names = ["billing", "support", "sales"]
    question = {"type": "choice", "instructions": "Which team?", "choices": [{"value": name} for name in names]}
    decision = ask(model, "/v1/decisions", {"input": STATE, "questions": [question]})
    text = question_text(Question("Which team?", tuple(names), ""), SPELLINGS[:3])
    messages = [{"role": "user", "content": STATE}, {"role": "user", "content": text}]
    tokens = [model.runtime.tokenizer.token_to_id(label) for label in "ABC"]
    wanted = {"logprobs": True, "logprob_token_ids": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    chat = ask(model, "/v1/chat/completions", {"messages": messages, **wanted})
    assert chat["usage"]["prompt_tokens"] == decision["usage"]["input_tokens"]
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    weights = [exp(found["logprob"]) for found in entry["top_logprobs"][:3]]
    (answer,) = decision["answers"]
    assert [item["probability"] for item in answer["probabilities"]] == pytest.approx(
        [weight / sum(weights) for weight in weights], rel=1e-12
    )
    assert answer["confidence"] == pytest.approx(max(weights), rel=1e-12)


def test_answers_are_the_same_in_any_company(model: InProcess) -> None:
    """Alone, among other questions in another order, and while other requests run: to the last bit."""
    alone = {name: decide(model, {"only": question})["answers"]["only"] for name, question in QUESTIONS.items()}
    assert decide(model, QUESTIONS)["answers"] == alone
    reverse = dict(reversed(QUESTIONS.items()))
    found: list[Any] = []
    crowd = [
        threading.Thread(target=lambda: found.append(decide(model, reverse)["answers"])),
        threading.Thread(target=lambda: found.append(decide(model, QUESTIONS)["answers"])),
        threading.Thread(target=lambda: ask(model, "/v1/completions", {"prompt": "Once", "max_tokens": 40, "seed": 1})),
    ]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert found == [alone, alone]


def test_a_state_beyond_the_context(model: InProcess) -> None:
    reply: Any = model.request("/v1/systemone", {"model": "m", "state": "word " * 10_000, "questions": QUESTIONS})
    error = reply.json()["error"]
    assert reply.status == 400 and error["code"] == "context_full" and error["param"] == "state"
