"""Replies in frames of control tokens, as generation feeds them, and hostile ones, by the work that they cost."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flare.conversation import Called, Failed, Finished, Reasoning, Text, Tools
from flare.engine import Delivery
from flare.engine.request import StopCause
from flare.generation import Answer
from flare.output import Output, OutputError, make_output
from flare.output.muse_atem import MAX_HEADER
from flare.text.stops import StopMatcher, StopSet
from tests.output.feeding import OTHER, WEATHER
from tests.output.frames import Frames
from tests.output.test_kimi_xtml import KIMI, WEATHER_CALL, argument, call, channel, closes, opens, tools
from tests.output.test_muse_atem import MUSE, block, invoke, message, parameter


def hear(frames: Frames, reply: str, size: int, *, stop: str, opens_reasoning: bool = False) -> list[tuple[str, Any]]:
    """The events of a reply that ends with a stop token, a step a token; neighbouring texts are joined."""
    events: list[Any] = []
    engine: Any = SimpleNamespace(cancel=lambda id, cause=None: None)
    request: Any = SimpleNamespace(
        id=1, prompt=[1], cached_tokens=0, first_token_at=0.0, finished_at=0.0, queued_seconds=0.0, prefill_seconds=0.0
    )
    spelled = {id: spelling for spelling, id in frames.ids.items()}
    texts: list[str] = []
    tokens = []
    for token, text in frames.pushed(frames.items(reply), size):
        if token == OTHER:
            tokens.append(1000 + len(texts))
            texts.append(text)
        else:
            tokens.append(token)
    decoder = SimpleNamespace(push=lambda token: spelled[token] if token < 1000 else texts[token - 1000], flush=str)
    answer = Answer(engine, events.append, 0.0, lambda: None)
    output = make_output(frames.tokens, WEATHER, opens_reasoning=opens_reasoning, call_prefix="c")
    choice = answer.add(0, request, decoder, StopMatcher(StopSet((stop,))), output)
    for token in tokens:
        choice.receive(Delivery(request, [token]))
    choice.receive(Delivery(request, [], StopCause.STOP_TOKEN, stop_tokens=(7,)))
    heard: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, Called):
            heard.append(("call", event.call.arguments))
        elif isinstance(event, Failed):
            heard.append(("failed", event.error.message))
        elif isinstance(event, Text | Reasoning | Finished) and event.text:
            kind = "reasoning" if isinstance(event, Reasoning) else "text"
            if heard and heard[-1][0] == kind:
                heard[-1] = (kind, heard[-1][1] + event.text)
            else:
                heard.append((kind, event.text))
    return [*heard, ("end", events[-1].stop)] if isinstance(events[-1], Finished) else heard


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_stop_string_that_never_comes_lets_no_marker_through(size: int) -> None:
    """As reported: with a stop string set the tail of a control token came out as answer text."""
    reply = "t" + closes("think") + channel("response", "Fine.")
    found = hear(KIMI, reply, size, stop="a-very-long-stop-string", opens_reasoning=True)
    assert found == [("reasoning", "t"), ("text", "Fine."), ("end", None)]
    found = hear(KIMI, reply, size, stop="Fine.<|close|>response", opens_reasoning=True)
    assert found == [("reasoning", "t"), ("text", "Fine."), ("end", None)]
    reply = message("self", "t") + message("user", "Fine.", "")
    assert hear(MUSE, reply, size, stop="Fine.<|eom|>") == [("reasoning", "t"), ("text", "Fine."), ("end", None)]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_stop_string_in_the_answer_ends_it_there(size: int) -> None:
    for frames, reply in (
        (KIMI, "A STOP b" + closes("response") + tools(call("weather", "bad"))),
        (MUSE, message("user", "A STOP b") + message("weather", "bad")),
    ):
        assert hear(frames, reply, size, stop="STOP") == [("text", "A "), ("end", "STOP")]
    for frames, reply in (
        (KIMI, "STO" + closes("response") + tools(WEATHER_CALL) + channel("response", "P")),
        (MUSE, message("user", "STO") + message("weather", block(invoke("weather", parameter("city", "Oslo"))))
         + message("user", "P", "")),
    ):  # fmt: skip
        expected = [("text", "STO"), ("call", '{"city":"Oslo"}'), ("text", "P"), ("end", None)]
        assert hear(frames, reply, size, stop="STOP") == expected


KIMI_CALL = opens("call", ' tool="f"')
MUSE_CALL = " to=f<|message|>" + '<atem:invoke name="f">'
HOSTILE: dict[str, tuple[Frames, str, str]] = {
    "kimi openings": (KIMI, "", "<|open|>"),
    "kimi closings": (KIMI, "", "<|close|>"),
    "kimi separators": (KIMI, "", "<|sep|>"),
    "kimi half markers": (KIMI, "", "<|ope"),
    "kimi brackets": (KIMI, "", "<|"),
    "kimi channels": (KIMI, "", opens("response")),
    "kimi closed channels": (KIMI, "", closes("think")),
    "kimi space outside": (KIMI, closes("response"), " "),
    "kimi a tag": (KIMI, closes("response") + "<|open|>", "x"),
    "kimi attributes": (KIMI, '<|open|>call tool="f" ', ' a="'),
    "kimi calls": (KIMI, opens("tools"), call("f")),
    "kimi arguments": (KIMI, KIMI_CALL, "\n" + opens("argument", ' key="a"')),
    "kimi closed arguments": (KIMI, KIMI_CALL, argument("a", "1")),
    "kimi a value": (KIMI, KIMI_CALL + opens("argument", ' key="a"'), '<"[{'),
    "kimi an array": (KIMI, KIMI_CALL + opens("argument", ' key="a" type="array"'), "["),
    "kimi objects": (KIMI, KIMI_CALL + opens("json") + '{"a":[', "{},"),
    "muse starts": (MUSE, "", "<|start|>"),
    "muse messages": (MUSE, "", " to=user<|message|>"),
    "muse ends": (MUSE, "", "<|eom|>"),
    "muse space": (MUSE, "", " "),
    "muse half headers": (MUSE, " to=self<|message|>", " to="),
    "muse a long word": (MUSE, " to=self<|message|> to=", "to="),
    "muse words": (MUSE, " to=user<|message|>", " t to"),
    "muse calls": (MUSE, " to=f<|message|>", invoke("f")),
    "muse openings": (MUSE, " to=f<|message|>", "<atem:invoke"),
    "muse half openings": (MUSE, " to=f<|message|>", "<atem:"),
    "muse a name": (MUSE, " to=f<|message|><atem:invoke name=", '"x'),
    "muse arguments": (MUSE, MUSE_CALL, '<atem:parameter name="a">'),
    "muse closings": (MUSE, MUSE_CALL + '<atem:parameter name="a">', "</atem:parameter>"),
    "muse closings with space": (MUSE, MUSE_CALL + '<atem:parameter name="a">', "</atem:parameter>\n </atem:in"),
    "muse space behind a value": (MUSE, MUSE_CALL + '<atem:parameter name="a">1</atem:parameter>', " \n"),
}


def cost(frames: Frames, reply: str, size: int, *, named: bool) -> tuple[int, int]:
    """How many calls of functions a reply takes in pieces of one size, and how much text was held back at most."""
    syntax = frames.tokens if named else frames.texts
    machine = make_output(syntax, Tools(WEATHER.offered), opens_reasoning=False, call_prefix="c")
    assert machine is not None
    if named:
        pushed = frames.pushed(frames.items(reply), size)
    else:
        pushed = [(OTHER, reply[at : at + size]) for at in range(0, len(reply), size)]
    calls = held = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for token, text in pushed:
            for _ in machine.push(token, text):
                pass
            held = max(held, _held(machine))
        for _ in machine.end(natural=False):
            pass
    except OutputError:
        pass
    finally:
        sys.setprofile(None)
    return calls, held


def _held(machine: Output) -> int:
    """How many characters are looked at again with the next ones."""
    reader = getattr(machine, "_reader", None)
    return machine._undecided() + (len(reader._seen) if reader is not None else 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize(("frames", "begin", "unit"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_replies_cost_in_proportion_to_their_length(
    frames: Frames, begin: str, unit: str, size: int, named: bool
) -> None:
    """Each character is taken once, and of those that came before only a bounded number is looked at again."""
    count = 1200 // len(unit)
    once, _ = cost(frames, begin + unit * count, size, named=named)
    twice, _ = cost(frames, begin + unit * 2 * count, size, named=named)
    fourfold, held = cost(frames, begin + unit * 4 * count, size, named=named)
    assert twice - once < 1.1 * once + 100 and fourfold - twice < 1.1 * 2 * once + 100
    assert held <= MAX_HEADER + 20
