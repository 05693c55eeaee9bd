"""Answers over HTTP: what the model said, why it ended, what it cost; in one piece and as a stream alike."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from flare.output import OutputSyntax
from flare.service.stream import EventStream
from tests.support.live_server import EOS, IM_END, VOCABULARY, LiveServer, events, make_model, reply
from tests.support.scripted_replay import ScriptedModel

TEXT = "Hëllo 😊, ends here."
CHAT, RAW = "/v1/chat/completions", "/v1/completions"
MINIMAL: dict[str, Any] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, RAW: {"prompt": "hi"}}
PROMPT_TOKENS = {CHAT: 1 + len("user\nhi") + 1 + 1 + 1 + len("assistant\n"), RAW: 2}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=lambda prompt, choice: reply(TEXT)) as live:
        yield live
        live.idle()


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    """Asks buffered and streamed, checks that both say the same, and returns the buffered answer."""
    status, answer = server.post(path, MINIMAL[path] | fields)
    assert status == 200, answer
    streamed = MINIMAL[path] | fields | {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, data = server.request("POST", path, streamed)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    chunks = events(data)
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"] == answer["usage"]
    assert headers["x-request-id"] == chunks[0]["id"] and len({chunk["id"] for chunk in chunks}) == 1
    for choice in answer["choices"]:
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        if path == CHAT:
            assert own[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(chunk["choices"][0]["text"] for chunk in own) == choice["text"]
        assert "�" not in "".join(map(str, own))
        assert own[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["choices"][0]["stop_reason"] == choice["stop_reason"]
        assert set(own[-1]["timings"]) == set(answer["timings"])
    if len(answer["choices"]) == 1:
        assert chunks[-1]["flare_context"] == answer["flare_context"]
    return answer


def said(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", MINIMAL)
def test_an_answer_to_its_end(server: LiveServer, path: str) -> None:
    answer = ask(server, path)
    tokens = len(TEXT.encode()) + 1
    assert said(answer) == TEXT
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", "stop_token", None)
    used = PROMPT_TOKENS[path] + tokens
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        PROMPT_TOKENS[path],
        tokens,
        used,
    )
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage.get("completion_tokens_details") == ({"reasoning_tokens": 0} if path == CHAT else None)
    assert answer["flare_context"] == {"tokens_used": used, "context_length": 512, "tokens_remaining": 512 - used}
    timings = answer["timings"]
    assert timings["predicted_n"] == tokens and timings["prompt_n"] == PROMPT_TOKENS[path]
    assert 0 < timings["prompt_ms"] <= timings["first_token_ms"] and timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] > 0 and timings["queued_ms"] >= 0
    assert answer["model"] == "org/tiny" and answer["system_fingerprint"] == make_model().fingerprint


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("o 😊", "Hëll", 5 + 1 + 1 + 4),
        (["zzz", ", e"], "Hëllo 😊", 14),
        ("H", "", 1),
        ("here.", "Hëllo 😊, ends ", 23),
        (["ends", "end"], "Hëllo 😊, ", 16),
        ("here. ", TEXT, 24),
    ],
)
def test_stop_strings(server: LiveServer, path: str, stop: Any, text: str, tokens: int) -> None:
    """Text ends before the string; tokens are counted up to the one that completed it."""
    answer = ask(server, path, stop=stop)
    assert said(answer) == text
    matched = text != TEXT
    assert answer["choices"][0]["stop_reason"] == ("stop_sequence" if matched else "stop_token")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == tokens


def test_a_stop_string_on_the_last_allowed_token_is_the_cause(server: LiveServer) -> None:
    answer = ask(server, RAW, stop="Hë", max_tokens=3)
    assert (said(answer), answer["choices"][0]["stop_reason"]) == ("", "stop_sequence")
    assert answer["usage"]["completion_tokens"] == 3


def test_held_text_comes_out_at_the_end(server: LiveServer) -> None:
    """Text that was held back for a stop string is not lost when the limit ends the choice."""
    answer = ask(server, CHAT, stop="llo!", max_tokens=5)
    assert (said(answer), answer["choices"][0]["stop_reason"]) == ("Hëll", "max_tokens")


def test_half_a_character_at_the_limit_is_a_replacement_mark(server: LiveServer) -> None:
    status, answer = server.post(RAW, {"prompt": "hi", "max_tokens": 9})
    assert status == 200 and said(answer) == "Hëllo �"


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limits(server: LiveServer, path: str, field: str) -> None:
    answer = ask(server, path, **{field: 4})
    assert said(answer) == "Hël"
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("length", "max_tokens")
    assert answer["usage"]["completion_tokens"] == 4


def test_stop_tokens(server: LiveServer) -> None:
    answer = ask(server, RAW, stop_token_ids=[ord(","), 5])
    assert (said(answer), answer["choices"][0]["stop_reason"]) == ("Hëllo 😊", "stop_token")


@pytest.mark.parametrize("path", [CHAT, RAW])
@pytest.mark.parametrize(
    ("sequences", "text", "tokens"),
    [
        ([b"ends"], "Hëllo 😊, ", "Hëllo 😊, ends"),
        ([b"end", b"ends", b", end"], "Hëllo 😊", "Hëllo 😊, end"),
        ([b", en", b"\x8a, end"], "Hëllo 😊", "Hëllo 😊, en"),
        ([b"endless", b"heresy", b".."], TEXT, TEXT + "."),
    ],
)
def test_sequences_of_stop_tokens(
    server: LiveServer, path: str, sequences: list[bytes], text: str, tokens: str
) -> None:
    answer = ask(server, path, stop_token_sequences=[list(sequence) for sequence in sequences], n=2)
    for choice in range(2):
        assert said(answer, choice) == text
        ended = answer["choices"][choice]
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", "stop_token")
    assert answer["usage"]["completion_tokens"] == 2 * len(tokens.encode())


def test_a_sequence_with_the_end_token(server: LiveServer) -> None:
    """It ends the answer where the end token would, and where that is ignored."""
    for ignored in (False, True):
        answer = ask(server, RAW, stop_token_sequences=[[ord("."), EOS]], ignore_eos=ignored, return_token_ids=True)
        assert said(answer) == TEXT[:-1] and answer["choices"][0]["token_ids"] == reply(TEXT)
        assert answer["choices"][0]["stop_reason"] == "stop_token"
    with LiveServer(script=lambda prompt, choice: [120, EOS, EOS, 121]) as live:
        answer = ask(live, RAW, stop_token_sequences=[[EOS, 121]], ignore_eos=True, max_tokens=4)
        assert (said(answer), answer["choices"][0]["stop_reason"]) == ("x", "stop_token")
        answer = ask(live, RAW, stop_token_sequences=[[EOS, 121]])
        assert (said(answer), answer["usage"]["completion_tokens"]) == ("x", 2)


def test_a_sequence_behind_calls_is_the_users_end() -> None:
    called = 'Now.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"messages": MINIMAL[CHAT]["messages"], "max_tokens": 99, "tools": [tool]}
    with LiveServer(
        script=lambda prompt, choice: reply(called + "##"), model={"output": OutputSyntax(tools="hermes")}
    ) as live:
        for sequences, why in (([[35, 35]], "end_turn"), ([[35, 36]], "tool_use")):
            status, answer = live.post(
                "/v1/messages", body | {"stop_token_sequences": sequences}, **{"anthropic-version": "2023-06-01"}
            )
            assert status == 200 and [block["type"] for block in answer["content"]][:2] == ["text", "tool_use"]
            assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == (
                why,
                len(called) + 2 + (why != "end_turn"),
            )


def test_no_tokens_at_all(server: LiveServer) -> None:
    steps = server.replay.steps
    answer = ask(server, RAW, max_tokens=0)
    assert (said(answer), answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 0,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert server.replay.steps == steps


@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_over_the_context_is_refused_though_no_token_is_asked_for(server: LiveServer, echo: bool) -> None:
    context = server.runtime.model.context_length
    for length, wanted in ((context - 1, 200), (context, 400), (context + 50, 400)):
        status, answer = server.post(RAW, {"prompt": "x" * length, "max_tokens": 0, "echo": echo})
        assert status == wanted, answer
        if status == 400:
            assert (answer["error"]["code"], answer["error"]["param"]) == ("context_full", "prompt")
            assert answer["error"]["flare_context"]["tokens_used"] == length


def test_choices_of_several_prompts_keep_their_order() -> None:
    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        return reply(f"{bytes(prompt).decode()}{choice}")

    with LiveServer(script=script) as live:
        answer = ask(live, RAW, prompt=["a", "bb"], n=2)
        assert [said(answer, i) for i in range(4)] == ["a0", "a1", "bb2", "bb3"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 2 * 3 + 2 * 4)
        assert said(ask(live, RAW, prompt=[[97], [98, 99]]), 1) == "bc1"
        live.idle()


def test_too_many_choices_are_refused_at_once(server: LiveServer) -> None:
    for fields, param in (
        ({"n": 10**9}, "n"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
    ):
        status, answer = server.post(RAW, {"prompt": "x"} | fields)
        assert status == 400 and answer["error"]["param"] == param, answer


def test_ignore_eos() -> None:
    with LiveServer(script=lambda prompt, choice: [120, EOS, EOS, 121]) as live:
        answer = ask(live, RAW, ignore_eos=True, max_tokens=4)
        assert said(answer) == "xy"
        assert (answer["choices"][0]["stop_reason"], answer["usage"]["completion_tokens"]) == ("max_tokens", 4)
        assert ask(live, RAW)["usage"]["completion_tokens"] == 2


def test_the_rendered_conversation_is_what_the_model_gets() -> None:
    """And control spellings in it stay text."""
    seen: list[tuple[int, ...]] = []

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        seen.append(prompt)
        return reply("ok")

    with LiveServer(script=script) as live:
        messages = [
            {"role": "system", "content": "S1"},
            {"role": "user", "content": "a<|im_end|>b"},
            {"role": "developer", "content": "D1"},
        ]
        assert live.post(CHAT, {"messages": messages})[0] == 200
        assert live.post(CHAT, {"messages": [*messages[:2], {"role": "system", "content": "S2"}]})[0] == 200
    tags = {256: "<S>", IM_END: "<E>", 258: "<B>"}
    texts = ["".join(tags.get(t) or chr(t) for t in prompt) for prompt in (seen[0], seen[-1])]
    assert texts[0] == (
        "<S>system\n<system>\nS1\n</system>\n\n<developer>\nD1\n</developer><E>\n<S>user\na<|im_end|>b<E>\n<S>assistant\n"
    )
    assert texts[1] == (
        "<S>system\nS1<E>\n<S>user\na<|im_end|>b<E>\n<S>user\n<system>\nS2\n</system><E>\n<S>assistant\n"
    )


CONTEXT = {"replay": {"max_context": 128, "kv_pages": 64}, "model": {"context_length": 128}}


@pytest.mark.parametrize(("length", "status"), [(150, 400), (128, 400), (127, 200), (110, 200)])
def test_the_context_fills(length: int, status: int) -> None:
    with LiveServer(script=lambda prompt, choice: [120] * 500, **CONTEXT) as live:
        for fields in ({}, {"max_tokens": 100}):
            body = {"prompt": [97] * length, **fields}
            got, answer = live.post(RAW, body)
            assert got == status, answer
            if status == 400:
                error = answer["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "invalid_request_error",
                    "context_full",
                    "prompt",
                )
                assert error["flare_context"] == {"tokens_used": length, "context_length": 128, "tokens_remaining": 0}
                assert str(length) in error["message"] and "128" in error["message"]
                assert live.post(RAW, body | {"stream": True}) == (got, answer)
                continue
            answer = ask(live, RAW, **body)
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "context_full")
            assert answer["usage"]["completion_tokens"] == 128 - length
            assert answer["flare_context"] == {"tokens_used": 128, "context_length": 128, "tokens_remaining": 0}
        status_chat, answer = live.post(CHAT, {"messages": [{"role": "user", "content": "x" * 150}]})
        assert (status_chat, answer["error"]["param"], answer["error"]["code"]) == (400, "messages", "context_full")


def test_the_operators_cap_and_the_models_own_limits() -> None:
    endless: Any = lambda prompt, choice: [120] * 500  # noqa: E731
    with LiveServer(
        script=endless, model={"max_tokens_cap": 6, "defaults": {"temperature": 0.0, "max_new_tokens": 3}}
    ) as live:
        assert ask(live, RAW)["usage"]["completion_tokens"] == 6
        assert ask(live, RAW, max_tokens=6)["usage"]["completion_tokens"] == 6
        for field in ("max_tokens", "max_completion_tokens"):
            status, answer = live.post(CHAT, MINIMAL[CHAT] | {field: 7})
            assert (status, answer["error"]["param"]) == (400, field)
    for defaults, tokens in (({"max_new_tokens": 3}, 3), ({"max_length": 12}, 10), ({"max_length": 1}, 1)):
        with LiveServer(script=endless, model={"defaults": {"temperature": 0.0, **defaults}}) as live:
            assert ask(live, RAW)["usage"]["completion_tokens"] == tokens
            assert ask(live, RAW, max_tokens=15)["usage"]["completion_tokens"] == 15


def test_greedy_equals_the_model() -> None:
    """Without a script the replay is a hash model: the served tokens are its greedy ones."""
    with LiveServer() as live:
        model = ScriptedModel(VOCABULARY)
        cells = model.extend([], [97, 98])
        wanted = []
        for _ in range(20):
            wanted.append(model.peak(cells))
            cells += model.extend(cells, wanted[-1:])
        status, answer = live.post(RAW, {"prompt": [97, 98], "max_tokens": 20, "ignore_eos": True, "temperature": 0})
        assert status == 200
        visible = bytes(token for token in wanted if token < 256).decode("utf-8", "replace")
        assert said(answer) == visible


def test_seeds_decide_draws() -> None:
    with LiveServer(model={"defaults": {}}) as live:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "n": 2}

        def drawn(**fields: Any) -> list[str]:
            return [choice["text"] for choice in live.post(RAW, body | fields)[1]["choices"]]

        first = drawn(seed=7)
        assert drawn(seed=7) == first and drawn(seed=7, stream=False, user="u") == first
        assert first[0] != first[1]
        assert drawn(seed=8, n=1) == [first[1]], "the seed goes on by the index of the choice"
        four = drawn(seed=7, prompt=["x", "y"])
        assert four[:2] == first and four[2:] == drawn(seed=9, prompt="y")
        assert drawn(seed=2**63 - 1)[1] == drawn(seed=0, n=1)[0], "behind the greatest seed comes 0"
        assert drawn() != drawn()  # no seed: another one each time
        greedy = drawn(temperature=0)
        assert greedy[0] == greedy[1] == drawn(temperature=-1)[0] == drawn(seed=3, top_k=1)[0]


def test_author_ranges_clamp_and_fix() -> None:
    ranges = {"temperature": (0.7, 1.0)}
    with LiveServer(model={"defaults": {"seed": 5, "temperature": 0.8}, "ranges": ranges}) as live:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}

        def drawn(**fields: Any) -> str:
            return live.post(RAW, body | fields)[1]["choices"][0]["text"]

        assert drawn(temperature=0) == drawn(temperature=0.7) != drawn(temperature=1)
        assert drawn(temperature=9) == drawn(temperature=1)
        assert drawn() == drawn(temperature=0.8, top_k=1) == drawn(top_p=7, presence_penalty=99)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
    ],
)
def test_values_outside_open_ranges_are_refused(server: LiveServer, field: str, value: float) -> None:
    status, answer = server.post(RAW, {"prompt": "x", field: value})
    assert (status, answer["error"]["param"]) == (400, field), answer


def test_an_empty_prompt_needs_a_start_token() -> None:
    with LiveServer(script=lambda prompt, choice: reply(str(prompt))) as live:
        assert said(ask(live, RAW, prompt="")) == "(258,)"
        assert live.post(RAW, {"prompt": ["a", ""]})[0] == 200
    with LiveServer(model={"bos": None}) as live:
        status, answer = live.post(RAW, {"prompt": ""})
        assert (status, answer["error"]["param"]) == (400, "prompt")


def test_a_conversation_that_renders_to_nothing() -> None:
    """There is no token from which the model could go on."""
    silent = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    with LiveServer(script=lambda prompt, choice: reply("ok"), template=silent) as live:
        body = {"messages": [{"role": "user", "content": ""}]}
        assert live.post(CHAT, body)[0] == 200
        for stream in (False, True):
            status, answer = live.post(CHAT, body | {"add_generation_prompt": False, "stream": stream})
            assert (status, answer["error"]["param"]) == (400, "messages"), answer
        live.idle()


def test_a_stream_that_breaks_is_cut(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No second response follows on the connection of a first one; the cause is in the log, and nothing is left behind."""
    with LiveServer(script=lambda prompt, choice: reply("ok")) as live:
        take = EventStream.take
        taken: list[bytes] = []

        async def breaks(self: EventStream) -> bytes:
            if taken:
                raise ValueError("a secret")
            taken.append(await take(self))
            return taken[0]

        with monkeypatch.context() as patch:
            patch.setattr(EventStream, "take", breaks)
            with pytest.raises(http.client.IncompleteRead) as cut:
                live.request("POST", RAW, {"prompt": "x", "stream": True})
        assert cut.value.partial == taken[0]
        live.idle()
        assert live.post(RAW, {"prompt": "x"})[0] == 200
    assert [record.getMessage().split("\n")[0] for record in caplog.records] == ["a handler failed"]


