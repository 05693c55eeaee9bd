"""Streams of reasoning, calls and observed tokens: they add up to the buffered answer, whatever the events are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from flare.conversation import Called, Event, Failed, Finished, Observed, Reasoning, Scored, Text, Timings, ToolCall
from flare.errors import RequestError
from flare.logprobs import TokenLogprobs
from flare.output import OutputSyntax
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.endpoint import Collected, Response
from flare.protocols.logprob_encoding import Spelling
from tests.support.live_server import events, make_model

CHAT, RAW = ChatCompletions(), Completions()
MODEL = make_model(output=OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")))
ARRIVED = 100.0
TIMES = Timings(queued=0.001, prompt=0.02, first_token=0.03, predicted=0.5)
CALL = ToolCall("call_1", "look", '{"q": "ä"}')


def response(endpoint: Any = CHAT, *, prompts: int = 1, **fields: Any) -> Response:
    texts = ["x", "yz"][:prompts]
    minimal = {"messages": [{"role": "user", "content": "x"}]} if endpoint is CHAT else {"prompt": texts}
    decoded = endpoint.decode(json.dumps({**minimal, "stream": True, **fields}).encode(), MODEL)
    ids = [list(text.encode()) for text in texts]
    return Response(id="id-1", created=7, model=MODEL, decoded=decoded, prompts=ids, arrived_at=ARRIVED)


def usage_options(continuous: bool = False) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True, "continuous_usage_stats": continuous}}


def streamed(endpoint: Any, served: Response, happened: list[Event]) -> list[Any]:
    encoder = endpoint.stream(served)
    frames = [encoder.encode(event) for event in happened]
    assert encoder.ended
    chunks = events(b"".join(frames))
    assert chunks.pop() == "[DONE]"
    return chunks


def buffered(endpoint: Any, served: Response, happened: list[Event]) -> dict[str, Any]:
    collected = Collected(served.decoded.generation.n * len(served.prompts))
    assert [collected.add(event) for event in happened][-1]
    whole: dict[str, Any] = json.loads(endpoint.encode(served, collected))
    return whole


def end(choice: int = 0, tokens: int = 1, completion: int = 3, **fields: Any) -> Finished:
    values = {"text": "", "cause": "stop_token", "stop": None, "prompt_tokens": 1, "cached_tokens": 0} | fields
    return Finished(choice=choice, tokens=tokens, completion_tokens=completion, timings=TIMES, **values)


def deltas(chunks: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_the_chunks_of_reasoning_a_call_and_an_answer() -> None:
    happened = [
        Reasoning(0, "Hm", 1, 0),
        Text(0, "So", 1, 0),
        Called(0, CALL, 5, 0),
        Called(0, ToolCall("call_2", "ping", "{}"), 2, 0),
        end(called=True, completion=10, reasoning_tokens=1),
    ]
    chunks = streamed(CHAT, response(), happened)
    first = {"name": "look", "arguments": '{"q": "ä"}'}
    second = {"name": "ping", "arguments": "{}"}
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"content": "So"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": first}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": second}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)
    (choice,) = buffered(CHAT, response(), happened)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"] == {
        "role": "assistant",
        "content": "So",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "Hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": first},
            {"id": "call_2", "type": "function", "function": second},
        ],
    }


def test_what_a_message_does_not_have_is_not_in_it() -> None:
    (only_calls,) = buffered(CHAT, response(), [Called(0, CALL, 1, 0), end(called=True)])["choices"]
    assert only_calls["message"]["content"] is None and "reasoning_content" not in only_calls["message"]
    (only_reasoning,) = buffered(CHAT, response(), [Reasoning(0, "Hm", 1, 0), end(cause="max_tokens")])["choices"]
    assert only_reasoning["message"]["content"] == "" and only_reasoning["finish_reason"] == "length"
    (nothing,) = buffered(CHAT, response(), [end()])["choices"]
    assert nothing["message"] == {"role": "assistant", "content": "", "refusal": None, "annotations": []}


@pytest.mark.parametrize(
    ("cause", "called", "reason"),
    [
        ("stop_token", True, "tool_calls"),
        ("stop_token", False, "stop"),
        ("max_tokens", False, "length"),
        ("context_full", False, "length"),
        ("stop_sequence", False, "stop"),
    ],
)
def test_the_finish_reason_beside_calls(cause: Any, called: bool, reason: str) -> None:
    """Calls that a limit or the user's stop followed do not complete the answer."""
    happened = [Called(0, CALL, 1, 0), end(cause=cause, called=called)]
    assert streamed(CHAT, response(), happened)[-1]["choices"][0]["finish_reason"] == reason
    assert buffered(CHAT, response(), happened)["choices"][0]["finish_reason"] == reason


