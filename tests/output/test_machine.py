"""Reasoning, answer text and calls, apart: the same however the output is cut."""

from __future__ import annotations

from typing import Any

import pytest

from flare.conversation import Tools
from flare.output import OutputSyntax, make_output
from tests.output.feeding import (
    CALLS,
    CLOSE,
    OPEN,
    OTHER,
    REASONS,
    TAGS,
    TEXTS,
    TOKENS,
    WEATHER,
    call,
    feed,
    same_for_all_splits,
)

OSLO = ("call", "weather", '{"city":"Oslo"}')
NOON = ("call", "clock", "{}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("Hello.\n", [("text", "Hello.\n")]),
        ("a < b and <b>bold</b> <tool_ <thin", [("text", "a < b and <b>bold</b> <tool_ <thin")]),
        (call(), [OSLO]),
        (f"\n\n{call()}\n", [OSLO]),
        (f"{call()}\n{call('clock', '{}')}\n", [OSLO, NOON]),
        (f"{call()}{call()}", [OSLO, OSLO]),
        (f"Let me see.\n{call()}", [("text", "Let me see.\n"), OSLO]),
        (f"{call()}\nDone: it rains.", [OSLO, ("text", "\nDone: it rains.")]),
        (
            f"One {call()} two {call('clock', '{}')} three",
            [("text", "One "), OSLO, ("text", " two "), NOON, ("text", " three")],
        ),
        ("<think>\nRain?\n\nPerhaps.\n</think>\n\nYes.", [("reasoning", "Rain?\n\nPerhaps."), ("text", "Yes.")]),
        ("<think>\n\n</think>\n\nYes.", [("text", "Yes.")]),
        ("<think></think>", []),
        ("<think>Open to the end\n", [("reasoning", "Open to the end")]),
        (f"<think>I need it.\n</think>\n\n{call()}", [("reasoning", "I need it."), OSLO]),
        (f"<think>I need it.\n{call()}\n", [("reasoning", "I need it."), OSLO]),
        (f"<think>I need it.\n{call()}</think>\nSo.", [("reasoning", "I need it."), OSLO, ("text", "So.")]),
        (f"{call()}<think>Enough.</think>Bye.", [OSLO, ("reasoning", "Enough."), ("text", "Bye.")]),
        ("Well <think>hm</think> yes", [("text", "Well "), ("reasoning", "hm"), ("text", " yes")]),
        ("<think>\n<think>\ntwice", [("reasoning", "twice")]),
        ("<think>a <think> b</think>c", [("reasoning", "a <think> b"), ("text", "c")]),
        ("<think>a</think></think>\nb </think> c", [("reasoning", "a"), ("text", "b </think> c")]),
        ("  \n", [("text", "  \n")]),  # nothing else came: it is the answer
        ("<think>a</think>\n    code", [("reasoning", "a"), ("text", "    code")]),
        ("\u3000\n" + call(), [OSLO]),
    ],
)
def test_parts_of_an_answer(text: str, parts: list[Any]) -> None:
    found = same_for_all_splits(text)
    assert found.error is None and found.parts == parts


@pytest.mark.parametrize(
    "text",
    [
        "Write `<tool_call>` first, then </tool_call>. Done.",
        "<tool_call> is a tag",
        "<tool_call>\n\n{}",
        '<tool_call>{"function": "weather"}</tool_call>',
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"na me": "x"}',
        "<tool_call>[1]</tool_call>",
        "<tool_call><tool_call> <tool_call>{",
        "</tool_call>",
    ],
)
def test_mentions_of_a_call_are_text(text: str) -> None:
    text += " End."
    assert same_for_all_splits(text).parts == [("text", text)]
    assert same_for_all_splits(text, opens=True).parts == [("reasoning", text)]
    found = same_for_all_splits(text + call())
    assert found.parts == [("text", text), OSLO] and found.error is None


