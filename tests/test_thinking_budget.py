"""Budgets of reasoning, from each protocol's field to the token that closes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.config import RuntimeSettings
from flare.conversation import Tool, Tools
from flare.errors import InputError
from flare.loading import served_model
from flare.output import OutputError, OutputSyntax, make_output
from flare.text.detokenizer import Detokenizer
from flare.thinking_budget import reasoning_open
from tests.server.test_known_faults import CHAT, MESSAGES, RESPONSES, Answer, body, events, put_together, tools, whole
from tests.support.live_server import BOS, EOS, IM_START, LiveServer, byte_tokenizer
from tests.test_runtime import make_core

OPEN, CLOSE = IM_START, BOS
SYNTAX = OutputSyntax(tools="hermes", reasoning=("<|im_start|>", "<|bos|>"), open_token=OPEN, close_token=CLOSE)
HEADERS = {"anthropic-version": "2023-06-01"}
LIMIT = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
THINKS = list(b"hm " * 200)
REPLIES: dict[str, list[int]] = {
    "CLOSED": [*b"hm", CLOSE, *b"yes ", OPEN, *b"again and again", EOS],
    "ENDED": [*b"hmmm", EOS],
    "CALLS": [*b"I call. ", *CALL.encode(), EOS],
    "TOOLS": [*b"now <tool", *b"s of the trade", EOS],
    "AGAIN": [*CALL.encode(), OPEN, *b"more", EOS],
}
AFTER = [*b"So it is.", EOS]
"""What the model says once its reasoning was closed for it."""


def choose(cells: Sequence[int], params: Any, history: Sequence[int]) -> int:
    """The model: it says the reply that the prompt names, and thinks for ever where it names none."""
    prompt, reply = history[: params.prompt_len], list(history[params.prompt_len :])
    said = bytes(token for token in prompt if token < 256).decode()
    words = next((words for name, words in REPLIES.items() if name in said), THINKS)
    if reply == words[: len(reply)]:
        return words[len(reply)]
    return AFTER[len(reply) - 1 - reply.index(CLOSE)]


def live(**model: Any) -> LiveServer:
    made = LiveServer(model={"output": SYNTAX, "opens_reasoning": True} | model)
    made.replay.model.choose = choose  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as running:
        yield running
        running.idle()


def cuts(server: LiveServer) -> int:
    return json.loads(server.request("GET", "/metrics?format=json")[2])["reasoning_budget_cuts"]


def ask(server: LiveServer, path: str, words: str = "hi", limit: int = 100, **fields: Any) -> Answer:
    """Asks for the whole answer and for a stream, checks that they say the same and are cut alike, and returns it."""
    before = cuts(server)
    request = body(path, words, limit, **fields)
    status, _, data = server.request("POST", path, request, HEADERS)
    assert status == 200, data
    between = cuts(server)
    streamed = request | {"stream": True} | ({"stream_options": {"include_usage": True}} if path == CHAT else {})
    status, _, frames = server.request("POST", path, streamed, HEADERS)
    assert status == 200
    answer = whole(path, json.loads(data))
    assert put_together(path, events(frames)) == answer
    assert cuts(server) - between == between - before
    return answer


@pytest.mark.parametrize("path", LIMIT)
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.5}, {"temperature": 1.0, "seed": 3}])
def test_reasoning_is_closed_behind_so_many_tokens(server: LiveServer, path: str, more: dict[str, Any]) -> None:
    before = cuts(server)
    answer = ask(server, path, limit=9, thinking_token_budget=5, **more)
    assert (answer.reasoning, answer.text, answer.tokens) == ("hm hm", "So ", 9)
    assert answer.why in ("length", "max_tokens", "max_output_tokens")
    assert cuts(server) == before + 2
    answer = ask(server, path, thinking_token_budget=5, **more)
    assert (answer.reasoning, answer.text, answer.tokens) == ("hm hm", "So it is.", 5 + 1 + 9 + 1)
    assert answer.why in ("stop", "end_turn", "completed")


def test_the_close_is_a_token_of_the_answer(server: LiveServer) -> None:
    request = body(CHAT, "hi", 9, thinking_token_budget=5, return_token_ids=True, n=3)
    status, answer = server.post(CHAT, request)
    assert status == 200
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*b"hm hm", CLOSE, *b"So "]] * 3
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 15


@pytest.mark.parametrize(
    ("words", "limit", "budget", "reasoning", "text", "tokens", "cut"),
    [
        ("hi", 5, 5, "hm hm", "", 5, False),  # the limit comes with the budget
        ("hi", 6, 5, "hm hm", "", 6, True),  # the close is the last token
        ("hi", 6, 1, "h", "So i", 6, True),
        ("CLOSED", 100, 2, "hmagain and again", "yes ", 24, True),  # where the model would have closed it too
        ("CLOSED", 100, 3, "hmagain and again", "yes ", 24, False),  # it has
        ("CLOSED", 100, 9, "hmagain and again", "yes ", 24, False),  # reasoning that is opened again has no budget
        ("ENDED", 100, 3, "hmm", "So it is.", 14, True),
        ("ENDED", 100, 4, "hmmm", "So it is.", 15, True),  # in the place of the end
        ("ENDED", 100, 5, "hmmm", "", 5, False),
    ],
)
def test_where_it_is_cut(
    server: LiveServer, words: str, limit: int, budget: int, reasoning: str, text: str, tokens: int, cut: bool
) -> None:
    before = cuts(server)
    answer = ask(server, CHAT, words, limit, thinking_token_budget=budget)
    assert (answer.reasoning, answer.text, answer.tokens) == (reasoning, text, tokens)
    assert cuts(server) - before == 2 * cut


def test_a_call_that_may_have_begun_is_not_cut(server: LiveServer) -> None:
    offered = tools(CHAT, "f")
    opener = len("I call. ") + len("<tool_call>")
    begun = len("I call. ") + 2  # of its opener, one character alone says too little
    for budget in (begun, opener - 1, opener, opener + 1, opener + 15, opener + len(CALL)):
        answer = ask(server, CHAT, "CALLS", tools=offered, thinking_token_budget=budget)
        assert (answer.reasoning, answer.calls, answer.why) == ("I call. ", ["f"], "tool_calls"), budget
    before = cuts(server)
    answer = ask(server, CHAT, "CALLS", tools=offered, thinking_token_budget=begun - 1)
    assert (answer.reasoning, answer.text, answer.calls) == ("I call. <", "So it is.", [])
    answer = ask(server, CHAT, "TOOLS", tools=offered, thinking_token_budget=10)
    assert (answer.reasoning, answer.text) == ("now <tools", "So it is.")
    answer = ask(server, CHAT, "TOOLS", tools=offered, thinking_token_budget=9)
    assert (answer.reasoning, answer.text) == ("now <tools of the trade", "")
    answer = ask(server, CHAT, "CALLS", thinking_token_budget=opener)  # without tools it is but text
    assert (answer.reasoning, answer.text) == ("I call. <tool_call>", "So it is.")
    assert cuts(server) == before + 6
    answer = ask(server, CHAT, "AGAIN", tools=offered, thinking_token_budget=len(CALL) + 3)
    assert (answer.reasoning, answer.calls) == ("more", ["f"])  # the call ended what had a budget


def test_a_stop_token_that_is_the_close_ends_the_answer(server: LiveServer) -> None:
    answer = ask(server, CHAT, thinking_token_budget=5, stop_token_ids=[CLOSE])
    assert (answer.reasoning, answer.text, answer.tokens, answer.why) == ("hm hm", "", 6, "stop")


def test_the_budget_of_messages(server: LiveServer) -> None:
    def thinking(budget: int, kind: str = "enabled") -> dict[str, Any]:
        return {"thinking": {"type": kind, "budget_tokens": budget}}

    for kind in ("enabled", "adaptive"):
        assert ask(server, MESSAGES, **thinking(5, kind)).reasoning == "hm hm"
    assert ask(server, MESSAGES, **thinking(5), thinking_token_budget=5).reasoning == "hm hm"
    for large in (2**31, 2**40):
        assert ask(server, MESSAGES, limit=60, **thinking(large)).reasoning == "hm " * 20
    for fields in (thinking(5) | {"thinking_token_budget": 6}, thinking(2**31) | {"thinking_token_budget": 2**31 - 1}):
        for path in (MESSAGES, MESSAGES + "/count_tokens"):
            status, _, data = server.request("POST", path, body(MESSAGES, "hi") | fields, HEADERS)
            assert status == 400 and b"thinking_token_budget" in data and b"budget_tokens" in data


BAD = [0, -1, 2**31, 1.5, "5", True, [5]]


@pytest.mark.parametrize("path", LIMIT)
def test_a_budget_is_a_positive_number_of_32_bits(server: LiveServer, path: str) -> None:
    for value in BAD:
        status, _, data = server.request("POST", path, body(path, "hi", thinking_token_budget=value), HEADERS)
        assert status == 400 and b"thinking_token_budget: " in data, (value, data)
    assert ask(server, path, limit=60, thinking_token_budget=2**31 - 1).reasoning == "hm " * 20
    assert ask(server, path, limit=60, thinking_token_budget=None).reasoning == "hm " * 20


def test_raw_prompts_have_no_budget(server: LiveServer) -> None:
    status, answer = server.post("/v1/completions", {"prompt": "hi", "thinking_token_budget": 5})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, "thinking_token_budget": None})[0] == 200


TEXTS = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"))


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"output": TEXTS}, True),
        ({"output": OutputSyntax(tools="kimi_xtml"), "opens_reasoning": False}, True),
        ({"output": OutputSyntax(tools="muse_atem"), "opens_reasoning": False}, True),
        ({"output": TEXTS, "opens_reasoning": False}, False),
        ({"output": OutputSyntax(), "opens_reasoning": False}, False),
        ({"output": SYNTAX, "opens_reasoning": False}, False),
    ],
)
def test_a_budget_that_could_not_be_kept_is_refused(model: dict[str, Any], refused: bool) -> None:
    """Answers that begin with an answer have nothing to cut; the budget of Messages is then only a hint."""
    with live(**model) as running:
        for path in LIMIT:
            status, _, data = running.request("POST", path, body(path, "hi", 3, thinking_token_budget=2), HEADERS)
            assert status == (400 if refused else 200) and (b"thinking_token_budget" in data) == refused, data
        status, _, data = running.request(
            "POST", MESSAGES + "/count_tokens", body(MESSAGES, "hi", thinking_token_budget=2), HEADERS
        )
        assert status == (400 if refused else 200) and (b"thinking_token_budget" in data) == refused, data
        hint = {"thinking": {"type": "enabled", "budget_tokens": 2}}
        status, _, data = running.request("POST", MESSAGES, body(MESSAGES, "ENDED", 9, **hint), HEADERS)
        assert status == 200 and json.loads(data)["usage"]["output_tokens"] == 5
        assert cuts(running) == 0


def test_the_default_of_the_server() -> None:
    with live(thinking_token_budget=5) as running:
        card = json.loads(running.request("GET", "/v1/models")[2])["data"][0]
        assert card["flare"]["thinking_token_budget"] == 5
        for path in LIMIT:
            assert ask(running, path).reasoning == ask(running, path, thinking_token_budget=None).reasoning == "hm hm"
            assert ask(running, path, thinking_token_budget=8).reasoning == "hm hm hm"
        for budget, reasoning in ((2, "hm"), (2**40, "hm " * 20)):
            thinking = {"type": "enabled", "budget_tokens": budget}
            assert ask(running, MESSAGES, limit=60, thinking=thinking).reasoning == reasoning
        status, answer = running.post("/v1/completions", {"prompt": "hi", "max_tokens": 9})
        assert status == 200 and answer["choices"][0]["text"] == "hm hm hm "


def test_a_default_that_could_not_be_kept_is_one_line_at_the_start() -> None:
    settings = RuntimeSettings(core="c", threads=1, thinking_token_budget=7)

    def load(output: dict[str, Any]) -> Any:
        core = make_core()
        core.manifest.template.facts["output"] = output
        return served_model(core, settings, kv_pages=5, decode_weight_bytes=77)

    tags = {"reasoning": ["<think>", "</think>"]}
    assert load(tags | {"close_token": 8}).thinking_token_budget == 7
    assert load(tags | {"close_token": 8, "tools": "qwen"}).thinking_token_budget == 7
    for output in ({}, tags, {"tools": "kimi_xtml"}, tags | {"close_token": 8, "tools": "muse_atem"}):
        with pytest.raises(InputError) as caught:
            load(output)
        assert str(caught.value).startswith("thinking_token_budget: 7 ") and "\n" not in str(caught.value)


OPENERS = {
    "hermes": "<tool_call>",
    "qwen": "<tool_call>",
    "mimo": "<tool_call>",
    "glm": "<tool_call>",
    "gemma4": "<|tool_call>",
    "minimax": "]<]minimax[>[<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "granite": "<|tool_call|>",
    "jamba": "<tool_calls>",
}


@pytest.mark.parametrize(("name", "opener"), OPENERS.items())
def test_reasoning_is_undecided_while_an_opener_is(name: str, opener: str) -> None:
    syntax = OutputSyntax(tools=name, reasoning=("<think>", "</think>"), open_token=OPEN, close_token=CLOSE)

    def is_open(text: str, offered: Tools) -> bool:
        output = make_output(syntax, offered, opens_reasoning=True, call_prefix="c")
        return output is not None and reasoning_open(list(text.encode()), syntax, Detokenizer(DECODERS), output)

    for length in range(1, len(opener) + 1):
        begun = "hm. " + opener[:length]
        assert is_open(begun, Tools((Tool("f"),))) is (length == 1), begun
        assert is_open(begun, Tools())
    assert is_open("hm. " + opener[:-1] + "~", Tools((Tool("f"),)))


PIECES = ["hm. ", "\n", "<", "<tool", "<tool_call>", "</tool_call>", "call", "<function=f>", "<arg_key>", "é", "\xa0"]
PIECES += [
    '{"name": "f", ',
    '"arguments": {}}',
    "<｜DSML｜",
    "｜",
    "</think>",
    "<think>",
    "[TOOL_CALLS]",
    "f",
    "{",
    "}",
]
FORMATS = ("hermes", "qwen", "mimo", "glm", "gemma4", "minimax", "llama", "mistral", "granite", "deepseek_dsml")
DECODERS = byte_tokenizer()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_is_read_at_once_is_what_is_read_token_by_token(name: str, choice: Any) -> None:
    syntax = OutputSyntax(
        tools=name, reasoning=("<think>", "</think>"), open_token=OPEN, close_token=CLOSE, spelled=frozenset({EOS})
    )
    offered = Tools((Tool("f"), Tool("call")), choice)
    found: set[bool] = set()

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from(PIECES) | st.sampled_from([OPEN, EOS, CLOSE])))
    @example(["hm. "])
    @example(["hm. ", CLOSE])
    def agree(pieces: list[str | int]) -> None:
        tokens = [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else [piece])]

        def fresh() -> tuple[Any, Any]:
            output = make_output(syntax, offered, opens_reasoning=True, call_prefix="c")
            return Detokenizer(DECODERS, previous=10, hidden=DECODERS.special_ids - syntax.spelled), output

        decoder, output = fresh()
        expected = True
        try:
            for token in tokens:
                for _ in output.push(token, decoder.push(token)):
                    pass
            expected = output.reasoning_open
        except OutputError:
            expected = False
        assert reasoning_open(tokens, syntax, *fresh()) is expected
        found.add(expected)

    agree()
    assert found == {True, False}
