"""Any output, cut anywhere, gives the same parts; and long hostile ones take time in proportion to their length."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import Tools
from flare.output import OutputSyntax
from tests.output.feeding import CALLS, CLOSE, OPEN, OTHER, REASONS, TEXTS, TOKENS, WEATHER, call, feed

FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<",
    "<tool",
    "</think",
    "_call>",
    '{"name": "',
    '{"name":',
    '{"arguments": {',
    "weather",
    '"',
    "}",
    "{",
    "\n",
    " ",
    "a",
    "é",
    call(),
    call("clock", "{}"),
    call().removesuffix("</tool_call>"),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=12)
TOOLS = [
    WEATHER,
    Tools(WEATHER.offered, "required", parallel=False),
    Tools(WEATHER.offered, "named", "weather"),
    Tools(),
]


@settings(max_examples=400)
@given(
    TEXT,
    st.lists(st.integers(0, 200), max_size=20),
    st.sampled_from([TEXTS, CALLS, REASONS]),
    st.sampled_from(TOOLS[:3]),
    st.booleans(),
    st.booleans(),
)
def test_any_split_gives_the_same(
    fragments: list[str], cuts: list[int], syntax: OutputSyntax, tools: Tools, opens: bool, natural: bool
) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    options = {"syntax": syntax, "tools": tools, "opens": opens, "natural": natural}
    whole = feed(text, **options)
    for split in (
        [text[begin:end] for begin, end in zip(places, places[1:], strict=False)],
        list(text),
        fragments,
        [piece for char in text for piece in (char, "")],
    ):
        found = feed(split, **options)
        assert (found.parts, found.error) == (whole.parts, whole.error)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*FRAGMENTS, OPEN, CLOSE]), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(TOOLS),
)
def test_any_split_between_delimiter_tokens_gives_the_same(
    items: list[str | int], opens: bool, natural: bool, tools: Tools
) -> None:
    spelled = {OPEN: "<think>", CLOSE: "</think>"}
    whole: list[str | tuple[int, str]] = []
    split: list[str | tuple[int, str]] = []
    for item in items:
        if isinstance(item, int):
            whole.append((item, spelled[item]))
            split.append((item, spelled[item]))
        else:
            # Neighbouring texts are one token of `whole`.
            if whole and isinstance(whole[-1], str):
                whole[-1] += item
            else:
                whole.append(item)
            split += [(OTHER, char) for char in item]
    options = {"syntax": TOKENS, "tools": tools, "opens": opens, "natural": natural}
    first, second = feed(whole, **options), feed(split, **options)
    assert (first.parts, first.error) == (second.parts, second.error)


@given(TEXT, st.booleans(), st.booleans())
def test_what_comes_out_was_written_in_that_order(fragments: list[str], opens: bool, natural: bool) -> None:
    rest = "".join(fragments)
    for kind, *content in feed(rest, opens=opens, natural=natural).parts:
        wanted = '"name"' if kind == "call" else content[0]
        for char in wanted:
            assert char in rest
            rest = rest[rest.index(char) + 1 :]


@given(TEXT.map("".join).filter(lambda text: "<tool_call>" not in text and "think>" not in text))
def test_text_without_a_call_or_delimiter_stays_as_it_is(text: str) -> None:
    assert feed(list(text)).parts == ([("text", text)] if text else [])
    begun = feed(list("." + text), opens=True).parts
    assert begun == [("reasoning", ("." + text).rstrip("\n"))]


MANY = 1 << 19
HOSTILE = {
    "openers": "<tool_call>",
    "openers with space": "<tool_call>" + " " * 50,
    "undecided": '<tool_call>{"name":',
    "half openers": "<tool_cal",
    "brackets": "<",
    "delimiters": "<think></think>",
    "opening delimiters": "<think>",
    "closing delimiters": "</think>",
    "line breaks": "\n",
    "spaces": " ",
    "calls": '<tool_call>{"name":"f"}',
    "calls in one pair of tags": '{"name":"f"}',
    "text between": 'a<tool_call>{"name":"f"}</tool_call>\n',
}


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_hostile_outputs_take_linear_time(unit: str, opens: bool) -> None:
    """Half a megabyte at once, and a part of it by characters. What is not linear would take minutes."""
    text = unit * (MANY // len(unit))
    begun = time.process_time()
    feed(text, opens=opens, natural=False)
    feed(list(text[: MANY // 32]), opens=opens, natural=False)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"f","arguments":{"a":"' + "<tool_call>{" * (MANY // 12),
        '<tool_call>{"name":"f","arguments":{"a":"' + '\\"' * (MANY // 2),
        '<tool_call>{"name":"f","arguments":{"a":[' + "{}," * (MANY // 3),
        '<tool_call>{"name":"f","arguments":{"a":[' + "[" * MANY,
        '<tool_call>{"name":"f","arguments":{"a":[' + "1," * (MANY // 2) + "1]}}",
        '<tool_call>{"name":"f","arguments":{' + ",".join(f'"{i}":{i}' for i in range(MANY // 16)) + "}}",
        '<tool_call>{"name":"f","arguments":"' + '{\\"a\\":' * (MANY // 8),
        "<tool_call>" + " " * MANY + "{",
        '<tool_call>{"name":"f"}' + " " * MANY + "x",
    ],
)
def test_hostile_calls_take_linear_time(text: str) -> None:
    begun = time.process_time()
    feed(text, natural=False)
    feed([text[:60], *text[60 : MANY // 32], text[MANY // 32 :]], natural=False)
    assert time.process_time() - begun < 5
