"""Log probabilities of answers over HTTP: the same whole and streamed, the shapes of three protocols, what is refused."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from ctypes import c_float
from typing import Any

import pytest

from flare.output import OutputSyntax
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.logprob_fields import MAX_VALUES
from flare.protocols.responses import Responses
from tests.http.rated import (
    ASK,
    CHAT,
    FULL,
    HI,
    INCLUDE,
    MESSAGES,
    MINIMAL,
    RAW,
    RESPONSES,
    ROUTES,
    TEXT,
    ask,
    entries,
    likeliest,
    live,
    refused,
    wanted,
)
from tests.support.live_server import EOS, IM_START, VOCABULARY, LiveServer, reply


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as up:
        yield up
        up.idle()


def test_chat_entries_hold_the_models_distribution(server: LiveServer) -> None:
    """B44: exact bytes, also of half characters, and the values of the whole vocabulary."""
    prompt = ask(server, CHAT, return_token_ids=True)["prompt_token_ids"]
    (found,) = entries(server, CHAT, top_logprobs=3, temperature=0.7, top_k=1)
    assert bytes(byte for entry in found for byte in entry["bytes"]) == TEXT.encode()
    assert [entry["token"] for entry in found[:3]] == ["H", "\ufffd", "\ufffd"]
    for place, entry in enumerate(found):
        values = wanted([*prompt, *TEXT.encode()[:place]])
        assert entry["logprob"] == values[TEXT.encode()[place]]
        tops = likeliest(values, 3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == [values[token] for token in tops]
        assert [top["bytes"] for top in entry["top_logprobs"] if len(top["bytes"]) == 1] == [
            [t] for t in tops if t < 256
        ]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in found)
    assert all(set(top) == {"token", "logprob", "bytes"} for entry in found for top in entry["top_logprobs"])


def test_no_alternatives_and_no_entries(server: LiveServer) -> None:
    assert all(entry["top_logprobs"] == [] for entry in entries(server, CHAT)[0])
    for fields in ({"logprobs": False}, {"logprobs": None, "top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}):
        assert ask(server, CHAT, **fields)["choices"][0]["logprobs"] is None
    assert ask(server, RAW, logprobs=None)["choices"][0]["logprobs"] is None
    answer = ask(server, RESPONSES, include=["other"], top_logprobs=0)
    assert answer["output"][0]["content"][0]["logprobs"] == [] and answer["top_logprobs"] == 0
    assert ask(server, RESPONSES, top_logprobs=4)["top_logprobs"] == 4


@pytest.mark.parametrize("path", ROUTES)
def test_asking_changes_no_token(path: str) -> None:
    with LiveServer(model=FULL | {"defaults": {}}) as up:
        fields = {"seed": 3, "ignore_eos": True, "max_output_tokens" if path == RESPONSES else "max_tokens": 30}

        def said(body: dict[str, Any]) -> Any:
            answer = up.post(path, body | fields)[1]
            if path == RESPONSES:
                return [part["text"] for item in answer["output"] for part in item["content"]]
            return [choice.get("text") or choice["message"] for choice in answer["choices"]]

        assert said(MINIMAL[path]) == said(ASK[path])


@pytest.mark.parametrize("path", [CHAT, RAW])
def test_choices_have_entries_of_their_own(path: str) -> None:
    with LiveServer(script=lambda prompt, choice: reply("abc"[choice] * (choice + 1)), model=FULL) as up:
        found = entries(up, path, n=3)
        names = [one["tokens"] if path == RAW else [e["token"] for e in found[i]] for i, (one, *_) in enumerate(found)]
        assert names == [["a"], ["b", "b"], ["c", "c", "c"]]


def test_which_tokens_have_entries(server: LiveServer) -> None:
    """B59: not the end token, unless it is passed over; not the tokens of stops."""
    assert len(entries(server, CHAT)[0]) == len(TEXT.encode())
    for stop in ({"stop_token_ids": [ord("!")]}, {"stop_token_sequences": [[ord(" "), 0xF0]]}, {"stop": "😊!"}):
        (found,) = entries(server, CHAT, **stop)
        size = len(TEXT.encode()) - (1 if "stop_token_ids" in stop else 6 if "stop" not in stop else 5)
        assert len(found) == size, stop
    with live([120, EOS, EOS, 121]) as up:
        answer = ask(up, RAW, ignore_eos=True, max_tokens=4)
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 4)
        assert choice["logprobs"]["tokens"] == ["x", "<|im_end|>", "<|im_end|>", "y"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1]
        (found,) = entries(up, CHAT, ignore_eos=True, max_tokens=4)
        assert bytes(found[1]["bytes"]) == b"<|im_end|>"


def test_minus_infinity_and_strict_json(server: LiveServer) -> None:
    """B45: tokens that cannot come are shown, and as a number."""
    (found,) = entries(server, CHAT, logprob_token_ids=[200, 65])
    assert {entry["top_logprobs"][0]["logprob"] for entry in found} == {-9999.0}
    with live([200, EOS]) as up:
        _, _, data = up.request("POST", RAW, {"prompt": "x", "logprobs": 2})
        choice = json.loads(data, parse_constant=lambda word: pytest.fail(word))["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == [-9999.0]
        _, _, data = up.request("POST", RAW, {"prompt": [1, 200], "prompt_logprobs": 0, "max_tokens": 0})
        choice = json.loads(data, parse_constant=lambda word: pytest.fail(word))["choices"][0]
        assert choice["prompt_logprobs"][1] == {
            "200": {"logprob": -9999.0, "rank": VOCABULARY, "decoded_token": "\ufffd"},
        }


def test_columns_of_completions(server: LiveServer) -> None:
    ((found,),) = entries(server, RAW, logprobs=2)
    data = TEXT.encode()
    assert found["tokens"] == [bytes([byte]).decode(errors="replace") for byte in data]
    assert found["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
    for place, top in enumerate(found["top_logprobs"]):
        values = wanted([97, 98, *data[:place]])
        assert found["token_logprobs"][place] == values[data[place]]
        assert max(top.values()) == max(values) and found["tokens"][place] in top


def test_alternatives_of_one_string_and_ties() -> None:
    """B47: the first of several tokens with one string counts, equal ones come by their ids."""
    table = {98: 2.0, 97: 2.0, 0xC3: 1.0, 0xF0: 0.5}

    def row(ids: tuple[int, ...]) -> list[float]:
        return [table.get(token, -9.0) for token in range(VOCABULARY)]

    values = [row(())[token] for token in range(VOCABULARY)]
    total = math.log(math.fsum(map(math.exp, values)))
    with live([97, EOS], replay={"logits": row}) as up:
        (top,) = ask(up, RAW, logprobs=4)["choices"][0]["logprobs"]["top_logprobs"]
        assert list(top) == ["a", "b", "\ufffd"] and top["\ufffd"] == c_float(1.0 - total).value
        (top,) = ask(up, RAW, logprobs=4, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["top_logprobs"]
        assert list(top) == ["token_id:97", "token_id:98", "token_id:195", "token_id:240"]
        assert len(ask(up, RAW, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0]) == 1


@pytest.mark.parametrize("path", ROUTES)
def test_tokens_named_by_their_ids(server: LiveServer, path: str) -> None:
    (found,) = entries(server, path, return_tokens_as_token_ids=True, logprob_token_ids=[5, 72])
    if path == RAW:
        assert found[0]["tokens"][0] == "token_id:72"
        assert list(found[0]["top_logprobs"][0]) == ["token_id:5", "token_id:72"]
    else:
        assert (found[0]["token"], found[0]["bytes"]) == ("token_id:72", [72])
        assert [top["token"] for top in found[0]["top_logprobs"]] == ["token_id:5", "token_id:72"]
        assert [top["token"] for top in found[1]["top_logprobs"]] == ["token_id:5", "token_id:72", "token_id:195"]


@pytest.mark.parametrize("path", ROUTES)
def test_explicit_tokens(server: LiveServer, path: str) -> None:
    """In the caller's order, each once, the token itself behind them; null and nothing are not sent."""
    (found,) = entries(server, path, logprob_token_ids=[9, 240, 9, 3])
    sizes = [len(one) for one in found[0]["top_logprobs"]] if path == RAW else [len(e["top_logprobs"]) for e in found]
    assert set(sizes) <= {3, 4}
    if path != RAW:
        shown = [bytes(top["bytes"]) for top in found[0]["top_logprobs"]]
        assert shown == [b"\x09", b"\xf0", b"\x03", b"H"]
    for nothing in (None, []):
        assert entries(server, path, logprob_token_ids=nothing) == entries(server, path)
    wide = list(range(128))
    (found,) = entries(server, path, logprob_token_ids=wide)
    assert len(found[0]["top_logprobs"][0] if path == RAW else found[1]["top_logprobs"]) in (128, 129)


