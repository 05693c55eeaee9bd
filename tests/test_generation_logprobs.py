"""The entries of a reply's tokens on their way: each once, in order, in time, and never for what a stop string takes away."""

from __future__ import annotations

import codecs
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import Called, Event, Failed, Finished, Logprobed, Reasoning, Scored, Text, Tool, Tools
from flare.engine import Delivery
from flare.engine.request import StopCause
from flare.generation import Answer
from flare.logprobs import TokenLogprobs
from flare.output import OutputSyntax, make_output
from flare.scored_prompt import ScoredChoice, ScoredPrompt
from flare.text.detokenizer import Detokenizer
from flare.text.stops import StopMatcher, StopSet
from tests.output.feeding import feed
from tests.support.live_server import EOS, IM_START, byte_tokenizer
from tests.test_generation import CALL, SYNTAX, TOOLS, cut

TOKENIZER = byte_tokenizer()


class Heard(NamedTuple):
    """What a listener heard of one choice, its entries joined."""

    events: list[Event]
    tokens: list[int]
    answers: list[bool]
    offsets: list[int]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text | Finished))


class Words:
    """A decoder of tokens that are words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def ahead(self, token: int) -> tuple[int, bool]:
        return 0, bool(self.words[token])

    def push(self, token: int) -> str:
        return self.words[token]

    def flush(self) -> str:
        return ""


def request(id: int = 1) -> Any:
    times = {"first_token_at": 1.0, "finished_at": 2.0, "queued_seconds": 0.0, "prefill_seconds": 0.0}
    return SimpleNamespace(id=id, prompt=[1, 2, 3], cached_tokens=0, **times)


def entry(token: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, 1, (), ())


def hear(
    steps: list[list[int]],
    *,
    stop: tuple[str, ...] = (),
    syntax: OutputSyntax | None = None,
    tools: Tools = TOOLS,
    opens: bool = False,
    cause: StopCause = StopCause.MAX_TOKENS,
    decoder: Any = None,
    forced: frozenset[int] = frozenset(),
    logprobs: bool = True,
) -> Heard:
    """Delivers the tokens of each step to one choice; the last step ends it. The tokens at the places `forced` were."""
    events: list[Event] = []
    engine: Any = SimpleNamespace(cancel=lambda id, cause=None: None)
    answer = Answer(engine, events.append, 0.0, lambda: None, logprobs=logprobs)
    output = make_output(syntax, tools, opens_reasoning=opens, call_prefix="c") if syntax else None
    stops = StopMatcher(StopSet(stop)) if stop else None
    choice = answer.add(0, request(), decoder or Detokenizer(TOKENIZER, previous=3), stops, output)
    count = 0
    for index, tokens in enumerate(steps):
        entries = [None if count + place in forced else entry(token) for place, token in enumerate(tokens)]
        count += len(tokens)
        last = index == len(steps) - 1
        choice.receive(Delivery(choice.request, tokens, cause if last else None, logprobs=entries if logprobs else []))
    assert answer.ended
    found = [event for event in events if isinstance(event, Logprobed)]
    return Heard(
        events,
        [one.token for event in found for one in event.entries],
        [answers for event in found for answers in event.answers],
        [offset for event in found for offset in event.offsets],
    )


def first_bytes(data: bytes) -> list[int]:
    """The character of the decoded text that each byte is part of."""
    bad: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("tests.note", note)
    data.decode("utf-8", "tests.note")
    places, at, character = [], 0, 0
    while at < len(data):
        ends = dict(bad)
        size = ends[at] - at if at in ends else len(data[at:].decode("utf-8", "ignore")[0].encode())
        places += [character] * size
        at, character = at + size, character + 1
    return places


PARTS = ["a", "é", "😊", "\n", " ", "<", "<think>", "</think>", CALL, "<tool_call>", "ST", "OP", b"\xf0\x9f", b"\xe2"]
REPLIES = st.lists(st.sampled_from(PARTS), max_size=9).map(
    lambda parts: b"".join(part.encode() if isinstance(part, str) else part for part in parts)
)
SIZES = st.lists(st.integers(0, 4), max_size=20)


@settings(max_examples=250, deadline=None)
@given(REPLIES, SIZES, st.sampled_from([(), ("STOP",), ("é", "a\n"), ("\ufffd",)]), st.sampled_from([None, SYNTAX]))
def test_entries_of_any_reply(
    data: bytes, sizes: list[int], stop: tuple[str, ...], syntax: OutputSyntax | None
) -> None:
    """However the reply comes: an entry a token, with its place in the text and in the answer; and the events are those of a
    reply without log probabilities."""
    tokens = list(data)
    heard = hear(cut(tokens, sizes), stop=stop, syntax=syntax)
    plain = hear(cut(tokens, sizes), stop=stop, syntax=syntax, logprobs=False)
    if isinstance(plain.events[-1], Failed):
        assert str(heard.events[-1].error) == str(plain.events[-1].error)  # type: ignore[union-attr]
        return
    assert heard.text == plain.text and heard.events[-1].completion_tokens == plain.events[-1].completion_tokens  # type: ignore[union-attr]
    kinds = [(type(e), getattr(e, "text", "")) for e in heard.events if isinstance(e, Reasoning | Called)]
    assert kinds == [(type(e), getattr(e, "text", "")) for e in plain.events if isinstance(e, Reasoning | Called)]

    places, text = first_bytes(data), data.decode("utf-8", "replace")
    spans = [(0, len(text))] if syntax is None else feed(text, syntax=syntax, tools=TOOLS, natural=False).places
    answer = [place for start, end in spans for place in range(start, end)]
    shown = answer[: len(heard.text)]
    end = answer[len(heard.text)] if heard.events[-1].stop is not None else len(text)  # type: ignore[union-attr]
    count = sum(place < end for place in places)
    assert heard.tokens == tokens[:count]
    assert heard.offsets == places[:count]
    assert heard.answers == [place in shown for place in places[:count]]

    # No text goes out before the entries of its tokens, and no entry twice or out of order.
    out = seen = 0
    for event in heard.events:
        if isinstance(event, Logprobed):
            seen += len(event.entries)
        elif isinstance(event, Text | Finished) and event.text:
            out += len(event.text)
            assert seen >= sum(place <= shown[out - 1] for place in places[:count])


def test_an_entry_waits_no_longer_than_its_text() -> None:
    """Without stops and formats every step brings its entries, half characters too."""
    heard = hear([[byte] for byte in "é!".encode()] + [[]])
    kinds = [type(event).__name__ for event in heard.events]
    assert kinds == ["Logprobed", "Text"] * 3 + ["Finished"]
    assert [event.text for event in heard.events if isinstance(event, Text)] == ["", "é", "!"]
    # And with them, those of a delimiter come with the step that ends it.
    heard = hear([[byte] for byte in b"<think>hm"], syntax=SYNTAX)
    sizes = [len(event.entries) for event in heard.events if isinstance(event, Logprobed)]
    assert sizes == [len("<think>"), 1, 1]


def test_a_token_that_a_stop_clips_keeps_its_entry() -> None:
    words = Words("say ", "stop", "now", " st", "op", " end")
    heard = hear([[0], [3], [4], [5]], stop=("stop",), decoder=words)
    assert (heard.text, heard.tokens) == ("say  ", [0, 3])
    heard = hear([[0], [1], [2]], stop=("stop",), decoder=words)
    assert (heard.text, heard.tokens) == ("say ", [0])
    heard = hear([[0, 3, 4, 2]], stop=("opn",), decoder=words)
    assert (heard.text, heard.tokens) == ("say  st", [0, 3])


def test_tokens_without_text() -> None:
    """They keep their place in the order: before a stop they have an entry, within it or behind it none."""
    a, b = ord("a"), ord("b")
    heard = hear([[a], [IM_START], [b], [EOS]], stop=("x",))
    assert (heard.tokens, heard.answers) == ([a, IM_START, b, EOS], [True, False, True, False])
    assert hear([[a], [IM_START], [b, b]], stop=("bb",)).tokens == [a, IM_START]
    assert hear([[a], [b, IM_START, b, a]], stop=("bb",)).tokens == [a]


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_a_token_without_text_stands_behind_the_character_that_it_ends(stop: tuple[str, ...]) -> None:
    """It shows that the character stays incomplete, and follows it in the text."""
    heard = hear([[0xF0], [0x9F], [IM_START], [ord("a")], [EOS]], stop=stop)
    assert heard.text == "\ufffda"
    assert heard.offsets == [0, 0, 1, 1, 2]
    assert heard.answers == [True, True, False, True, False]
    assert hear([[0xF0, IM_START], [IM_START, 0xE2], [0x28]], stop=stop).offsets == [0, 1, 1, 1, 2]


def test_a_forced_token_has_no_entry() -> None:
    text = list(b"hm</think>Yes")
    forced = frozenset(range(2, 10))
    heard = hear([[token] for token in text], syntax=SYNTAX, opens=True, forced=forced)
    assert bytes(heard.tokens) == b"hmYes" and heard.answers == [False] * 2 + [True] * 3


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["<think>", "a", "</think>b", "c"], [False, False, False, True]),
        (["<think>a", "b</think>", "\n\nc", "d"], [False, False, False, True]),
        (["<think>a</th", "ink>b", "c"], [False, False, True]),
        (["We ", "write </think>", " so"], [True, True, True]),
        (["a <tool", "_box>"], [True, True]),
        ([" ", "x"], [True, True]),
        (["<think>a</think>", " ", "x"], [False, True, True]),
        (["Ok.", CALL[:14], CALL[14:], " Bye"], [True, False, False, True]),
    ],
)
def test_which_tokens_begin_answer_text(words: list[str], answers: list[bool]) -> None:
    """A token that begins within a delimiter, reasoning or a call does not, whatever else it holds."""
    heard = hear([[index] for index in range(len(words))], syntax=SYNTAX, decoder=Words(*words))
    assert (heard.tokens, heard.answers) == (list(range(len(words))), answers)


def scored_choices(count: int, due: int) -> tuple[list[Event], list[ScoredChoice]]:
    events: list[Event] = []
    engine: Any = SimpleNamespace(cancel=lambda id, cause=None: None)
    answer = Answer(engine, events.append, 0.0, lambda: None)
    choices = [answer.add(i, request(i), Detokenizer(TOKENIZER, previous=3), None) for i in range(count)]
    prompt = ScoredPrompt(choices, due)
    return events, [ScoredChoice(choice, prompt) for choice in choices]


def test_choices_share_the_scores_of_their_prompt() -> None:
    """What comes for the others waits for the scores."""
    events, (first, second) = scored_choices(2, 3)
    scores = [entry(7), entry(8), entry(9)]
    second.receive(Delivery(second.choice.request, [97]))
    first.receive(Delivery(first.choice.request, [], scores=scores[:2]))
    assert events == [Scored(0, scores[:2]), Scored(1, scores[:2])]
    first.receive(Delivery(first.choice.request, [98], scores=scores[2:]))
    second.receive(Delivery(second.choice.request, [99], StopCause.MAX_TOKENS))
    assert events[2:4] == [Scored(0, scores[2:]), Scored(1, scores[2:])]
    assert [(e.choice, e.text) for e in events[4:] if isinstance(e, Text | Finished)] == [(0, "b"), (1, "a"), (1, "c")]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_while_a_prompt_is_scored_ends_all_choices(failing: int) -> None:
    events, choices = scored_choices(2, 2)
    choices[1].receive(Delivery(choices[1].choice.request, [97]))
    choices[failing].receive(Delivery(choices[failing].choice.request, [], error="no"))
    assert [type(event) for event in events] == [Failed]
    choices[0].receive(Delivery(choices[0].choice.request, [], scores=[entry(1), entry(2)]))
    assert len(events) == 1


def test_tools_of_this_file_call() -> None:
    """The call among PARTS is one."""
    assert [part[0] for part in feed(CALL, syntax=SYNTAX, tools=Tools((Tool("f"),))).parts] == ["call"]
