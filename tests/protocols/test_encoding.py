"""Events to JSON: the prepared byte templates give what a plain encoder would, and streams add up to whole answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Failed, Finished, Text, Timings
from flare.errors import RequestError
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.encoding import timings_object
from flare.protocols.endpoint import Collected, Response
from tests.support.live_server import events, make_model

ENDPOINTS = {"chat": ChatCompletions(), "completions": Completions()}
TIMES = Timings(queued=0.001, prompt=0.02, first_token=0.03, predicted=0.5)


def response(name: str, *, n: int = 1, model: str = "m", **options: Any) -> Response:
    endpoint = ENDPOINTS[name]
    minimal = {"messages": [{"role": "user", "content": "x"}]} if name == "chat" else {"prompt": "x"}
    served = make_model(id=model)
    decoded = endpoint.decode(
        json.dumps({**minimal, "n": n, "stream": True, "stream_options": options}).encode(), served
    )
    return Response(id="id-1", created=7, model=served, decoded=decoded, prompts=[[1, 2, 3, 4]])


def end(choice: int = 0, text: str = "", tokens: int = 1, completion: int = 3, cause: Any = "stop_token") -> Finished:
    """The end of a choice; a prompt's first choice took 1 token from a cache, its second 3."""
    return Finished(choice, text, tokens, cause, None, 4, 1 + 2 * choice, completion, TIMES)


def encode(name: str, served: Response, happened: list[Any]) -> list[Any]:
    encoder = ENDPOINTS[name].stream(served)
    frames = []
    for event in happened:
        assert not encoder.ended
        frames.append(encoder.encode(event))
    assert encoder.ended
    return events(b"".join(frames))


@pytest.mark.parametrize("name", ENDPOINTS)
@given(st.lists(st.text(), max_size=5), st.text(), st.text(min_size=1, max_size=20))
def test_any_text_and_name_survive_the_templates(name: str, pieces: list[str], last: str, model: str) -> None:
    happened = [Text(0, piece, 1, 0) for piece in pieces] + [end(text=last)]
    chunks = encode(name, response(name, model=model), happened)
    assert chunks.pop() == "[DONE]"
    assert {chunk["model"] for chunk in chunks} == {model}
    assert "".join(text_of(chunk) for chunk in chunks) == "".join(pieces) + last


def text_of(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def test_the_chunks_of_a_chat() -> None:
    first, second, last, done = encode("chat", response("chat"), [Text(0, "", 1, 0), Text(0, "a", 1, 0), end()])
    shared = {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "system_fingerprint": "core-0123456789abcdef",
    }
    delta = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first == shared | {"choices": [delta | {"delta": {"role": "assistant", "content": ""}}]}
    assert second == shared | {"choices": [delta | {"delta": {"content": "a"}}]}
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "stop_token"}
    ]
    assert last["flare_context"] == {"tokens_used": 7, "context_length": 512, "tokens_remaining": 505}
    assert last["timings"] == {
        "queued_ms": 1.0,
        "prompt_n": 3,
        "prompt_ms": 20.0,
        "prompt_per_second": 150.0,
        "first_token_ms": 30.0,
        "predicted_n": 3,
        "predicted_ms": 500.0,
        "predicted_per_second": 4.0,
    }
    assert done == "[DONE]"


def test_a_choice_without_visible_text_still_says_who_speaks() -> None:
    first, last, _ = encode("chat", response("chat"), [end(completion=1)])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    last, _ = encode("completions", response("completions"), [end(completion=1)])
    assert last["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("stop_token", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("context_full", "length"),
    ],
)
@pytest.mark.parametrize("name", ENDPOINTS)
def test_causes_and_finish_reasons(name: str, cause: Any, reason: str) -> None:
    last = encode(name, response(name), [end(cause=cause)])[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (reason, cause)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_usage_is_sent_when_it_is_asked_for(name: str) -> None:
    happened = [Text(0, "a", 1, 1), Text(1, "b", 1, 3), end(0, "c", 1, 2), end(1, "", 1, 2)]
    plain = encode(name, response(name, n=2), happened)
    assert not any("usage" in chunk for chunk in plain[:-1])
    ignored = encode(name, response(name, n=2, continuous_usage_stats=True), happened)
    assert not any("usage" in chunk for chunk in ignored[:-1])

    asked = encode(name, response(name, n=2, include_usage=True), happened)
    assert [chunk["usage"] for chunk in asked[:-2]] == [None] * (len(asked) - 2)
    total = asked[-2]
    assert total["choices"] == []
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    if name == "chat":
        usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    assert total["usage"] == usage

    running = encode(name, response(name, n=2, include_usage=True, continuous_usage_stats=True), happened)
    counts = [chunk["usage"]["completion_tokens"] for chunk in running[:-1]]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in running[:-1]} == {4}
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in running[:-1]} == {1}
    assert running[-2]["usage"] == usage


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_failure_ends_the_stream_without_the_sentinel(name: str) -> None:
    failed = Failed(RequestError("it broke", status=500, type="server_error"))
    assert encode(name, response(name), [failed]) == [
        {"error": {"message": "it broke", "type": "server_error", "param": None, "code": None}}
    ]
    later = encode(name, response(name), [Text(0, "a", 1, 0), failed])
    assert "error" in later[-1] and "[DONE]" not in later


@pytest.mark.parametrize("name", ENDPOINTS)
@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=20))
def test_a_stream_adds_up_to_the_whole_answer(name: str, pieces: list[tuple[int, str]]) -> None:
    served = response(name, n=3, include_usage=True)
    happened: list[Any] = [Text(choice, text, 1, 0) for choice, text in pieces]
    happened += [end(choice, "!", 1, 1 + sum(c == choice for c, _ in pieces)) for choice in (2, 0, 1)]
    collected = Collected(3)
    assert [collected.add(event) for event in happened] == [False] * (len(happened) - 1) + [True]
    whole = json.loads(ENDPOINTS[name].encode(served, collected))
    chunks = encode(name, served, happened)[:-1]
    assert chunks[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        content = choice["message"]["content"] if name == "chat" else choice["text"]
        assert "".join(text_of({"choices": [c]}) for c in own) == content
        assert own[-1]["finish_reason"] == choice["finish_reason"] and own[-1]["stop_reason"] == choice["stop_reason"]
        assert all(c["finish_reason"] is None for c in own[:-1])


def test_a_rate_without_time_is_null() -> None:
    collected = Collected(1)
    collected.add(Finished(0, "", 0, "max_tokens", None, 4, 0, 0, Timings()))
    timings = json.loads(ENDPOINTS["completions"].encode(response("completions"), collected))["timings"]
    assert timings["prompt_per_second"] is None and timings["predicted_per_second"] is None


def test_the_documents_list_the_timings(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    table = text[text.index("| field of `timings` |") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(timings_object([end()]))