def test_a_template_that_refuses_says_so() -> None:
    with LiveServer(template="{{ raise_exception('only one system message') }}") as live:
        status, answer = live.post(CHAT, MINIMAL[CHAT])
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "only one system message" in answer["error"]["message"]
        assert json.dumps(answer).isascii()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("né <|bos|>", ["né <|bos|>"]),
        (["a", "bc"], ["a", "bc"]),
        ([104, 105, IM_END], ["hi<|im_end|>"]),
        ([[104], [0xC3, 0xA9]], ["h", "é"]),
    ],
)
def test_echo(server: LiveServer, prompt: Any, texts: list[str]) -> None:
    """The prompt comes first, buffered and streamed alike, and costs no completion token."""
    plain = ask(server, RAW, prompt=prompt, n=2)
    echoed = ask(server, RAW, prompt=prompt, n=2, echo=True, stop="!")
    for index in range(2 * len(texts)):
        assert said(echoed, index) == texts[index // 2] + said(plain, index)
    assert echoed["usage"] == plain["usage"]
    only = ask(server, RAW, prompt=prompt, echo=True, max_tokens=0)
    assert [choice["text"] for choice in only["choices"]] == texts
    assert only["usage"]["completion_tokens"] == 0 and only["choices"][0]["finish_reason"] == "length"


def test_what_is_echoed_is_bounded() -> None:
    with LiveServer(script=lambda prompt, choice: reply("x"), settings={"max_body_bytes": 1000}) as server:
        assert server.post(RAW, {"prompt": "p" * 300, "echo": True, "n": 3})[0] == 200
        status, answer = server.post(RAW, {"prompt": "p" * 300, "echo": True, "n": 4})
        assert status == 400 and answer["error"]["param"] == "echo"
        assert server.post(RAW, {"prompt": "p" * 300, "echo": False, "n": 4})[0] == 200


def test_a_great_top_k_is_clamped_by_ranges_and_else_refused() -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with LiveServer(model={"ranges": {"top_k": (1, 40)}}) as live:
        for value in (2**31, 2**63 - 1, -(2**63)):
            assert live.post(RAW, body | {"top_k": value})[0] == 200
    with LiveServer() as live:
        for value in (2**31, -(2**31) - 1):
            status, answer = live.post(RAW, body | {"top_k": value})
            assert (status, answer["error"]["param"]) == (400, "top_k")
            assert str(value) in answer["error"]["message"] and "-1 to 2147483647" in answer["error"]["message"]
