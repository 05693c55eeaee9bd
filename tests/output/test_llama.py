"""Llama's calls, which have no opener: where one begins, and that other answers in JSON are left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_NESTING, MAX_TOOL_NAME, Tool, Tools
from flare.output import OutputSyntax, make_output
from flare.output.rules import LONGEST_NAME
from tests.output.feeding import OTHER, TAGS, WEATHER, Fed, feed, same_for_all_splits
from tests.output.work import assert_linear

SYNTAX = OutputSyntax(tools="llama")
REASONS = OutputSyntax(tools="llama", reasoning=TAGS)

OSLO = ("call", "weather", '{"city":"Oslo"}')
CLOCK = ("call", "clock", "{}")
ONE = '{"name": "weather", "parameters": {"city": "Oslo"}}'


def read(text: str, **options: Any) -> Fed:
    return same_for_all_splits(text, **{"syntax": SYNTAX} | options)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (ONE, [OSLO]),
        (f"\n\n {ONE}\n", [OSLO]),
        (f"<|python_tag|>{ONE}", [OSLO]),
        (f"Let me see. <|python_tag|> {ONE}", [("text", "Let me see. "), OSLO]),
        (f'{ONE}; {{"name": "clock", "parameters": {{}}}}', [OSLO, CLOCK]),
        (f'{ONE} ;\n{{"name": "clock", "parameters": {{}}}};', [OSLO, CLOCK]),
        (f'{ONE}\n{{"name": "clock", "parameters": {{}}}}', [OSLO, CLOCK]),
        (f'<|python_tag|>{ONE}; <|python_tag|>{{"name": "clock", "parameters": {{}}}}', [OSLO, ("text", "; "), CLOCK]),
        ('{"type": "function", "name": "clock", "parameters": {}}', [CLOCK]),
        ('{"name": "clock", "parameters": {}, "type": "function"}', [CLOCK]),
        ('{ "name" : "clock" , "arguments" : null }', [CLOCK]),
        ('{"name": "weather", "parameters": "{\\"city\\": \\"Oslo\\"}"}', [OSLO]),
        ('{"name": "a\\"\\u00e9\\\\", "parameters": {}}', [("call", 'a"é\\', "{}")]),
        (f"{ONE} It rains.", [OSLO, ("text", " It rains.")]),
        (f"{ONE}; and {ONE}", [OSLO, ("text", f"; and {ONE}")]),
    ],
)
def test_calls(text: str, parts: list[Any]) -> None:
    found = read(text)
    assert (found.parts, found.error) == (parts, None)


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        f"Here: {ONE}",
        f"[{ONE}]",
        '{"city": "Oslo"}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 3, "parameters": {}}',
        '{"name": "Bob", "parameters": 5}',
        '{"name": "Bob", "parameters": [1]}',
        '{"name": 5, "parameters": {}}',
        '{"name": null}',
        '{"named": "f"}',
        '{"type": "person", "name": "f", "parameters": {}}',
        '{"type": "function", "function": {"name": "f"}}',
        '{"parameters": {}, "name": "f"}',
        '{"name": "line\nbreak", "parameters": {}}',
        f'{{"name": "{"x" * (LONGEST_NAME + 1)}", "parameters": {{}}}}',
        "{}",
        "{{",
        "{ not JSON }",
        "<|python_tag|>print(1)",
        '<|python_tag|>search.call(query="a")',
        f"<|python_tag|>[{ONE}]",
        '{"a": 1}\n{"name": "f", "parameters": {}}',
    ],
)
def test_other_answers_are_text(text: str) -> None:
    for whole in (text, text + " End.", "\n " + text):
        assert read(whole).parts == [("text", whole)]
        assert read(whole).error is None


def test_an_answer_in_json_streams_from_where_it_is_none() -> None:
    machine = make_output(SYNTAX, WEATHER, opens_reasoning=False, call_prefix="c")
    assert machine is not None
    answer = '{"name": "Bob", "years": 3, "more": {"name": "f", "parameters": {}}}'
    decided = answer.index("years")
    for at, char in enumerate(answer):
        shown = "".join(piece.text for piece in machine.push(OTHER, char))
        assert shown == ("" if at < decided else answer[: at + 1] if at == decided else char)


def test_an_answer_begins_behind_reasoning() -> None:
    found = read(f"Hm. {ONE}</think>\n\n{ONE}", syntax=REASONS, opens=True)
    assert found.parts == [("reasoning", "Hm. " + ONE), OSLO]
    assert read(f"<think>Hm.</think>{ONE}", syntax=REASONS).parts == [("reasoning", "Hm."), OSLO]
    answer = '{"name": "Bob"}'
    assert read(f"Hm.</think>\n\n{answer}", syntax=REASONS, opens=True).parts == [
        ("reasoning", "Hm."),
        ("text", answer),
    ]
    assert read(f"a</think>b{ONE}", syntax=REASONS, opens=True).parts == [("reasoning", "a"), ("text", "b" + ONE)]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "", "parameters": {}}',
        '{"name": " ", "parameters": {}}',
        '{"name": "\\ud800", "parameters": {}}',
        '{"name": "\\x", "parameters": {}}',
        '{"name": "f", "parameters": {}, "more": 1}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "parameters": {"a": 1, "a": 2}}',
        '{"name": "f", "parameters": {"": 1}}',
        '{"name": "f", "parameters": nothing}',
        '{"name": "f", "parameters": "5"}',
        '{"name": "f", "parameters": {\'a\': 1}}',
        '{"name": "f", "parameters": {"a": ' + "[" * MAX_NESTING + "]" * MAX_NESTING + "}}",
        f'{{"name": "{"x" * (MAX_TOOL_NAME + 1)}", "parameters": {{}}}}',
    ],
)
def test_calls_that_are_refused(call: str) -> None:
    found = read(f"{ONE};{call}")
    assert found.parts == [OSLO] and found.error is not None


@pytest.mark.parametrize("opener", ["", "<|python_tag|>"])
def test_a_call_that_is_cut(opener: str) -> None:
    for cut in range(len(opener) or 1, len(opener + ONE)):
        limited, natural = (read((opener + ONE)[:cut], natural=natural) for natural in (False, True))
        assert limited.parts == natural.parts == [] and limited.error is None and natural.error is not None
    both = f'{ONE}; {{"name": "clock", "parameters": {{}}}}'
    for cut in range(len(ONE), len(both)):
        limited, natural = (read(both[:cut], natural=natural) for natural in (False, True))
        assert limited.parts == natural.parts == [OSLO]
        assert limited.error is None and (natural.error is not None) is (cut > len(ONE + "; "))


def test_what_a_request_allows() -> None:
    named = Tools(WEATHER.offered, "named", "weather")
    assert read(ONE, tools=named).parts == [OSLO]
    assert read('{"name": "Bob"}', tools=named).error is not None
    single = Tools(WEATHER.offered, parallel=False)
    found = read(f"{ONE};{ONE}", tools=single)
    assert found.parts == [OSLO] and "second" in str(found.error)
    assert read(f'{ONE};{{"name": "Bob"}}', tools=single).error is None
    long = "n" * MAX_TOOL_NAME
    tools = Tools((Tool(long, namespace=long),))
    (made,) = read(f'{{"name": "{long}__{long}", "parameters": {{}}}}', tools=tools).calls
    assert (made.namespace, made.name) == (long, long)
    assert make_output(SYNTAX, Tools(), opens_reasoning=False, call_prefix="c") is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.text(alphabet='abcé_-."\\', min_size=1, max_size=12),
        st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150)
@given(
    CALLS,
    st.sampled_from(["", " ", "\n\n", "<|python_tag|>", "Well. <|python_tag|>"]),
    st.sampled_from([";", "; ", "\n", ""]),
    st.sampled_from(["", ".", " {", "\nDone."]),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sets(st.integers(0, 500)),
)
def test_what_was_written_comes_back(
    calls: list[tuple[str, Any]], before: str, between: str, after: str, ascii: bool, indent: int | None, cuts: set[int]
) -> None:
    objects = [{"name": name, "parameters": parameters} for name, parameters in calls]
    text = before + between.join(json.dumps(made, ensure_ascii=ascii, indent=indent) for made in objects) + after
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    for split in (pieces, list(text), [text]):
        found = feed(split, syntax=SYNTAX, natural="{" not in after)
        assert found.error is None
        assert [(part[1], json.loads(part[2])) for part in found.parts if part[0] == "call"] == calls
        shown = "".join(part[1] for part in found.parts if part[0] == "text")
        assert shown == ("Well. " if before.startswith("Well") else "") + ("" if "{" in after else after)


FRAGMENTS = [
    *(
        "<|python_tag|>",
        "{",
        "}",
        ";",
        '"',
        '{"name": "',
        '{"type": "function", ',
        '", "parameters": {',
        '"parameters":',
    ),
    *('"name"', ":", ",", "n", "\\", " ", "\n", "a", "é", "<", "<|pyth", "<think>", "</think>", ONE, '"age": 3'),
]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([WEATHER, Tools(WEATHER.offered, "named", "weather"), Tools(WEATHER.offered, parallel=False)]),
)
def test_any_split_gives_the_same(fragments: list[str], opens: bool, natural: bool, tools: Tools) -> None:
    text = "".join(fragments)
    options = {"syntax": REASONS, "tools": tools, "opens": opens, "natural": natural}
    whole = feed(text, **options)
    for split in (fragments, list(text), [piece for char in text for piece in ((OTHER, char), (OTHER, ""))]):
        found = feed(split, **options)
        assert (found.parts, found.error) == (whole.parts, whole.error)


@pytest.mark.parametrize(
    ("head", "unit"),
    [
        ("", "{"),
        ("", '{"name":"f",'),
        ("", "<|python_tag|>"),
        ("", "<|python_tag|>{"),
        ("", '{"a":1} '),
        ("", ONE + ";"),
        ("", ONE + ';{"name":"b"}'),
        ("<|python_tag|>", " "),
        ('{"name":"', "x"),
        (ONE, " ;"),
        ('{"name":"f","parameters":{"a":', "[1],"),
    ],
)
def test_work_grows_with_the_length(head: str, unit: str) -> None:
    assert_linear(head, unit, syntax=SYNTAX)
