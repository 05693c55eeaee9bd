"""Decisions through OpenAI's own SDK, strictly validated, against a server process; and through TypeSafe's SDK and the suites
of its protocol, in an environment of their own (with FLARE_RUN_CLIENT_TESTS=1; pip fetches them)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, InternalServerError, OpenAI

from tests.server.opt_in import opt_in
from tests.server.process import ROOT, Process, scripted

KEY = "sk-right"
PACKAGES = ["typesafe-sdk==0.7.5", "jevcompat==0.1.1", "jevbench==0.1.0"]
RED = {"choice.options", "http.models", "auth.missing", "auth.invalid", "errors.validation-shape"}
"""The rows of jevcompat that this server does not meet; docs/clients.md says why."""
PREDICATE: Any = {"type": "predicate", "name": "refund", "instructions": "Refund?"}
QUESTIONS: Any = [
    PREDICATE,
    {
        "type": "choice",
        "instructions": "Team?",
        "choices": [{"value": "billing", "description": "Payments"}, {"value": False}],
    },
    {
        "type": "score",
        "instructions": "Urgency?",
        "levels": [{"label": "Routine"}, {"label": "Urgent"}, {"label": "Now"}],
    },
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("decisions")
    with scripted(folder, {"BREAK": None}, settings={"api_key": KEY}, model={"explicit_ids": 128}) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_answers(client: OpenAI) -> None:
    decision = client.decisions.create(model="m", input="Charged twice", questions=QUESTIONS)
    refund, team, urgency = decision.answers
    assert refund.type == "predicate" and refund.name == "refund" and 0 <= refund.probability <= 1
    assert team.type == "choice" and team.name is None and team.choice in ("billing", False)
    assert [item.value for item in team.probabilities] == ["billing", False]
    assert team.confidence == pytest.approx(0.9 * max(item.probability for item in team.probabilities), abs=1e-6)
    assert urgency.type == "score" and [item.label for item in urgency.probabilities] == ["Routine", "Urgent", "Now"]
    assert urgency.score == pytest.approx(sum(item.value * item.probability for item in urgency.probabilities))
    for answer in (team, urgency):
        assert sum(item.probability for item in answer.probabilities) == pytest.approx(1)
    assert decision.model == "org/tiny"
    usage = decision.usage
    assert usage.output_tokens == 3 and usage.total_tokens == usage.input_tokens + 3
    assert usage.input_tokens_details.cached_tokens == usage.output_tokens_details.reasoning_tokens == 0


def test_messages(client: OpenAI, server: Process) -> None:
    """Two messages are one state; what was asked once is answered the same again."""
    parts: Any = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages: Any = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    one = client.decisions.create(model="m", input=messages, questions=[PREDICATE], safety_identifier="u")
    assert server.prompts()[-1].startswith("\0user\na\nb\n\nc\0")
    other = client.decisions.create(model="other", input="a\nb\n\nc", questions=[*QUESTIONS[1:], PREDICATE])
    assert other.answers[-1] == one.answers[0]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": [{"role": "system", "content": "x"}]}, "input[0].role", "'system' messages are not supported here"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0]",
            "Decisions supports text input only; images are not supported",
        ),
        ({"questions": [PREDICATE | {"type": "rank"}]}, "questions[0].type", "'rank' questions are not supported here"),
        ({"prompt_cache_key": "k"}, "prompt_cache_key", "unknown field"),
    ],
)
def test_refusals(client: OpenAI, fields: Any, param: str, says: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(says)) as caught:
        client.decisions.create(**({"model": "m", "input": "x", "questions": [PREDICATE]} | fields))
    assert caught.value.param == param


def test_keys_and_failures(client: OpenAI) -> None:
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="wrong").decisions.create(model="m", input="x", questions=[PREDICATE])
    with pytest.raises(InternalServerError) as caught:
        client.decisions.create(model="m", input="BREAK", questions=[PREDICATE])
    assert caught.value.request_id is not None and "secret" not in str(caught.value)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with TypeSafe's SDK and the suites."""
    folder = tmp_path_factory.mktemp("typesafe")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
    return folder / "bin"


ASKED = opt_in("libraries from PyPI")


@ASKED
@pytest.mark.timeout(600)
def test_typesafe_sdk(server: Process, tools: Path) -> None:
    script = Path(__file__).parent / "clients" / "with_typesafe.py"
    command = [str(tools / "python"), str(script), server.url, KEY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    says = json.loads(result.stdout.splitlines()[-1])
    assert says["answers"] == {"refund": "NoulAnswer", "team": "ChoiceAnswer", "urgency": "ScoreAnswer"}
    assert says["sum"] == pytest.approx(1) and says["legend"] == ["Routine", {"level": "Urgent"}]
    assert says["usage"][0] > 0 and says["usage"][1] == 3
    assert says["refused"] == "TypeSafeUnprocessableEntityError" and says["images"] == "TypeSafeBadRequestError"
    assert says["denied"] == "TypeSafeAuthenticationError" and says["failed"] == "TypeSafeInternalServerError"
    assert says["failed_id"].startswith("systemone-")


@ASKED
@pytest.mark.timeout(600)
def test_jevcompat(server: Process, tools: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [str(tools / "jevcompat"), "test", server.url, "--model", "m", "--key", KEY, "--json", str(report)]
    subprocess.run(command, capture_output=True, timeout=300)
    rows = json.loads(report.read_text())["results"]
    assert {row["id"] for row in rows if row["status"] == "fail"} == RED
    assert sum(row["status"] == "pass" for row in rows) > 35


@ASKED
@pytest.mark.timeout(600)
def test_jevbench(server: Process, tools: Path, tmp_path: Path) -> None:
    """It gets an answer to everything that it asks."""
    command = [str(tools / "jevbench"), "eval", "--url", f"{server.url}/v1/systemone", "--model", "m"]
    environment = os.environ | {"JEVBENCH_API_KEY": KEY, "HOME": str(tmp_path)}
    result = subprocess.run(
        [*command, "--suite", "examples", "--no-cache"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert "50 scored relations" in result.stdout


def test_the_documentation_lists_the_versions_and_the_rows() -> None:
    documented = (ROOT / "docs" / "clients.md").read_text()
    for name in [*(package.partition("==")[2] for package in PACKAGES), *RED]:
        assert re.search(rf"\b{re.escape(name)}\b", documented), name
