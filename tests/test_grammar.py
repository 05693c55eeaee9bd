"""Grammars of custom tools: matched as a whole and on exact bytes, bounded, and refused in our own words."""

from __future__ import annotations

import re
from random import Random
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Tool, Tools
from flare.errors import RequestError
from flare.grammar import MAX_DEFINITION, MAX_TEXT, MatchError, TextGrammar
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
        ("lark", "start: nosuch", "f: cannot be compiled as a Lark grammar at line 1, column 8: a name that "),
        ("lark", 'other: "a"\nstart: (', "f: cannot be compiled as a Lark grammar at line "),
        ("lark", "", "f: cannot be compiled as a Lark grammar: no rule called start; "),
        ("lark", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "f: cannot be compiled as a Lark grammar"),
        ("regex", "([", "f: cannot be compiled as a regular expression at character 2: a class that is not closed; "),
        ("regex", r"(a)\1", "f: cannot be compiled as a regular expression at character 4: a reference to a group, "),
        (
            "regex",
            "ab\\",
            "f: cannot be compiled as a regular expression at character 3: an escape that ends too soon; ",
        ),
        (
            "regex",
            "(" * 50_000 + "a" + ")" * 50_000,
            "f: cannot be compiled as a regular expression at character 251: ",
        ),
        (
            "regex",
            "(?x)a #\\",
            "f: cannot be compiled as a regular expression at character 8: an escape that ends too soon; correct it",
        ),
        (
            "regex",
            "a" * (MAX_DEFINITION + 1),
            f"f: {MAX_DEFINITION + 1} bytes of UTF-8, the limit is {MAX_DEFINITION}; send a smaller one",
        ),
    ],
)
def test_what_cannot_be_compiled(syntax: str, definition: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        TextGrammar(syntax, definition, field="f")  # type: ignore[arg-type]
    assert str(caught.value).startswith(said) and caught.value.param == "f" and len(str(caught.value)) < 200


SUM = 'e: e "+" e | e "*" e | "(" e ")" | NUM\nNUM: /[0-9]+/\n'


@pytest.mark.parametrize(
    ("syntax", "definition", "text"),
    [
        ("lark", 'start: start start | "a"', "a" * 3000),
        ("lark", "start: e\n" + SUM, "+".join(["1"] * 400)),
        ("lark", 'start: e (";" e)*\n' + SUM, ";".join(["+".join(["1"] * 150)] * 8)),
    ],
)
def test_an_ambiguous_grammar_is_bounded(syntax: str, definition: str, text: str) -> None:
    """With the library's own bounds, 3000 bytes of the first take minutes. The texts are of the grammars: giving up is not
    finding them wrong."""
    grammar = TextGrammar(syntax, definition, field="f")  # type: ignore[arg-type]
    assert grammar.matches(text[:3])
    started = thread_time()
    with pytest.raises(MatchError, match="takes too much"):
        grammar.matches(text)
    assert thread_time() - started < 1


def test_other_threads_go_on_while_a_text_is_matched() -> None:
    """The library holds the interpreter's lock for a slice of the text, not for all of it."""
    grammar = lark('start: e (";" e)*\n' + SUM)
    data, calls = ";".join(["+".join(["1"] * 30)] * 8), []
    matcher = grammar._matcher

    class Watched:
        def deep_copy(self) -> Watched:
            self.copy = matcher.deep_copy()
            return self

        def try_consume_tokens(self, part: list[int]) -> int:
            began = thread_time()
            taken = self.copy.try_consume_tokens(part)
            calls.append(thread_time() - began)
            return taken

        def is_error(self) -> bool:
            return self.copy.is_error()

        def is_accepting(self) -> bool:
            return self.copy.is_accepting()

    grammar._matcher = Watched()  # type: ignore[assignment]
    assert grammar.matches(data)
    assert len(calls) > 10 and max(calls) < 0.05


def test_too_long_a_text_is_not_matched() -> None:
    grammar = lark("start: /a*/")
    assert grammar.matches("a" * MAX_TEXT)
    with pytest.raises(MatchError, match=f"{MAX_TEXT + 1} bytes of UTF-8, and {MAX_TEXT} are the limit"):
        grammar.matches("a" * (MAX_TEXT + 1))


def test_many_words_are_no_ambiguity() -> None:
    grammar = lark("start: " + " | ".join(f'"k{number}"' for number in range(300)))
    assert grammar.matches("k299") and not grammar.matches("k300")


def test_a_text_that_takes_too_much_does_not_spoil_the_next() -> None:
    """Matchers share a lexer: where one of the library's has given up, all its copies match nothing, without an error."""
    grammar = TextGrammar("regex", "((a{0,100}){0,100}){0,100}", field="f")
    for _ in range(2):
        with pytest.raises(MatchError):
            grammar.matches("a" * 50)
        assert grammar.matches("a" * 20) and not grammar.matches("b")


def test_what_was_matched_before_decides_nothing() -> None:
    """The states of a lexer are bounded, and kept from text to text; each of these makes some thousand new ones."""
    grammar = TextGrammar("regex", "[ab]*a[ab]{18}", field="f")
    draw = Random(1)
    for _ in range(12):
        assert grammar.matches("".join(draw.choices("ab", k=8000)) + "a" * 19)


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


def test_an_input_that_is_not_matched_fails_the_answer_in_other_words() -> None:
    tools = Tools((Tool("p", custom=True, grammar=lark('start: start start | "a"')),))
    bad = feed(call("p", '{"input": "' + "a" * 3000 + '"}'), tools=tools)
    said = "that takes too much to be matched; make the tool's grammar less ambiguous"
    assert bad.error == f"the model called 'p' with an input {said}"
    tools = Tools((Tool("p", custom=True, grammar=lark("start: /a*/")),))
    bad = feed(call("p", '{"input": "' + "a" * (MAX_TEXT + 1) + '"}'), tools=tools)
    limit = f"{MAX_TEXT + 1} bytes of UTF-8, and {MAX_TEXT} are the limit for one with a grammar"
    assert bad.error == f"the model called 'p' with an input of {limit}"
