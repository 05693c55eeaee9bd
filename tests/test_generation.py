"""A choice on its way from deliveries to events: each token is reported once, and no grouping into steps changes the text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import Called, Event, Failed, Finished, Observed, Reasoning, Text, Tool, Tools
from flare.engine import Delivery
from flare.engine.request import StopCause
from flare.generation import Answer
from flare.output import OutputSyntax, make_output
from flare.text.detokenizer import Detokenizer
from flare.text.stops import StopMatcher, StopSet
from tests.support.live_server import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
SYNTAX = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"))
TOOLS = Tools((Tool("f"),))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
USER_STOP = 7


class Heard(NamedTuple):
    """What a listener heard of one choice. `parts`: ("text" | "reasoning", joined text) and ("call", arguments)."""

    parts: list[tuple[str, str]]
    events: list[Event]
    cancelled: list[Any]

    @property
    def end(self) -> Any:
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(content for kind, content in self.parts if kind == "text")


def hear(
    steps: list[list[int]],
    *,
    cause: StopCause = StopCause.MAX_TOKENS,
    stop_tokens: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    observe: bool = False,
    syntax: OutputSyntax | None = None,
    tools: Tools = TOOLS,
    opens: bool = False,
) -> Heard:
    """Delivers the tokens of each step to one choice; the last step ends it."""
    events: list[Event] = []
    cancelled: list[Any] = []
    engine: Any = SimpleNamespace(cancel=lambda id, cause=None: cancelled.append(cause))
    answer = Answer(engine, events.append, 0.0, lambda: None, observe=observe)
    request: Any = SimpleNamespace(
        id=1,
        prompt=[1, 2, 3],
        cached_tokens=2,
        first_token_at=1.0,
        finished_at=2.0,
        queued_seconds=0.0,
        prefill_seconds=0.0,
    )
    output = make_output(syntax, tools, opens_reasoning=opens, call_prefix="c") if syntax else None
    choice = answer.add(
        0,
        request,
        Detokenizer(TOKENIZER, previous=3),
        StopMatcher(StopSet(stop)) if stop else None,
        output,
        frozenset({USER_STOP}),
    )
    for index, tokens in enumerate(steps):
        last = index == len(steps) - 1
        delivery = Delivery(request, tokens, cause if last else None, None, stop_tokens if last else ())
        choice.receive(delivery)
    assert answer.ended and choice.ended
    parts: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Called):
            parts.append(("call", event.call.arguments))
        elif isinstance(event, Text | Reasoning | Finished) and event.text:
            kind = "reasoning" if isinstance(event, Reasoning) else "text"
            if parts and parts[-1][0] == kind:
                parts[-1] = (kind, parts[-1][1] + event.text)
            else:
                parts.append((kind, event.text))
    return Heard(parts, events, cancelled)


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """The tokens in steps of these sizes, the rest in one; a step may be empty."""
    steps, at = [], 0
    for size in sizes:
        steps.append(tokens[at : at + size])
        at += size
    return [*steps, tokens[at:]]


def check_accounts(heard: Heard, tokens: list[int], stop_tokens: tuple[int, ...]) -> int:
    """Checks that every token up to the end is counted once and shown once; returns how many there are."""
    end = heard.end
    assert isinstance(end, Finished) and [type(event) for event in heard.events].count(Finished) == 1
    counted = sum(event.tokens for event in heard.events if not isinstance(event, Observed))
    assert counted == end.completion_tokens <= len(tokens) + len(stop_tokens)
    if end.stop is None:
        assert counted == len(tokens) + len(stop_tokens)
    seen = [id for event in heard.events if isinstance(event, Observed) for id in event.ids]
    if seen or not counted:
        assert seen == [*tokens, *stop_tokens][:counted]
        known = shown = 0
        for event in heard.events:  # no text comes before its tokens are known
            if isinstance(event, Observed):
                known += len(event.ids)
            else:
                shown += event.tokens
                assert shown <= known
    return counted


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the match that ends first, the longest of those; found by trying every place."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


ENDS = st.sampled_from(
    [
        (StopCause.MAX_TOKENS, ()),
        (StopCause.STOP_TOKEN, (EOS,)),
        (StopCause.STOP_TOKEN, (USER_STOP,)),
        (StopCause.STOP_TOKEN, (97, EOS)),
        (StopCause.CONTEXT_FULL, ()),
    ]
)
BYTES = st.lists(st.sampled_from([*b"abc\n <", *"é🙂".encode(), 256, 258]), max_size=20)
STOPS = st.lists(st.text(alphabet="abc é", min_size=1, max_size=3), max_size=3).map(tuple)
SIZES = st.lists(st.integers(0, 4), max_size=8)


@settings(max_examples=300)
@given(BYTES, STOPS, SIZES, ENDS)
def test_both_ways_show_the_same_text(tokens: list[int], stop: tuple[str, ...], sizes: list[int], end: Any) -> None:
    """With and without observation, in any steps; the right text is found by decoding everything at once."""
    cause, stop_tokens = end
    steps = cut(tokens, sizes)
    short = hear(steps, cause=cause, stop_tokens=stop_tokens, stop=stop)
    long = hear(steps, cause=cause, stop_tokens=stop_tokens, stop=stop, observe=True)
    once = hear([tokens], cause=cause, stop_tokens=stop_tokens, stop=stop)
    decoder = Detokenizer(TOKENIZER, previous=3)
    text, matched = first_stop("".join(map(decoder.push, tokens)) + decoder.flush(), stop)
    for heard in (short, long, once):
        assert (heard.text, heard.end.stop) == (text, matched)
        assert heard.end.cause == ("stop_sequence" if matched else cause.value)
        assert not heard.end.called and heard.end.reasoning_tokens == 0
    assert len({check_accounts(heard, tokens, stop_tokens) for heard in (short, long, once)}) == 1
    assert sum(len(event.ids) for event in long.events if isinstance(event, Observed)) == long.end.completion_tokens


FRAGMENTS = ["<think>", "</think>", "<tool_call>", CALL, "<", "\n", " ", "ab", "c", "é", "</tool_call>", '{"name": "']


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8), STOPS, SIZES, ENDS, st.booleans())
def test_no_grouping_changes_what_is_told_apart(
    fragments: list[str], stop: tuple[str, ...], sizes: list[int], end: Any, opens: bool
) -> None:
    cause, stop_tokens = end
    tokens = list("".join(fragments).encode())
    options: Any = {"cause": cause, "stop_tokens": stop_tokens, "stop": stop, "syntax": SYNTAX, "opens": opens}
    one_by_one = hear([*([token] for token in tokens), []], **options)
    for heard in (
        hear([tokens], **options),
        hear(cut(tokens, sizes), **options),
        hear(cut(tokens, sizes), observe=True, **options),
    ):
        assert heard.parts == one_by_one.parts
        if isinstance(one_by_one.end, Failed):
            assert isinstance(heard.end, Failed) and heard.end.error.status == 500
            continue
        check_accounts(heard, tokens, stop_tokens)
        for field in ("cause", "stop", "completion_tokens", "reasoning_tokens", "called"):
            assert getattr(heard.end, field) == getattr(one_by_one.end, field)
        assert heard.end.reasoning_tokens <= heard.end.completion_tokens


def answer(text: str, **options: Any) -> Heard:
    """One token a step, the end by the model's own token unless said otherwise."""
    ended = {"cause": StopCause.STOP_TOKEN, "stop_tokens": (EOS,)} | options
    return hear([*([token] for token in text.encode()), []], **ended)


