"""What is said of grammars that cannot be compiled: the fault and its place, in our words and on one line."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.errors import RequestError
from flare.grammar import TextGrammar, regex_error
from flare.grammar_faults import _LARK_FAULTS, _REGEX_FAULTS, uncompiled


def refusal(syntax: str, definition: str) -> str:
    with pytest.raises(RequestError) as caught:
        TextGrammar(syntax, definition, field="f")  # type: ignore[arg-type]
    text = str(caught.value)
    assert caught.value.param == "f" and "\n" not in text and len(text) < 250
    return text


PIECES = [
    "a",
    "/",
    r"\/",
    "\n",
    "\r\n",
    "\t",
    r"\n",
    "\\\n",
    r"\\",
    "[/]",
    "(b)",
    "x{2}",
    "é",
    "你",
    "😀",
    '"',
    r"\x41",
    " ",
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.sampled_from(["[", "(", ")", "{2", r"\q", "[z-a]"])
)
@example("", "*")
@settings(max_examples=60)
def test_the_place_is_that_of_the_character_as_it_was_sent(before: str, fault: str) -> None:
    """The library quotes slashes and control characters otherwise than they were written."""
    at = len(before) + (2 if fault == "[z-a]" else 1)
    if fault == "{2":
        before, at = before + "y", at + 1
    assert f" at character {at}: " in refusal("regex", before + fault)


REGEX = [
    ("a[b", 2, "a class that is not closed"),
    ("a(b", 2, "a group that is not closed"),
    ("(a))", 4, "a closing parenthesis of no group"),
    ("a{2,", 2, "a counted repetition that is not closed"),
    ("*a", 1, "a repetition of nothing"),
    ("a{,3", 3, "a counted repetition without a number"),
    ("a{3,1}", 2, "a counted repetition whose least number is over its most"),
    (r"\x{zz}", 4, "an escape by a number that is no character's"),
    ("a{99999999999}", 3, "a number that is missing or too large"),
    (r"\x4", 4, "an escape that ends too soon"),
    (r"[\b]", 2, "an escape that a class cannot hold"),
    (r"a\Qb", 2, "an escape that Rust's syntax does not have"),
    ("[z-a]", 2, "a range whose first character comes behind its last"),
    (r"[a-\d]", 4, "a range that does not end with a single character"),
    ("(?u-u)", 5, "flags that cannot stand there"),
    ("(?P<n>a)(?P<n>b)", 13, "a group's name that is empty, not closed, taken or no name"),
    (r"\b{foo}", 4, "a word boundary, which is not supported"),
    (r"a\p{Nope}", 2, "a class of Unicode that is not known"),
    ("(" * 300 + "a" + ")" * 300, 251, "parentheses or brackets within more than 250 others"),
    (r"(a)\1", 4, "a reference to a group, which is not supported"),
    ("a(?<!b)", 2, "look-around, which is not supported"),
    (r"(?-u)\xff", 6, "bytes that are no UTF-8"),
    (r"\bfoo\b", None, "a word boundary, which is not supported"),
    ("a$b", None, "^ or $ inside of the expression, which is not supported"),
]


@pytest.mark.parametrize(("expression", "at", "what"), REGEX, ids=range(len(REGEX)))
def test_faults_of_expressions(expression: str, at: int | None, what: str) -> None:
    place = "" if at is None else f" at character {at}"
    said = refusal("regex", expression)
    assert said.startswith(f"f: cannot be compiled as a regular expression{place}: {what}; ")
    assert said.endswith("leave it out" if "not supported" in what or "UTF-8" in what else "it")


def test_every_fault_of_an_expression_is_tried() -> None:
    assert {what for _, what, _ in _REGEX_FAULTS} <= {what for *_, what in REGEX}


LARK = [
    ("start: nosuch", "line 1, column 8: a name that nothing has"),
    ('start: x\nstart: y\nx: "a"\ny: "b"', "line 2, column 8: a name that two rules have"),
    ("start: A\nA: B\nB: A", "line 3, column 4: a terminal that leads to itself"),
    ('other: "a"', ": no rule called start"),
    ("", ": no rule called start"),
    ('%import common.NOPE\nstart: "a"', "line 1, column 1: an import of what is not in common"),
    ("start: <nope>", "line 1, column 8: a special token that the model does not have"),
    ('start: "a"{3,1}', "line 1, column 8: a repetition whose least number is over its most"),
    ('start: "a" & "b"', "line 1, column 8: an intersection (&) outside of terminals, whose names are in capitals"),
    ('start: "a', "line 1, column 10: a text or a sign that Lark does not have"),
    ('start: "\\ud800"', "line 1, column 16: a text that is no string of JSON"),
    ('start: "a"\nb: (', "line 2, column 5: a fault of syntax"),
    (
        'start: "a" b\nb: /x[/i',
        "line 2, column 4, at character 6 of the expression '(?i)x[': a class that is not closed",
    ),
    ("start: /a\n[/", "line 1, column 8, in an expression: a class that is not closed"),
    ("start: /" + "x" * 100 + "(/", "line 1, column 8, at character 101 of an expression: a group that is not closed"),
    ('start: "a" | /\\bx/', "line 1, column 8, in the expression '\\\\bx': a word boundary, which is not supported"),
]


@pytest.mark.parametrize(("definition", "said"), LARK, ids=range(len(LARK)))
def test_faults_of_lark_grammars(definition: str, said: str) -> None:
    place = said if said.startswith(":") else f" at {said}"
    assert refusal("lark", definition).startswith(f"f: cannot be compiled as a Lark grammar{place}")


def test_every_fault_of_a_lark_grammar_is_tried() -> None:
    assert all(any(what in said for _, said in LARK) for _, what in _LARK_FAULTS)


@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_what_the_library_says_otherwise_is_not_passed_on(syntax: str) -> None:
    for error in ("", "an internal secret", "at 3(4): a secret", "\n\n~\n"):
        said = uncompiled(syntax, "a", error)
        assert said.endswith("; correct it or make it smaller") and "secret" not in said
    for error in ("regex parse error:\nerror: a secret", "regex parse error:\n    ab\n         ^^\nerror: a secret"):
        said = uncompiled(syntax, "a", error)
        assert said.endswith(": what Rust's syntax does not have; correct it") and "secret" not in said


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.text("[](){}*+?|\\^$.-:<>!=/ab1,&~#\n\r\t\x0b", max_size=12),
)
@settings(max_examples=300)
def test_any_expression_is_told_in_one_line_of_our_own(text: str, signs: str) -> None:
    for expression in (text + signs, signs + text):
        error = regex_error(expression)
        if error:
            said = uncompiled("regex", expression, error)
            found = re.match(r"cannot be compiled as a regular expression( at character ([0-9]+))?: [^\n]+; ", said)
            assert found and (found[2] is None or 1 <= int(found[2]) <= len(expression) + 1), said


def test_an_expression_that_can_be_compiled_has_no_error() -> None:
    assert regex_error("a|b") == "" != regex_error("a|(")