def test_a_call_without_its_closing_tag() -> None:
    bare = call().removesuffix("</tool_call>")
    assert same_for_all_splits(bare).parts == [OSLO]
    assert same_for_all_splits(bare.rstrip()).parts == [OSLO]
    assert same_for_all_splits(bare + "</tool_", natural=False).parts == [OSLO]
    assert same_for_all_splits(bare + call("clock", "{}")).parts == [OSLO, NOON]
    assert same_for_all_splits(bare + "<think>So</think>it rains").parts == [
        OSLO,
        ("reasoning", "So"),
        ("text", "it rains"),
    ]
    assert same_for_all_splits(bare + "It rains.").parts == [OSLO, ("text", "\nIt rains.")]


def test_two_calls_in_one_pair_of_tags() -> None:
    both = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n{"name": "clock"}\n</tool_call>'
    assert same_for_all_splits(both).parts == [OSLO, NOON]
    for cut in (both[: both.index('{"name": "clock"') + 4], both[: both.index("clock")]):
        natural = same_for_all_splits(cut)
        assert natural.parts == [OSLO] and natural.error is not None
        limited = same_for_all_splits(cut, natural=False)
        assert limited.parts == [OSLO] and limited.error is None


@pytest.mark.parametrize("cut", range(1, len(call()) - len("\n</tool_call>")))
def test_an_answer_that_ends_within_a_call(cut: int) -> None:
    whole = "So: " + call()
    begun = whole[: len("So: ") + cut]
    limited = same_for_all_splits(begun, natural=False)
    natural = same_for_all_splits(begun)
    assert limited.error is None and limited.calls == natural.calls == []
    if cut < len("<tool_call>"):
        assert limited.parts == natural.parts == [("text", begun)] and natural.error is None
    else:
        assert limited.parts == [("text", "So: ")] and natural.error is not None


def test_a_truncated_call_behind_a_complete_one() -> None:
    found = same_for_all_splits(call() + '\n<tool_call>\n{"name": "clock", "argu', natural=False)
    assert found.parts == [OSLO] and found.error is None
    assert same_for_all_splits(" \n" + call()[:20], natural=False).parts == []


def test_the_prompt_may_open_the_reasoning() -> None:
    assert same_for_all_splits("Hm.\n</think>\n\nYes.", opens=True).parts == [("reasoning", "Hm."), ("text", "Yes.")]
    assert same_for_all_splits("\n<think>\nHm.</think>Yes.", opens=True).parts == [
        ("reasoning", "Hm."),
        ("text", "Yes."),
    ]
    assert same_for_all_splits("Hm. " + call(), opens=True).parts == [("reasoning", "Hm. "), OSLO]
    assert same_for_all_splits("cut", opens=True, natural=False).parts == [("reasoning", "cut")]
    assert same_for_all_splits("Yes.", opens=True, syntax=CALLS).parts == [("text", "Yes.")]


def pieces(*items: str) -> list[tuple[int, str]]:
    """Tokens: "<think>" and "</think>" by themselves are the delimiters, all else is ordinary text."""
    tokens: list[tuple[int, str]] = []
    for item in items:
        if item in TAGS:
            tokens.append((OPEN if item == TAGS[0] else CLOSE, item))
        else:
            tokens += [(OTHER, char) for char in item]
    return tokens


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (
            pieces("Its close is </think> as text", "</think>", "Use <think> or </think> once."),
            [("reasoning", "Its close is </think> as text"), ("text", "Use <think> or </think> once.")],
        ),
        (pieces("<think>", "a", "</think>", "</think>", "b"), [("reasoning", "a"), ("text", "b")]),
        (pieces("a", "</think>", "b", "</think>", "c"), [("reasoning", "a"), ("text", "b</think>c")]),
        (pieces("a", "</think>", "b", "<think>", "c"), [("reasoning", "a"), ("text", "b"), ("reasoning", "c")]),
        (pieces("a", "<think>", "b"), [("reasoning", "a<think>b")]),
        (pieces("a<tool_call>", "</think>", "b"), [("reasoning", "a<tool_call>"), ("text", "b")]),
        (pieces("a<tool", "</think>", "_call>b"), [("reasoning", "a<tool"), ("text", "_call>b")]),
        (
            pieces('<tool_call>{"name": "clock", "arguments": {"a": "', "</think>", "<think>", '"}}'),
            [("call", "clock", '{"a":"</think><think>"}')],
        ),
    ],
)
def test_delimiters_that_are_tokens(tokens: list[tuple[int, str]], parts: list[Any]) -> None:
    found = feed(tokens, syntax=TOKENS, opens=True)
    assert (found.parts, found.error) == (parts, None)