def test_stops_act_on_answer_text_only() -> None:
    heard = answer("<think>a STOP b</think>c STOP d", syntax=SYNTAX, stop=("STOP",))
    assert heard.parts == [("reasoning", "a STOP b"), ("text", "c ")]
    assert (heard.end.cause, heard.end.stop) == ("stop_sequence", "STOP") and heard.cancelled == [
        StopCause.STOP_SEQUENCE
    ]
    heard = answer('x<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>', syntax=SYNTAX, stop=("STOP",))
    assert heard.parts == [("text", "x"), ("call", '{"a":"STOP"}')] and heard.end.stop is None
    heard = answer("ST" + CALL + "OP", syntax=SYNTAX, stop=("STOP",))  # nothing matches across a call
    assert heard.parts == [("text", "ST"), ("call", '{"a":1}'), ("text", "OP")]


def test_text_that_a_stop_held_back_comes_before_the_call() -> None:
    heard = answer("So ST" + CALL, syntax=SYNTAX, stop=("STOP",))
    assert heard.parts == [("text", "So ST"), ("call", '{"a":1}')] and heard.end.called
    heard = answer("<think>a</think>ST<think>b", syntax=SYNTAX, stop=("STOP",))
    assert heard.parts == [("reasoning", "a"), ("text", "ST"), ("reasoning", "b")]