def test_reasoning_is_counted_as_it_comes() -> None:
    happened = [
        Reasoning(0, "a", 2, 1),
        Reasoning(1, "b", 1, 9),
        Text(0, "c", 3, 1),
        end(0, completion=6, reasoning_tokens=2, cached_tokens=1),
        end(1, completion=2, reasoning_tokens=1, cached_tokens=9),
    ]
    chunks = streamed(CHAT, response(n=2, **usage_options(True)), happened)
    counts = [
        (u["completion_tokens"], u["completion_tokens_details"]["reasoning_tokens"])
        for u in (chunk["usage"] for chunk in chunks)
    ]
    assert counts == [(2, 2), (2, 2), (3, 3), (3, 3), (6, 3), (7, 3), (8, 3), (8, 3)]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {1}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == chunks[-2]["usage"]
    assert chunks[-1]["usage"] == buffered(CHAT, response(n=2), happened)["usage"]


def observed(choice: int, *ids: int, ms: float = 0) -> Observed:
    return Observed(choice, list(ids), ARRIVED + ms / 1000)


def test_observed_tokens_of_a_chat() -> None:
    """Each goes with the next chunk of its choice; where nothing is shown yet, the chunk has an empty delta."""
    happened = [
        observed(0, 5, ms=20),
        Text(0, "", 1, 0),
        observed(0, 6, 7, ms=30),
        Text(0, "hi", 2, 0),
        Called(0, CALL, 0, 0),
        observed(0, 9, ms=40.5),
        end(called=True, completion=4),
    ]
    fields = {"return_token_ids": True, "return_token_timestamps": True}
    chunks = streamed(CHAT, response(**fields), happened)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[120], None, None, None, None]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice.get("token_ids") for choice in choices] == [None, [5], [6, 7], None, [9]]
    assert [choice.get("token_timestamps") for choice in choices] == [None, [20.0], [30.0, 30.0], None, [40.5]]
    assert choices[1]["delta"] == {} and choices[1]["finish_reason"] is None
    whole = buffered(CHAT, response(**fields), happened)
    assert whole["prompt_token_ids"] == [120]
    assert whole["choices"][0]["token_ids"] == [5, 6, 7, 9]
    assert whole["choices"][0]["token_timestamps"] == [20.0, 30.0, 30.0, 40.5]
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]


def test_usage_goes_with_token_ids() -> None:
    """Without a chunk of its own it is on the last chunk; with one, there alone."""
    happened = [observed(0, 5), Text(0, "a", 1, 0), observed(1, 6), end(1, completion=1), end(0, completion=2)]
    usage = buffered(CHAT, response(n=2), happened)["usage"]
    chunks = streamed(CHAT, response(n=2, return_token_ids=True), happened)
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"] == usage and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    chunks = streamed(CHAT, response(n=2, return_token_ids=True, **usage_options()), happened)
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [usage]
    for fields in ({"return_token_timestamps": True}, {"return_token_ids": False}):
        assert not any("usage" in chunk for chunk in streamed(CHAT, response(n=2, **fields), happened))


def test_one_observation_does_not_bring_the_other() -> None:
    happened = [observed(0, 5, ms=1), Text(0, "a", 1, 0), end()]
    for shown, other in (("token_ids", "token_timestamps"), ("token_timestamps", "token_ids")):
        whole = buffered(CHAT, response(**{f"return_{shown}": True}), happened)
        assert shown in whole["choices"][0] and other not in whole["choices"][0]
        assert ("prompt_token_ids" in whole) == (shown == "token_ids")


def test_token_ids_of_completions_stand_in_their_choice() -> None:
    happened = [
        Text(0, "x", 0, 0),  # an echoed prompt
        Text(1, "x", 0, 0),
        observed(1, 8),
        Text(1, "b", 1, 0),
        end(1, 0, 1),
        observed(0, 5),
        Text(0, "a", 1, 0),
        end(0, 0, 1),
        observed(2, 3),
        end(2, 1, 1, text="c"),
        end(3, 0, 0, cause="max_tokens"),
    ]
    served = response(RAW, prompts=2, n=2, return_token_ids=True)
    chunks = streamed(RAW, served, happened)
    whole = buffered(RAW, served, happened)
    assert not any("usage" in chunk or "prompt_token_ids" in chunk for chunk in chunks)
    assert [c["prompt_token_ids"] for c in whole["choices"]] == [[120], [120], [121, 122], [121, 122]]
    assert [c["token_ids"] for c in whole["choices"]] == [[5], [8], [3], []]
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [c.get("prompt_token_ids") for c in own] == [choice["prompt_token_ids"]] + [None] * (len(own) - 1)
        assert sum((c.get("token_ids", []) for c in own), []) == choice["token_ids"]
        assert "".join(c["text"] for c in own) == choice["text"]