SYNTAX = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"))
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_reasoning_calls_and_delimiters() -> None:
    """B48: Chat has an entry for each token, Responses for those that begin text of a message."""
    text = f"<think>hm</think>\n\nSo <b> {CALL}"
    with live(text, model=FULL | {"output": SYNTAX}) as up:
        (found,) = entries(up, CHAT, tools=TOOLS)
        assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == text
        tools = [{"type": "function", "name": "f"}]
        (found,) = entries(up, RESPONSES, tools=tools)
        assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == "So <b> "
        named = {"tool_choice": {"type": "function", "name": "f"}}
        assert entries(up, RESPONSES, tools=tools, **named) == [[]]


def test_a_delimiter_that_is_spelled_out_is_text() -> None:
    text = "It is called </think> there."
    with live(text, model=FULL | {"output": SYNTAX}) as up:
        (found,) = entries(up, RESPONSES)
        assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == text


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        (CHAT, {"top_logprobs": 2, "logprobs": False}, "top_logprobs", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs", "integer"),
        (CHAT, {"logprobs": True, "top_logprobs": 2.0}, "top_logprobs", "integer"),
        (CHAT, {"logprobs": 1}, "logprobs", "true or false"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "21"),
        (CHAT, {"prompt_logprobs": False}, "prompt_logprobs", "integer"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream"),
        (CHAT, {"prompt_logprobs": 1, "max_tokens": 0}, "max_tokens", "0"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids", "logprobs: true"),
        (CHAT, {"logprob_token_ids": [1], "logprobs": False, "top_logprobs": 0}, "logprob_token_ids", "logprobs"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1, VOCABULARY]}, "logprob_token_ids[1]", str(VOCABULARY)),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1, 2, -1]}, "logprob_token_ids[2]", "-1"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [True]}, "logprob_token_ids[0]", "integer"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids", "129"),
        (CHAT, {"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "true or false"),
        (RAW, {"logprobs": True}, "logprobs", "integer"),
        (RAW, {"logprobs": False}, "logprobs", "integer"),
        (RAW, {"logprobs": 1.0}, "logprobs", "integer"),
        (RAW, {"logprobs": 21}, "logprobs", "21"),
        (RAW, {"logprob_token_ids": [1]}, "logprob_token_ids", "logprobs"),
        (RAW, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream"),
        (RAW, {"prompt_logprobs": 1, "echo": True, "logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        (RAW, {"top_logprobs": 1}, "top_logprobs", "unknown"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs", "include"),
        (RESPONSES, {"include": INCLUDE, "top_logprobs": 21}, "top_logprobs", "21"),
        (RESPONSES, {"logprob_token_ids": [1]}, "logprob_token_ids", "include"),
        (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs", "not supported"),
        *((MESSAGES, {name: value}, name, name) for name, value in (("logprobs", True), ("top_logprobs", 0))),
        *((MESSAGES, {name: value}, name, name) for name, value in (("logprob_token_ids", []), ("prompt_logprobs", 0))),
        (MESSAGES, {"return_tokens_as_token_ids": False}, "return_tokens_as_token_ids", "return_tokens_as_token_ids"),
    ],
)
def test_what_is_refused(server: LiveServer, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(server, path, fields)
    assert words in error["message"] and error["message"].startswith(param)
    if path != MESSAGES:
        assert error["param"] == param


def test_a_core_without_any() -> None:
    with LiveServer(script=lambda prompt, choice: reply("ok")) as up:
        for path, param in ((CHAT, "logprobs"), (RAW, "logprobs"), (RESPONSES, "include")):
            error = refused(up, path, ASK[path])
            assert error["param"] == param and "export the core again" in error["message"]
            error = refused(up, path, ASK[path] | ({"logprobs": 3} if path == RAW else {"top_logprobs": 3}))
            assert error["param"] == param
        for path in (CHAT, RAW):
            error = refused(up, path, {"prompt_logprobs": 0})
            assert error["param"] == "prompt_logprobs" and "ignition export --prompt-logprobs" in error["message"]
        assert up.post(RAW, {"prompt": "ab", "echo": True})[1]["choices"][0]["text"] == "abok"
        assert up.post(CHAT, {"messages": HI, "logprobs": False, "top_logprobs": 0, "logprob_token_ids": []})[0] == 200


def test_what_a_core_gives_bounds_requests() -> None:
    few = {"max_top_logprobs": 3, "explicit_ids": 0, "scores_prompts": False}
    with live(model=few) as up:
        assert len(entries(up, CHAT, top_logprobs=3)[0][0]["top_logprobs"]) == 3
        for path, field in ((CHAT, "top_logprobs"), (RAW, "logprobs"), (RESPONSES, "top_logprobs")):
            error = refused(up, path, ASK[path] | {field: 4})
            assert error["param"] == field and "at most 3" in error["message"] and "again" in error["message"]
            error = refused(up, path, ASK[path] | {"logprob_token_ids": [1]})
            assert error["param"] == "logprob_token_ids" and "export the core again" in error["message"]
        error = refused(up, RAW, {"echo": True, "logprobs": 0})
        assert error["param"] == "echo" and "ignition export --prompt-logprobs" in error["message"]
    with live(model={"explicit_ids": 2}) as up:
        assert ask(up, CHAT, logprob_token_ids=[1, 2, 1])
        assert refused(up, CHAT, ASK[CHAT] | {"logprob_token_ids": [1, 2, 3]})["param"] == "logprob_token_ids"


@pytest.mark.parametrize("path", ROUTES)
def test_log_probabilities_are_bounded(path: str) -> None:
    """The longest reply that a request allows counts: its limit in all choices, or else the room behind its prompt."""
    sizes = {"max_context": 1 << 17, "kv_pages": 1 << 13}
    field = {CHAT: "max_completion_tokens", RAW: "max_completion_tokens", RESPONSES: "max_output_tokens"}[path]
    alternatives = "logprobs" if path == RAW else "top_logprobs"
    most = MAX_VALUES // 129
    ids = {"logprob_token_ids": list(range(128))}
    with live("x", model={"context_length": 1 << 17}, replay=sizes) as up:
        assert ask(up, path, **{alternatives: 20})
        assert ask(up, path, **{field: most}, **ids)
        error = refused(up, path, ASK[path] | {field: most + 1} | ids)
        assert error["param"] == field and f"{(most + 1) * 129} " in error["message"]
        assert str(MAX_VALUES) in error["message"] and "fewer" in error["message"]
        error = refused(up, path, ASK[path] | ids)
        assert error["param"] == field
        if path != RESPONSES:
            assert refused(up, path, ASK[path] | {"n": 2, alternatives: 20})["param"] == field
            assert ask(up, path, n=2, max_tokens=9, **{alternatives: 20})
        if path == RAW:
            echoed = {"echo": True, "prompt": [1] * 100, "logprobs": 0, "n": 64}
            most = MAX_VALUES // 64 - 100
            assert ask(up, path, **echoed, **{field: most}), "with those of the prompt as many as the limit"
            assert refused(up, path, echoed | {field: most + 1})["param"] == field


def test_the_token_that_closes_a_budget_has_no_entry() -> None:
    """B30: of nine tokens eight have one, of which those behind the close are the answer's."""
    syntax = OutputSyntax(reasoning=("<think>", "<|im_start|>"), close_token=IM_START)
    with live([*[104] * 5, IM_START, *[104] * 9], model={"output": syntax, "opens_reasoning": True}) as up:
        answer = ask(up, CHAT, thinking_token_budget=5, max_tokens=9)
        assert answer["usage"]["completion_tokens"] == 9
        assert answer["choices"][0]["message"]["content"] == "hhh"
        assert len(entries(up, CHAT, thinking_token_budget=5, max_tokens=9)[0]) == 8
        (found,) = entries(up, RESPONSES, thinking_token_budget=5, max_output_tokens=9)
        assert len(found) == 3


def test_a_single_token_that_continues_an_answer() -> None:
    """What evaluations ask for: the next token's distribution behind the beginning of an answer."""
    messages = [*HI, {"role": "assistant", "content": "Answer:"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1, "top_logprobs": 20}
    with live(model={"continuation": "<|im_end|>\n"}) as up:
        answer = ask(up, CHAT, messages=messages, return_token_ids=True, **fields)
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        values = wanted(answer["prompt_token_ids"])
        assert [top["logprob"] for top in entry["top_logprobs"]] == [values[token] for token in likeliest(values, 20)]


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_with_log_probabilities_is_written_off_the_event_loop(
    server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {CHAT: ChatCompletions, RAW: Completions, RESPONSES: Responses}[path]
    encode, threads = kind.encode, []

    def watched(endpoint: Any, response: Any, collected: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(endpoint, response, collected)

    monkeypatch.setattr(kind, "encode", watched)
    ask(server, path)
    assert len(threads) == 1 and threads[0].startswith("flare-frontend")