def test_a_stop_before_the_call_leaves_it_out() -> None:
    heard = answer("STOP" + CALL, syntax=SYNTAX, stop=("STOP",))
    assert heard.parts == [] and not heard.end.called and heard.end.completion_tokens == 4
    whole = hear([list(("STOP" + CALL).encode())], syntax=SYNTAX, stop=("STOP",))
    assert whole.parts == [] and whole.end.completion_tokens == 4


@pytest.mark.parametrize(
    ("text", "options", "cause", "called"),
    [
        (CALL, {}, "stop_token", True),
        (CALL, {"stop_tokens": (USER_STOP,)}, "stop_token", False),
        (CALL, {"stop_tokens": (97, EOS)}, "stop_token", False),  # a sequence is the user's, whatever is in it
        (CALL, {"cause": StopCause.MAX_TOKENS, "stop_tokens": ()}, "max_tokens", False),
        (CALL, {"cause": StopCause.CONTEXT_FULL, "stop_tokens": ()}, "context_full", False),
        (CALL + "STOP", {"stop": ("STOP",)}, "stop_sequence", False),
        (CALL + " ok", {}, "stop_token", True),
        ("none", {}, "stop_token", False),
    ],
)
def test_when_calls_complete_an_answer(text: str, options: dict[str, Any], cause: str, called: bool) -> None:
    heard = answer(text, syntax=SYNTAX, **options)
    assert (heard.end.cause, heard.end.called) == (cause, called)


def test_reasoning_that_a_limit_cuts_is_all_reasoning() -> None:
    text = "First I weigh both options,"
    heard = answer(text, syntax=SYNTAX, opens=True, cause=StopCause.MAX_TOKENS, stop_tokens=())
    assert heard.parts == [("reasoning", text)]
    assert heard.end.reasoning_tokens == heard.end.completion_tokens == len(text)


@pytest.mark.parametrize("stop", [(), ("talk",), ("never",)])
def test_a_missing_call_fails_the_answer_behind_its_text(stop: tuple[str, ...]) -> None:
    required = Tools(TOOLS.offered, "required")
    heard = answer("I'd rather talk.", syntax=SYNTAX, tools=required, stop=stop)
    *before, failed = heard.events
    assert isinstance(failed, Failed) and all(isinstance(event, Text) for event in before)
    assert heard.text.startswith("I'd rather ")
    assert (failed.error.status, failed.error.type, failed.error.code) == (500, "server_error", "invalid_output")
    assert answer("Well. " + CALL, syntax=SYNTAX, tools=required).end.called


def test_dropped_text_is_counted() -> None:
    named = Tools(TOOLS.offered, "named", "f")
    heard = answer("Sure! " + CALL, syntax=SYNTAX, tools=named)
    assert heard.parts == [("call", '{"a":1}')] and heard.end.completion_tokens == len("Sure! " + CALL) + 1
    check_accounts(heard, list(("Sure! " + CALL).encode()), (EOS,))


def test_calls_before_a_second_one_too_many_are_told() -> None:
    alone = Tools(TOOLS.offered, parallel=False)
    for heard in (
        answer(CALL + CALL, syntax=SYNTAX, tools=alone),
        hear([list((CALL + CALL).encode())], syntax=SYNTAX, tools=alone),
    ):
        assert heard.parts == [("call", '{"a":1}')] and isinstance(heard.end, Failed)
        assert heard.cancelled == [None]  # the engine need not go on


def test_nothing_follows_the_end() -> None:
    heard = hear([[97], [98], [99]], stop=("b",))
    assert heard.text == "a" and isinstance(heard.end, Finished) and heard.end.completion_tokens == 2