@pytest.mark.parametrize("n", [1, 64])
def test_the_scores_of_a_prompt_are_encoded_once_for_all_its_choices(n: int) -> None:
    """The work grows with the prompts alone: 128 choices of one prompt held the event loop for seconds."""
    model = make_model(max_top_logprobs=20, scores_prompts=True)
    fields = {"prompt": ["abc", "de"], "n": n, "echo": True, "logprobs": 2, "stream": True, "return_token_ids": True}
    written: list[int] = []

    class Counted(Spelling):
        def name(self, token: int) -> str:
            written.append(token)
            return super().name(token)

    served = Response(
        id="id-1",
        created=7,
        model=model,
        decoded=RAW.decode(json.dumps(fields).encode(), model),
        prompts=[list(b"abc"), list(b"de")],
        echoed=["abc", "de"],
        spelling=Counted(lambda token: bytes([token])),
    )
    scores = {
        place: [TokenLogprobs(token, -1.0, 1, (token, 120), (-1.0, -2.0)) for token in text[1:]]
        for place, text in enumerate((b"abc", b"de"))
    }
    encoder = RAW.stream(served)
    parts = [scores[0][:1], scores[0][1:], scores[1]]
    places = [0, 0, 1]
    frames = [
        encoder.encode(Scored(place * n + choice, part))
        for place, part in zip(places, parts, strict=True)
        for choice in range(n)
    ]
    chunks = [chunk["choices"][0] for chunk in events(b"".join(frames))]
    assert [chunk["index"] for chunk in chunks] == [*range(n), *range(n), *range(n, 2 * n)]
    for choice in range(2 * n):
        shown = [chunk["logprobs"] for chunk in chunks if chunk["index"] == choice]
        text = ["a", "b", "c"] if choice < n else ["d", "e"]
        assert [token for one in shown for token in one["tokens"]] == text
        assert [place for one in shown for place in one["text_offset"]] == list(range(len(text)))
        ids = [
            chunk["prompt_token_ids"] for chunk in chunks if chunk["index"] == choice and "prompt_token_ids" in chunk
        ]
        assert ids == [list("".join(text).encode())]
    assert len(written) <= 20


def test_a_failure_before_the_first_token_has_no_role() -> None:
    failed = Failed(RequestError("no call", status=500, type="server_error", code="invalid_output"))
    encoder = CHAT.stream(response(return_token_ids=True))
    assert encoder.encode(observed(0, 5)) == b""
    assert [list(chunk) for chunk in events(encoder.encode(failed))] == [["error"]]
    assert encoder.ended


texts = st.text(max_size=4)
happenings = st.one_of(
    st.builds(lambda c, t, n: ("text", c, t, n), st.integers(0, 1), texts, st.integers(0, 2)),
    st.builds(lambda c, t, n: ("reasoning", c, t, n), st.integers(0, 1), texts, st.integers(0, 2)),
    st.builds(lambda c, t, n: ("call", c, t, n), st.integers(0, 1), texts, st.integers(0, 2)),
)


def made(plan: list[tuple[str, int, str, int]], last: list[str]) -> list[Event]:
    """Events as a plan says, every token observed before the event that counts it."""
    happened: list[Event] = []
    counts, reasoned, calls = [0, 0], [0, 0], [0, 0]
    token = 0
    for kind, choice, text, tokens in plan:
        if tokens:
            happened.append(observed(choice, *range(token, token + tokens), ms=token))
            token += tokens
        counts[choice] += tokens
        if kind == "text":
            happened.append(Text(choice, text, tokens, 0))
        elif kind == "reasoning":
            reasoned[choice] += tokens
            happened.append(Reasoning(choice, text, tokens, 0))
        else:
            calls[choice] += 1
            call = ToolCall(f"call_{choice}_{calls[choice]}", text or "f", json.dumps({"t": text}))
            happened.append(Called(choice, call, tokens, 0))
    for choice in (1, 0):
        happened.append(
            end(
                choice,
                0,
                counts[choice],
                text=last[choice],
                called=calls[choice] > 0,
                reasoning_tokens=reasoned[choice],
            )
        )
    return happened


@given(
    st.lists(happenings, max_size=12),
    st.lists(texts, min_size=2, max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, usage_options(), usage_options(True)]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    plan: list[Any], last: list[str], ids: bool, times: bool, options: dict[str, Any]
) -> None:
    happened = made(plan, last)
    served = response(n=2, return_token_ids=ids, return_token_timestamps=times, **options)
    whole = buffered(CHAT, served, happened)
    chunks = streamed(CHAT, served, happened)
    ChatCompletion.model_validate(whole)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    if options:
        assert chunks.pop()["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        message = choice["message"]
        parts = [one["delta"] for one in own]
        assert parts[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in parts) == (message["content"] or "")
        assert "".join(d.get("reasoning_content", "") for d in parts) == message.get("reasoning_content", "")
        calls = [call for d in parts for call in d.get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == message.get("tool_calls", [])
        for name in ("token_ids", "token_timestamps"):
            assert sum((one.get(name, []) for one in own), []) == choice.get(name, [])
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert all(len(d) == 1 for d in parts[1:-1] if d)
