"""Prompts whose length alone shows that they do not fit: refused on every route, unencoded; and one that just fits is taken."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flare.text import tokenizer
from flare.text.fewest import WORTH
from tests.decisions.served import deciding
from tests.http.rated import live
from tests.support.live_server import LiveServer

LONG = "word " * (WORTH // 5 + 1)
SAID: list[Any] = [{"role": "user", "content": LONG}]
CONTEXT = 4096
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": SAID}, "messages"),
    "/v1/completions": ({"prompt": LONG}, "prompt"),
    "/v1/responses": ({"input": LONG}, "input"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 5}, "messages"),
    "/v1/decisions": ({"input": LONG, "questions": [{"type": "predicate", "instructions": "Is it?"}]}, "input"),
    "/v1/systemone": (
        {"model": "m", "state": LONG, "questions": {"q": {"type": "noul", "instructions": "?"}}},
        "state",
    ),
}
PARSED = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)")
"""By which Claude Code knows that it has to compact."""

VERSION = {"anthropic-version": "2023-06-01"}


def post(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, data = server.request("POST", path, body, VERSION if path.startswith("/v1/messages") else {})
    return status, json.loads(data)


@pytest.fixture
def unencoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding fails."""

    def fail(*_: object) -> None:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(tokenizer, "_ids", fail)


@pytest.mark.parametrize("path", ROUTES)
def test_refused_before_it_is_encoded(path: str, unencoded: None) -> None:
    body, field = ROUTES[path]
    server, asked = deciding({"A": 0.5})
    with server:
        status, answer = post(server, path, body)
        server.idle()
    assert status == 400 and not asked.prompts
    error = answer["error"]
    found = re.search(r"at least (\d+) tokens", error["message"])
    least = 4 * (WORTH // 5 + 1) / 7  # seven letters are the most that a token has: <|im_start|>
    assert found and least <= int(found[1]) < least + 50  # what the template says comes on top
    if path == "/v1/messages":
        assert error["message"].startswith(f"prompt is too long: {found[0]} > {CONTEXT - 1} maximum")
        assert PARSED.match(error["message"])
        return
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_full", field)
    what = "state and question together are" if "questions" in body else "the prompt is"
    assert error["message"].startswith(f"{what} {found[0]} and the context holds {CONTEXT}; ")
    used = {"tokens_used": int(found[1]), "context_length": CONTEXT, "tokens_remaining": 0, "at_least": True}
    assert error["flare_context"] == used


def test_no_prompt_of_a_list_is_encoded(unencoded: None) -> None:
    with LiveServer() as server:
        status, answer = post(server, "/v1/completions", {"prompt": ["short", LONG]})
    assert status == 400 and answer["error"]["code"] == "context_full"


def test_a_prompt_of_any_length_is_counted() -> None:
    with LiveServer() as server:
        status, answer = post(server, "/v1/messages/count_tokens", {"messages": SAID})
    assert status == 200 and answer["input_tokens"] > len(LONG)


@pytest.mark.parametrize("scored", [{}, {"max_tokens": 0, "prompt_logprobs": 1}], ids=["answered", "scored"])
def test_a_prompt_that_fits_exactly_is_taken(scored: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer whose every token has its letter: the least number is the exact one."""
    monkeypatch.setattr(tokenizer, "WORTH", 0)
    sizes = {"max_context": 64, "kv_pages": 4}
    with live("x", model={"context_length": 64}, replay=sizes) as server:
        server.runtime.tokenizer.__dict__["_fewest"] = server.runtime.tokenizer._fewest._replace(letters=1)
        room = 64 if scored else 63
        assert post(server, "/v1/completions", {"prompt": "a" * room} | scored)[0] == 200
        status, answer = post(server, "/v1/completions", {"prompt": "a" * (room + 1)} | scored)
        assert status == 400 and "at least" in answer["error"]["message"]
        server.idle()
