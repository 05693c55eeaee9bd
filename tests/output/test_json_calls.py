"""Calls as JSON objects behind other tags than "hermes", one by one and in arrays, and Mistral's two forms of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_NESTING, Tool, Tools
from flare.output import OutputSyntax
from flare.output.rules import LONGEST_NAME
from tests.output.feeding import CLOSE, OPEN, OTHER, TAGS, WEATHER, Fed, feed, same_for_all_splits
from tests.output.work import assert_linear

SYNTAXES = {
    name: OutputSyntax(tools=name, reasoning=TAGS, open_token=OPEN, close_token=CLOSE)
    for name in ("granite", "jamba", "mistral")
}
OPENERS = {"granite": "<|tool_call|>", "jamba": "<tool_calls>", "mistral": "[TOOL_CALLS]"}
CLOSERS = {"granite": "<|/tool_call|>", "jamba": "</tool_calls>", "mistral": ""}
FORMATS = sorted(OPENERS)

OSLO = ("call", "weather", '{"city":"Oslo"}')
CLOCK = ("call", "clock", "{}")
ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TWO = f'[{ONE}, {{"name": "clock", "arguments": {{}}}}]'


def read(format: str, text: str, **options: Any) -> Fed:
    return same_for_all_splits(text, syntax=SYNTAXES[format], **options)


@pytest.mark.parametrize("format", FORMATS)
def test_calls_in_an_array_and_alone(format: str) -> None:
    opener, closer = OPENERS[format], CLOSERS[format]
    for text, parts in (
        (opener + TWO + closer, [OSLO, CLOCK]),
        (f"{opener} \n[ {ONE} ]\n{closer}\n", [OSLO]),
        (f"So.\n{opener}{TWO}{closer}\nDone.", [("text", "So.\n"), OSLO, CLOCK, ("text", "\nDone.")]),
        (opener + ONE + closer, [OSLO]),
        (f"{opener}{ONE}{closer}{opener}[{ONE}]{closer}", [OSLO, OSLO]),
        (f'{opener}[{{"arguments": {{"city": "Oslo"}}, "name": "weather"}}]{closer}', [OSLO]),
        (f'{opener}[{{"name": "weather", "parameters": {{"city": "Oslo"}}}}]{closer}', [OSLO]),
        (f'{opener}[{{"parameters": "{{\\"city\\": \\"Oslo\\"}}", "name": "weather"}}]{closer}', [OSLO]),
        (f'{opener}[{{"id": "a1B2c3D4e", "type": "function", "name": "clock"}}]{closer}', [CLOCK]),
        (f'{opener}[{{"name": "clock", "arguments": null, "id": "a1B2c3D4e"}}]{closer}', [CLOCK]),
        (f"{opener}[{ONE}", [OSLO]),  # neither the array nor the tag is closed
        (f"{opener}[{ONE}]", [OSLO]),
        (f"{opener}{ONE} so", [OSLO, ("text", " so")]),
        (f"{opener}[{ONE}] so", [OSLO, ("text", " so")]),  # the bracket belongs to the calls
        (f"{opener}[{ONE} \n] <so", [OSLO, ("text", " <so")]),
        (f"{opener}{TWO}so", [OSLO, CLOCK, ("text", "so")]),
    ):
        found = read(format, text)
        assert (found.parts, found.error) == (parts, None), text


@pytest.mark.parametrize("format", FORMATS)
def test_mentions_of_a_call_are_text(format: str) -> None:
    opener = OPENERS[format]
    for rest in (
        " is a tag",
        "[]",
        "[1]",
        '[{"a": 1}]',
        "{}",
        '{"named": 1}',
        '[{"name": 5}]',
        f"{opener} [{opener}[{{ ",
    ):
        text = f"Write `{opener}{rest} End."
        assert read(format, text).parts == [("text", text)]
        assert read(format, text, opens=True).parts == [("reasoning", text)]
        found = read(format, f"{text} {opener}{TWO}")
        assert found.parts == [("text", text + " "), OSLO, CLOCK] and found.error is None


@pytest.mark.parametrize("format", FORMATS)
def test_calls_that_are_refused(format: str) -> None:
    for call in (
        '[{"name": ""}]',
        '[{"name": "f", "name": "g"}]',
        '[{"name": "f", "more": 1}]',
        '[{"name": "f", "arguments": {}, "parameters": {}}]',
        '[{"name": "f", "arguments": {"a": 1, "a": 2}}]',
        '[{"name": "f", "arguments": {"": 1}}]',
        '[{"name": "f", "arguments": [1]}]',
        '[{"name": "f", "arguments": {"a": NaN}}]',
        '[{"name": "f", "arguments": {"a": ' + "[" * MAX_NESTING + "]" * MAX_NESTING + "}}]",
        '[{"id": "f"}]',
        '[{"name": "f"',
        '[{"name": "f"}, ',
        "[",
        "",
    ):
        found = read(format, f"So {OPENERS[format]}{call}")
        assert found.error is not None and found.parts == [
            ("text", "So "),
            *[("call", "f", "{}")] * (call[-2:] == ", "),
        ]
    for rest in (", 1]", "; {", "} ]", ",, {", ',"', " so"):
        for natural in (True, False):
            found = read(format, f"{OPENERS[format]}[{ONE}{rest}", natural=natural)
            assert found.parts == [OSLO] and found.error is not None


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_is_cut(format: str) -> None:
    text = OPENERS[format] + TWO + CLOSERS[format]
    for cut in range(len(OPENERS[format]), len(text)):
        limited, natural = (read(format, "So: " + text[:cut], natural=natural) for natural in (False, True))
        complete = text[:cut].count("}}")
        assert limited.error is None and limited.parts == natural.parts
        assert limited.parts == [("text", "So: "), OSLO, CLOCK][: 1 + complete]
        announced = complete == 1 and "," in text[:cut].partition("}}")[2]
        assert (natural.error is not None) is (complete == 0 or announced), text[:cut]


@pytest.mark.parametrize("format", FORMATS)
def test_calls_beside_reasoning(format: str) -> None:
    text = OPENERS[format] + TWO + CLOSERS[format]
    syntax = OutputSyntax(tools=format, reasoning=TAGS)
    found = same_for_all_splits("Hm.</think>\n" + text, syntax=syntax, opens=True)
    assert found.parts == [("reasoning", "Hm."), OSLO, CLOCK]
    found = same_for_all_splits("Hm." + text, syntax=syntax, opens=True)
    assert found.parts == [("reasoning", "Hm."), OSLO, CLOCK]
    single = Tools(WEATHER.offered, parallel=False)
    assert same_for_all_splits(text, syntax=syntax, tools=single).parts == [OSLO]
    assert same_for_all_splits(text, syntax=syntax, tools=single).error is not None


MISTRAL = "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', [OSLO]),
        ('[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}', [OSLO]),
        ('[TOOL_CALLS]weather{"city": "Oslo"}', [OSLO]),
        ('[TOOL_CALLS] weather [ARGS] \n{"city": "Oslo"}\n', [OSLO]),
        ('Ok.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}', [("text", "Ok."), OSLO, CLOCK]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"} Done', [OSLO, ("text", " Done")]),
        ("[TOOL_CALLS]my tool[ARGS]{}", [("call", "my tool", "{}")]),
        ('[TOOL_CALLS]a.b-c/é[ARGS]{"a": "[ARGS] [TOOL_CALLS]"}', [("call", "a.b-c/é", '{"a":"[ARGS] [TOOL_CALLS]"}')]),
        ("[TOOL_CALLS]my toy[ARGS]{}", [("text", "[TOOL_CALLS]my toy[ARGS]{}")]),
        ("[TOOL_CALLS]a b{}", [("text", "[TOOL_CALLS]a b{}")]),
        ("[TOOL_CALLS]f[1]{}", [("text", "[TOOL_CALLS]f[1]{}")]),
        ("[TOOL_CALLS]f[ARG]{}", [("text", "[TOOL_CALLS]f[ARG]{}")]),
        ("[TOOL_CALLS] ends a turn.", [("text", "[TOOL_CALLS] ends a turn.")]),
        ("[TOOL_CALLS][TOOL_CALLS]clock[ARGS]{}", [("text", "[TOOL_CALLS]"), CLOCK]),
        ("[TOOL_CALLS]f[TOOL_CALLS]clock[ARGS]{}", [("text", "[TOOL_CALLS]f"), CLOCK]),
        ("[TOOL_CALLS][A[TOOL_CALLS]clock[ARGS]{}", [("text", "[TOOL_CALLS][A"), CLOCK]),
        ("x" * LONGEST_NAME + "!", [("text", "x" * LONGEST_NAME + "!")]),
    ],
)
def test_the_newer_form(text: str, parts: list[Any]) -> None:
    found = read("mistral", text, tools=Tools((*WEATHER.offered, Tool("my tool"))))
    assert (found.parts, found.error) == (parts, None)


def test_the_newer_form_refused_and_cut() -> None:
    for rest in ("[ARGS]{}", " [ARGS]{}", "[CALL_ID]a[ARGS]{}"):
        assert "without a name" in str(read("mistral", MISTRAL + rest).error)
    for rest in ("f[ARGS][1]", "f[ARGS]x", 'f[ARGS]{"a":1,"a":2}', "f[ARGS]{,}", f"f[CALL_ID]{'x' * 300}", "f{'a'}"):
        for natural in (True, False):
            found = read("mistral", MISTRAL + rest, natural=natural)
            assert found.parts == [] and found.error is not None
    whole = "[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS] " + '{"city": "Oslo"}'
    for cut in range(len(MISTRAL), len(whole)):
        limited, natural = (read("mistral", "So: " + whole[:cut], natural=natural) for natural in (False, True))
        assert limited.parts == natural.parts == [("text", "So: ")]
        assert limited.error is None and natural.error is not None
    long = "n" * LONGEST_NAME
    tools = Tools((Tool(long[:128], namespace=long[130:]),))
    name = f"{long[130:]}__{long[:128]}"
    (made,) = read("mistral", f"{MISTRAL}{name}[ARGS]{{}}", tools=tools).calls
    assert (made.namespace, made.name) == (long[130:], long[:128])
    text = f"{MISTRAL}{name}n[ARGS]{{}}"
    assert read("mistral", text).parts == [("text", text)]


PROSE = st.text(alphabet="abé <>/[]|_\n\"'\\🙂", max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | PROSE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=3)
NAMES = st.text(alphabet="abcé_-.", min_size=1, max_size=12)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)


@settings(max_examples=150)
@given(
    st.sampled_from([*FORMATS, "mistral v13"]),
    PROSE,
    st.lists(st.tuples(CALLS, PROSE), max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sets(st.integers(0, 500)),
)
def test_what_was_written_comes_back(
    format: str, before: str, blocks: list[tuple[Any, str]], ascii: bool, indent: int | None, cuts: set[int]
) -> None:
    """Calls, order and text; white space beside calls aside."""
    name, newer, _ = format.partition(" ")
    opener, closer = OPENERS[name], CLOSERS[name]
    text, wanted = before, [before]
    for calls, prose in blocks:
        objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
        written = [
            json.dumps(made["arguments"] if newer else made, ensure_ascii=ascii, indent=indent) for made in objects
        ]
        if newer:
            text += "".join(f"{opener}{made['name']}[ARGS]{it}" for made, it in zip(objects, written, strict=True))
        elif written:
            text += f"{opener}[{', '.join(written)}]{closer}"
        wanted += [*calls, prose] if calls else [prose]
        text += prose
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    for split in (pieces, list(text), [text]):
        found = feed(split, syntax=SYNTAXES[name])
        assert found.error is None
        made = [(part[1], json.loads(part[2])) for part in found.parts if part[0] == "call"]
        assert made == [call for calls, _ in blocks for call in calls]
        shown = "\0".join("".join(part[1].split()) if part[0] == "text" else "\1" for part in found.parts)
        expected = "\0".join("".join(part.split()) if isinstance(part, str) else "\1" for part in wanted)
        assert "".join(shown.split("\0")) == "".join(expected.split("\0"))


FRAGMENTS = [
    *OPENERS.values(),
    *("[ARGS]", "[CALL_ID]", "<|/tool_call|>", "</tool_calls>", "<think>", "</think>", "[", "]", "{", "}", ",", ";"),
    *('{"name": "', '"name":', '"arguments": {', '"weather"', "clock", '"', " ", "\n", "a", "é", "<", "[TOOL", "[AR"),
    *(ONE, TWO, "{}"),
]


@settings(max_examples=300)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([WEATHER, Tools(WEATHER.offered, "named", "weather"), Tools(WEATHER.offered, parallel=False)]),
)
def test_any_split_gives_the_same(format: str, fragments: list[str], opens: bool, natural: bool, tools: Tools) -> None:
    text = "".join(fragments)
    options = {
        "syntax": OutputSyntax(tools=format, reasoning=TAGS),
        "tools": tools,
        "opens": opens,
        "natural": natural,
    }
    whole = feed(text, **options)
    for split in (fragments, list(text), [piece for char in text for piece in ((OTHER, char), (OTHER, ""))]):
        found = feed(split, **options)
        assert (found.parts, found.error) == (whole.parts, whole.error)


@pytest.mark.parametrize(
    ("format", "head", "unit"),
    [
        *((format, "", opener) for format, opener in OPENERS.items()),
        *((format, "", opener + "[{") for format, opener in OPENERS.items()),
        *((format, "", f"{opener}[{ONE}]") for format, opener in OPENERS.items()),
        *((format, opener + "[", ONE + ",") for format, opener in OPENERS.items()),
        *((format, opener, " ") for format, opener in OPENERS.items()),
        *((format, opener + '[{"name":"f","arguments":{"a":[', "1,") for format, opener in OPENERS.items()),
        ("mistral", "", "[TOOL_CALLS]a b"),
        ("mistral", "", "[TOOL_CALLS]f[ARGS]{}"),
        ("mistral", "", "[TOOL_CALLS][ARG"),
        ("mistral", "", "[TOOL_CALLS]" + "x" * 260),
        ("mistral", "[TOOL_CALLS]f[ARGS]", " "),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "[1],"),
        ("jamba", f"<tool_calls>{TWO}", "</tool_"),
    ],
)
def test_work_grows_with_the_length(format: str, head: str, unit: str) -> None:
    assert_linear(head, unit, syntax=SYNTAXES[format])
