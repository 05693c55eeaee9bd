"""Grammars of custom tools: matched as a whole and on exact bytes, bounded, and refused in our own words."""

from __future__ import annotations

import re
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Tool, Tools
from flare.errors import RequestError
from flare.grammar import MAX_DEFINITION, MAX_TEXT, TextGrammar
from flare.prompting import template_tools
from tests.output.feeding import call, feed

PATCH = 'start: "begin" LF line+ "end" LF?\nline: "+" /[^\\n]*/ LF\n%import common.LF\n'


def lark(definition: str) -> TextGrammar:
    return TextGrammar("lark", definition, field="f")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("begin\n+a\nend", True),
        ("begin\n+a\n+\n+\u00fc \U0001f642\nend\n", True),
        ("begin\nend", False),
        ("begin\n+a\nend\n\n", False),
        ("begin\n+a", False),
        (" begin\n+a\nend", False),
        ("begin\r\n+a\nend", False),
        ("", False),
    ],
)
def test_a_whole_text_on_exact_bytes(text: str, fits: bool) -> None:
    grammar = lark(PATCH)
    assert [grammar.matches(text) for _ in range(2)] == [fits, fits]


@given(st.text(alphabet="ab0\n", max_size=12))
def test_regular_expressions_agree_with_pythons(text: str) -> None:
    assert EXPRESSION.matches(text) == (re.fullmatch(EXPRESSION.definition, text) is not None)


EXPRESSION = TextGrammar("regex", r"(a|b0?)+\n{0,2}", field="f")


@pytest.mark.parametrize(
    ("syntax", "definition", "said"),
    [
        ("lark", "start: nosuch", "f: cannot be compiled as a Lark grammar at line 1, column 8; "),
        ("lark", 'other: "a"\nstart: (', "f: cannot be compiled as a Lark grammar at line "),
        ("lark", "", "f: cannot be compiled as a Lark grammar; "),
        ("lark", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "f: cannot be compiled as a Lark grammar"),
        ("regex", "([", "f: cannot be compiled as a regular expression; "),
        ("regex", r"(a)\1", "f: cannot be compiled as a regular expression; "),
        ("regex", "(" * 50_000 + "a" + ")" * 50_000, "f: cannot be compiled as a regular expression; "),
        ("regex", "a" * (MAX_DEFINITION + 1), f"f: {MAX_DEFINITION + 1} bytes of UTF-8, the limit is {MAX_DEFINITION}"),
    ],
)
def test_what_cannot_be_compiled(syntax: str, definition: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        TextGrammar(syntax, definition, field="f")  # type: ignore[arg-type]
    assert str(caught.value).startswith(said) and caught.value.param == "f" and len(str(caught.value)) < 200


def test_an_ambiguous_grammar_is_bounded() -> None:
    """With the library's own bounds, 3000 bytes of this take minutes."""
    grammar = lark('start: start start | "a"')
    started = perf_counter()
    assert grammar.matches("aaa") and not grammar.matches("a" * 3000)
    assert perf_counter() - started < 60


def test_too_long_a_text_does_not_match() -> None:
    grammar = lark("start: /a*/")
    assert grammar.matches("a" * MAX_TEXT) and not grammar.matches("a" * (MAX_TEXT + 1))


def test_the_model_is_told_the_grammar() -> None:
    tools = Tools((Tool("p", "Patches.", custom=True, grammar=lark(PATCH)), Tool("q", custom=True, grammar=EXPRESSION)))
    shown = [tool["function"]["description"] for tool in template_tools(tools) or []]
    assert shown == [
        f"Patches.\n\nThe whole input must match this Lark grammar:\n{PATCH}",
        f"The whole input must match this regular expression:\n{EXPRESSION.definition}",
    ]


def test_an_input_that_does_not_match_fails_the_answer() -> None:
    tools = Tools((Tool("p", custom=True, grammar=lark(PATCH)),))
    good = feed(call("p", '{"input": "begin\\n+a\\nend"}'), tools=tools)
    assert good.error is None and good.calls[0].arguments == "begin\n+a\nend"
    bad = feed(call("p", '{"input": "begin\\nend"}'), tools=tools)
    assert bad.calls == [] and bad.error == "the model called 'p' with an input that is not of the tool's grammar"
