"""Replies under an output constraint: what comes before the answer is read as ever, and the answer is verbatim."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Tool, Tools
from flare.output import OutputError, OutputSyntax, make_output
from tests.output.feeding import CLOSE, TEXTS, TOKENS, WEATHER, call

NO_TOOLS = Tools()


def read(
    pushed: list[Any], syntax: OutputSyntax, *, tools: Tools = NO_TOOLS, opens: bool = False, breaks: bool = False
) -> tuple[str, str, int]:
    """Returns reasoning, answer text, and how many calls there were."""
    machine = make_output(syntax, tools, opens_reasoning=opens, call_prefix="c", structured=True, breaks=breaks)
    assert machine is not None
    reasoning, text, calls = "", "", 0
    for item in [*pushed, None]:
        token, said = (9, item) if isinstance(item, str) else item or (0, "")
        for piece in machine.end(natural=True) if item is None else machine.push(token, said):
            reasoning += piece.text if piece.kind == "reasoning" else ""
            text += piece.text if piece.kind == "text" else ""
            calls += piece.kind == "call"
    return reasoning, text, calls


@pytest.mark.parametrize(
    "answer",
    [
        ['{"a', '": "', "<think>", "x", "</think>", '"}'],
        ['"', "</", "think", '>"'],
        ['"<', 'tool_call>"'],
        ["12", " "],
        ['{"a": "', call(), '"}'],
        ["null"],
    ],
)
@pytest.mark.parametrize("opens", [False, True])
def test_an_answer_is_verbatim(answer: list[str], opens: bool) -> None:
    before = ["so", "</think>", "\n\n"] if opens else []
    assert read([*before, *answer], TEXTS, tools=WEATHER, opens=opens) == ("so" if opens else "", "".join(answer), 0)


def test_tokens_of_delimiters_inside_an_answer_are_text() -> None:
    pushed = ["hm", (CLOSE, "</think>"), "\n", '"see ', (CLOSE, "</think>"), '"']
    assert read(pushed, TOKENS, opens=True) == ("hm", '"see </think>"', 0)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("syntax", [TEXTS, OutputSyntax(tools="deepseek_dsml", reasoning=("<think>", "</think>"))])
def test_white_space_begins_an_answer(syntax: OutputSyntax, opens: bool) -> None:
    """Of a grammar or an expression: what looks like a call or a delimiter behind it is text."""
    before, said = (["so", "</think>"], "so") if opens else ([], "")
    for answer in ([" ", *call()], ["\t<think>", "x"], ["  ", "</think>", " "], [" "]):
        assert read([*before, *answer], syntax, tools=WEATHER, opens=opens) == (said, "".join(answer), 0)
    for answer in (["\n", *call()], ["\n\n", " ", "\n"], ["\n"]):
        assert read([*before, *answer], syntax, tools=WEATHER, opens=opens, breaks=True) == (said, "".join(answer), 0)
    assert read(["so", "</think>", "\n\n", " a"], syntax, tools=WEATHER, opens=True) == ("so", " a", 0)


def test_a_call_instead_of_the_answer_is_one() -> None:
    assert read(["so", "</think>", "\n", *call()], TEXTS, tools=WEATHER, opens=True) == ("so", "", 1)
    assert read([*call(), "\n", *call()], TEXTS, tools=WEATHER) == ("", "", 2)


def test_an_object_is_the_answer_where_calls_are_bare() -> None:
    syntax = OutputSyntax(tools="llama")
    text = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    assert read(list(text), syntax, tools=WEATHER) == ("", text, 0)
    assert read(["<|python_tag|>", *text], syntax, tools=WEATHER) == ("", "", 1)


def test_a_demanded_call_is_missed() -> None:
    with pytest.raises(OutputError, match="completed no call"):
        read(["{}"], TEXTS, tools=Tools((Tool("f"),), "required"))


@given(st.text(alphabet='<>/think{}"\\n tool_call', max_size=60), st.booleans())
def test_whatever_the_answer_holds(text: str, opens: bool) -> None:
    pushed = ["r", "</think>", "[", *text] if opens else ["[", *text]
    assert read(pushed, TEXTS, tools=WEATHER, opens=opens) == ("r" if opens else "", "[" + text, 0)


KIMI = ["so", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>"]
MUSE = ["so", "<|eom|>", "<|start|>", "assistant to=user", "<|message|>"]


@pytest.mark.parametrize(
    ("name", "marks", "before"),
    [
        ("kimi_xtml", ["<|open|>", "<|close|>", "<|sep|>"], KIMI),
        ("muse_atem", ["<|start|>", "<|message|>", "<|eom|>"], MUSE),
    ],
)
def test_frames(name: str, marks: list[str], before: list[str]) -> None:
    ids = {mark: 100 + i for i, mark in enumerate(marks)}
    syntax = OutputSyntax(tools=name, reasoning=("a", "b"), spelled=frozenset(ids.values()))
    answer = ["{", '"k": " to=', "self", marks[0], "call", marks[1], '"', "}"]
    pushed = [(ids[part], part) if part in ids else part for part in [*before, *answer]]
    assert read(pushed, syntax, opens=True) == ("so", "".join(answer), 0)