def test_a_delimiter_token_without_a_text_of_its_own() -> None:
    """Special tokens give no text; what comes with them is a character that they left incomplete."""
    found = feed([(OTHER, "a"), (CLOSE, "\ufffd"), (OTHER, "b"), (CLOSE, ""), (OTHER, "c")], syntax=TOKENS, opens=True)
    assert found.parts == [("reasoning", "a\ufffd"), ("text", "bc")]


def test_reasoning_tokens_are_those_between_the_delimiters() -> None:
    assert feed(pieces("hmmmm", "</think>", "yes"), syntax=TOKENS, opens=True).reasoning_tokens == 5
    assert feed(pieces("<think>", "h\n\nm", "</think>", "yes"), syntax=TOKENS).reasoning_tokens == 4
    assert feed(pieces("h\n", "</think>", "\nyes"), syntax=TOKENS, opens=True).reasoning_tokens == 2
    for syntax in (TOKENS, TEXTS):
        close = (CLOSE, "</think>") if syntax is TOKENS else "</think>"
        for held, count in (
            (["<"], 1),
            (["<", "tool"], 2),
            (["<tool_call>"], 1),
            (["<tool_call>", " "], 2),
            (["h", "<"], 2),
        ):
            fed = feed(["a", *held, close, "b"], syntax=syntax, opens=True)
            assert (
                fed.reasoning_tokens == 1 + count
                and "".join(text for _, text in fed.parts) == "a" + "".join(held) + "b"
            )
    assert feed(["a", "<", "<", "</think>", "b"], opens=True).reasoning_tokens == 3
    assert feed(["a", "<", "x</think>", "b"], opens=True).reasoning_tokens == 3
    assert feed(["a", "<", "/think>b"], opens=True).reasoning_tokens == 1
    assert feed([(OTHER, "a"), (OTHER, ""), (CLOSE, "\ufffd</think>")], syntax=TOKENS, opens=True).reasoning_tokens == 2
    assert feed("hm </thi", syntax=TEXTS, opens=True).reasoning_tokens == 1
    for text, count in (
        ("<think>hmm</think>yes", 3),
        ("<think>h<</th</think>yes", 6),
        ("<think>h < mm<think>m", 14),
        ("<think>" + call() + "yes", 0),
        ("<think>hm" + call() + "yes", 2),
        ("<think>a<tool_call>b</think>c", 13),
        ("<think>hm </thi", 8),  # not a delimiter after all
        ("yes", 0),
    ):
        assert feed(list(text)).reasoning_tokens == count, text
    assert feed([(OTHER, "h"), (OTHER, ""), (-1, "\ufffd")], opens=True).reasoning_tokens == 2


def test_machines_are_made_where_something_is_to_be_told_apart() -> None:
    def made(syntax: OutputSyntax, tools: Tools) -> bool:
        return make_output(syntax, tools, opens_reasoning=True, call_prefix="c") is not None

    none = Tools(WEATHER.offered, "none")
    assert made(CALLS, WEATHER) and made(TEXTS, WEATHER) and made(REASONS, WEATHER) and made(REASONS, Tools())
    assert not made(OutputSyntax(), WEATHER) and not made(CALLS, Tools()) and not made(CALLS, none)
    for tools in (Tools(), none):
        found = same_for_all_splits("<think>a" + call() + "</think>" + call(), tools=tools)
        assert found.parts == [("reasoning", "a" + call()), ("text", call())] and not found.calls
