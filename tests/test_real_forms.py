"""Answers of a form from a core of random weights, over HTTP: whatever such a model would write, only the form may pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.constraints.json_schema_suite import Case, cases
from tests.test_real_serving import CoreServer

CHOICES = 3
TOKENS = 120
HOT = {"temperature": 1.0, "seed": 11, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def server(tiny_core: Path) -> Iterator[CoreServer]:
    with CoreServer(tiny_core) as running:
        yield running


def ask(server: CoreServer, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": "x", "n": CHOICES, **HOT, **fields})


def schema_format(case: Case) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "case", "schema": case.schema}}


def test_every_answer_to_the_suites_schemas_is_of_them(server: CoreServer) -> None:
    """Each schema of JSON-Schema-Test-Suite is taken, or refused with what is not supported in it; no answer that
    ended by itself is wrong."""
    taken = ended = 0
    for case in cases():
        status, answer = ask(server, response_format=schema_format(case))
        if status != 200:
            error = answer["error"]
            assert status == 400 and error["message"].startswith("response_format"), (case.name, error)
            assert error["param"] is not None, case.name
            continue
        taken += 1
        for choice in answer["choices"]:
            assert choice["finish_reason"] in ("stop", "length"), case.name
            if choice["finish_reason"] == "stop":
                ended += 1
                # A float is no multiple of 0.0001; a fraction of 1e99999999999 takes its time.
                number = Fraction if "multipleOf" in str(case.schema) else float
                schema = json.loads(json.dumps(case.schema), parse_float=number)
                Draft202012Validator(schema).validate(json.loads(choice["text"], parse_float=number))
            else:
                assert not choice["text"] or choice["text"].lstrip()[0] in '{["-0123456789tfn', case.name
    assert taken >= 140 and ended >= 200, (taken, ended)


@pytest.mark.parametrize("pattern", ["[a-c]{2,5}x", "(yes|no)(, (yes|no)){0,3}", "é{1,3}z?"])
def test_every_answer_of_an_expression_is_of_it(server: CoreServer, pattern: str) -> None:
    status, answer = ask(server, structured_outputs={"regex": pattern})
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


def test_every_answer_of_a_grammar_is_of_it(server: CoreServer) -> None:
    grammar = 'start: sum\nsum: NUM ("+" NUM)?\nNUM: /[1-9][0-9]?/\n'
    status, answer = ask(server, grammar=grammar)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?)?", choice["text"]), choice


def test_greedy_and_filtered_draws_keep_the_form_too(server: CoreServer) -> None:
    """The likeliest token of all may be forbidden, and so may each of the filter's few."""
    for sampling in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}, {"repetition_penalty": 2.0}):
        status, answer = ask(server, structured_outputs={"choice": ["alpha", "beta", "betamax"]}, **sampling)
        assert status == 200, answer
        assert {choice["text"] for choice in answer["choices"]} <= {"alpha", "beta", "betamax"}


def test_log_probabilities_under_a_form_are_the_models_own(server: CoreServer) -> None:
    """Forbidden tokens stand among the alternatives with their values, and what is drawn keeps its own however unlikely."""
    status, answer = ask(
        server, structured_outputs={"choice": ["alpha", "beta"]}, logprobs=20, n=1, return_tokens_as_token_ids=True
    )
    assert status == 200, answer
    entries = answer["choices"][0]["logprobs"]
    assert len(entries["tokens"]) == len(entries["top_logprobs"])
    assert any(len(top) == 21 for top in entries["top_logprobs"]), "what the form demands is hardly ever likely"
    assert all(value < 0 for top in entries["top_logprobs"] for value in top.values())
