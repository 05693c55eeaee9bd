"""Gemma 4's reasoning channel and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tool, Tools
from flare.output import OutputSyntax
from flare.output.gemma4 import Gemma4Reader
from flare.output.scanning import MAX_CALL_BYTES
from tests.output.cutting import calls_made, same_for_all_cuts, tokens, work
from tests.output.feeding import CLOSE, OTHER, Fed, Pushed, feed

SYNTAX = OutputSyntax(tools="gemma4", reasoning=("<|channel>thought", "<channel|>"), close_token=CLOSE)
SPECIAL = {"<channel|>": CLOSE, "<|channel>": 11, "<|tool_call>": 12, "<tool_call|>": 13, '<|"|>': 14}
TOOLS = Tools((Tool("note"), Tool("clock")))


def call(arguments: str = "", name: str = "note") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def read(text: str, **options: Any) -> Fed:
    """What comes of a text whose special tokens are tokens, and, but for the closing delimiter, of the same as text."""
    options = {"syntax": SYNTAX, "tools": TOOLS} | options
    found = same_for_all_cuts(tokens(text, SPECIAL), **options)
    again = same_for_all_cuts(tokens(text, {"<channel|>": CLOSE}), **options)
    assert (again.parts, again.error) == (found.parts, found.error)
    return found


def arguments_of(written: str) -> str:
    found = read(call(written))
    assert found.error is None, found.error
    ((_, _, arguments),) = found.parts
    return arguments


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # A delimited text holds quotes, braces and commas; what follows it is read on.
        (
            call('text:<|"|>she said "go", {now}: n:9}<|"|>,n:2'),
            [("call", "note", '{"text":"she said \\"go\\", {now}: n:9}","n":2}')],
        ),
        # A bare null is null, a delimited one is text.
        (call('a:null,b:true,c:<|"|>null<|"|>', "put"), [("call", "put", '{"a":null,"b":true,"c":"null"}')]),
        ("<|channel>thought\nadd them\n<channel|>It is 9.", [("reasoning", "add them"), ("text", "It is 9.")]),
        ("<|channel>thought\n<channel|>It is 9.", [("text", "It is 9.")]),
        ("<|channel>thought<channel|>\n\nIt is 9.", [("text", "It is 9.")]),
        ("<channel|>It is 9.", [("text", "It is 9.")]),  # the prompt holds an empty channel already
        (
            f"<|channel>thought\nI need it.<channel|>{call()}{call(name='clock')}",
            [("reasoning", "I need it."), ("call", "note", "{}"), ("call", "clock", "{}")],
        ),
        (
            f"<|channel>thought\nI need it.{call()}\n<|channel>thought\nMore.<channel|>Done.",
            [("reasoning", "I need it."), ("call", "note", "{}"), ("reasoning", "More."), ("text", "Done.")],
        ),
        (f"So:\n{call()}\nDone.", [("text", "So:\n"), ("call", "note", "{}"), ("text", "\nDone.")]),
        ("<|channel> a <|channel>though <|tool_cal", [("text", "<|channel> a <|channel>though <|tool_cal")]),
        # A delimiter is data within a call.
        (call('a:<|"|><channel|><|channel>thought<|"|>'), [("call", "note", '{"a":"<channel|><|channel>thought"}')]),
        # Calls without their closing tag, and several in one pair of tags.
        ("<|tool_call>call:note{}", [("call", "note", "{}")]),
        ("<|tool_call>call:note{}<|tool_call>call:clock{}", [("call", "note", "{}"), ("call", "clock", "{}")]),
        ("<|tool_call>call:note{} call:clock{}\n<tool_call|>", [("call", "note", "{}"), ("call", "clock", "{}")]),
    ],
)
def test_parts_of_an_answer(text: str, parts: list[Any]) -> None:
    found = read(text)
    assert (found.parts, found.error) == (parts, None)


def test_the_channel_is_told_from_pieces_of_its_text() -> None:
    stream: list[str | Pushed] = ["<|chan", "nel>", "thou", "ght", "\nadd them\n", (CLOSE, "<channel|>"), "It is 9."]
    found = same_for_all_cuts(stream, syntax=SYNTAX, tools=Tools())
    assert found.parts == [("reasoning", "add them"), ("text", "It is 9.")]
    # The closing delimiter is a token, its text is not.
    found = same_for_all_cuts("Its close is <channel|> as text", syntax=SYNTAX, tools=Tools(), opens=True)
    assert found.parts == [("reasoning", "Its close is <channel|> as text")]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", "{}"),
        (" \n", "{}"),
        (
            " a : 1 ,\n b : [ -0 , 1.50 , 1e400, 123456789012345678901234567890 ] ",
            '{"a":1,"b":[-0,1.50,1e400,123456789012345678901234567890]}',
        ),
        ("a:true,b:false,c:null,d:None", '{"a":true,"b":false,"c":null,"d":null}'),
        (
            'a:{b:[{c:<|"|>x<|"|>},[],{}],d:{e:1}},f:2',
            '{"a":{"b":[{"c":"x"},[],{}],"d":{"e":1}},"f":2}',
        ),
        ('<|"|>a:{b},"c"<|"|>:1', '{"a:{b},\\"c\\"":1}'),
        ('"url":"a\\u0041\\n\\"\\\\","b":"{<|"', '{"url":"aA\\n\\"\\\\","b":"{<|"}'),
        ('a:<|"|><|"|>', '{"a":""}'),
        ('a:{<|"|><|"|>:1}', '{"a":{"":1}}'),
    ],
)
def test_arguments(written: str, arguments: str) -> None:
    assert arguments_of(written) == arguments
    json.loads(arguments)


def test_keys_and_texts_are_kept_as_written() -> None:
    assert json.loads(arguments_of("Basic LLM Chain:1,a-b.c/d@é:2,-n:3,it's:4")) == {
        "Basic LLM Chain": 1,
        "a-b.c/d@é": 2,
        "-n": 3,
        "it's": 4,
    }
    text = ' \\n \n\t" <|" <| < |> <tool_call|> <|tool_call>call:f{} '
    assert json.loads(arguments_of(f'a:<|"|>{text}<|"|>')) == {"a": text}


@pytest.mark.parametrize(
    "written",
    [
        "a",
        "a:",
        ":1",
        "a:,b:1",
        "a:1,",
        ",a:1",
        "a:1,,b:2",
        "a:1 b:2",
        'a:<|"|>x<|"|>b:1',
        'a:x<|"|>y<|"|>',
        'a:<|"|>x<|"|>y',
        'a:<|"|>x<|"|><|"|>y<|"|>',
        "a:word",
        "a:'x'",
        "a:True",
        "a:NaN",
        "a:-Infinity",
        "a:01",
        "a:1.",
        "a:.5",
        "a:+1",
        "a:1e",
        "a:1:2",
        "a:[1",
        "a:[1}",
        "a:{b:1]",
        "a:[1,]",
        "a:[,1]",
        "a:[b:1]",
        "a:{1}",
        "a:[1 2]",
        "a=1",
        "a]:1",
        "a<b:1",
        'a"b:1',
        '"a"b:1',
        "a:1}",
        "{a:1}",
        "a:1]",
        "a:1,a:2",
        'a:1,<|"|>a<|"|>:2',
        "a:{b:1,b:2}",
        '<|"|><|"|>:1',
        '"a',
        '"a":"\\x41"',
        '"a":"\\ud800"',
        '"a":"line\nbreak"',
        'a:<|"x"|>',
        "a:" + "[" * MAX_NESTING + "]" * MAX_NESTING,
        "a:" + "{a:" * MAX_NESTING + "1" + "}" * MAX_NESTING,
    ],
)
def test_arguments_that_break_the_syntax(written: str) -> None:
    found = read(call(written))
    assert found.error is not None
    assert [part for part in found.parts if part[0] != "call"] == []  # no mark of a call is shown
    assert ("not valid JSON" in found.error) == ('":"' in written)  # but for JSON's own strings
    assert read("So: " + call(written)).parts[0] == ("text", "So: ")


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>note{}<tool_call|>",
        "<|tool_call>response:note{}<tool_call|>",
        "<|tool_call>call note{}<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call: \t{}<tool_call|>",
        "<|tool_call>call:note<tool_call|>",
        "<|tool_call>call:note\n{}<tool_call|>",
        "<|tool_call>call:note(a=1)<tool_call|>",
        "<|tool_call><tool_call|>",
        "<|tool_call> is what starts a call.",
        "<|tool_call><|tool_call>call:note{}<tool_call|>",
    ],
)
def test_envelopes_that_are_no_call(text: str) -> None:
    found = read(text)
    assert found.error is not None and found.parts == []


def test_text_right_behind_a_call_is_refused() -> None:
    for behind in ("}<tool_call|>", "Done.", "<tool_call>", "call;", ","):
        found = read(f"<|tool_call>call:note{{}}{behind}")
        assert found.error is not None and found.parts == [("call", "note", "{}")]


def test_a_name_may_hold_what_names_hold() -> None:
    for name in ("get-weather", "google:mcp:create.pdf", "a b", "ä", "n" * 128):
        assert read(call(name=name)).parts == [("call", name, "{}")]


def test_the_bounds_of_a_call() -> None:
    nested = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert arguments_of(f"a:{nested}") == f'{{"a":{nested}}}'
    options: dict[str, Any] = {"syntax": SYNTAX, "tools": TOOLS}
    most = "ü" * ((MAX_ARGUMENTS_BYTES - 8) // 2)
    (made,) = feed(call(f'a:<|"|>{most}<|"|>'), **options).calls
    assert len(made.arguments.encode()) == MAX_ARGUMENTS_BYTES
    found = feed(call(f'a:<|"|>{most}x<|"|>'), **options)
    assert found.error is not None and str(MAX_ARGUMENTS_BYTES) in found.error
    for head, unit in (('call:note{a:<|"|>', "x"), ("call:note{a", "x"), ("call:n", "x"), ("call:note{a:", " ")):
        piece = unit * (1 << 20)
        found = feed([f"<|tool_call>{head}", *[piece] * 16], natural=False, **options)
        assert found.error is not None and str(MAX_CALL_BYTES) in found.error
        assert feed([f"<|tool_call>{head}", *[piece] * 15], natural=False, **options).error is None


KEYS = st.text(st.characters(exclude_characters='{}[],:"<', exclude_categories=["Cs"]), min_size=1).filter(
    lambda key: key == key.strip(" \t\n\r")
)
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from(['<|"', "|>", "<", '"', "}", "{", ",", ":", "\\", "null"])).map("".join)
)
TEXTS = TEXTS.filter(lambda text: '<|"|>' not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3)
NAMES = st.text(st.characters(categories=["L", "N"], include_characters="_-.:"), min_size=1, max_size=20)
PROSE = st.text(min_size=1).filter(lambda text: text == text.strip() and "<" not in text)


def written(value: Any, space: str = "") -> str:
    """A value as the chat template writes it; `space` stands around what structures it."""
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{space}{key}:{space}{written(item, space)}" for key, item in value.items()) + space + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(space + written(item, space) for item in value) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


PARTS = st.lists(
    st.one_of(
        PROSE.map(lambda text: ("text", text)),
        PROSE.map(lambda text: ("reasoning", text)),
        st.tuples(st.just("call"), NAMES, OBJECTS),
    ),
    max_size=6,
).filter(lambda parts: not any(a[0] == b[0] != "call" for a, b in zip(parts, parts[1:], strict=False)))


@settings(max_examples=150)
@given(PARTS, st.sampled_from(["", " ", "\n  "]))
def test_any_answer_comes_back_the_same(parts: list[Any], space: str) -> None:
    stream: list[str | Pushed] = []
    for kind, *content in parts:
        if kind == "reasoning":
            stream += [f"<|channel>thought\n{content[0]}", (CLOSE, "<channel|>")]
        elif kind == "call":
            stream.append(f"<|tool_call>call:{content[0]}{written(content[1], space)}<tool_call|>")
        else:
            stream.append(content[0])
    found = same_for_all_cuts(stream, syntax=SYNTAX, tools=TOOLS)
    assert found.error is None
    assert [part if part[0] != "call" else (*part[:2], json.loads(part[2])) for part in found.parts] == parts
    for made, (_, _, arguments) in zip(found.calls, [part for part in parts if part[0] == "call"], strict=True):
        assert list(json.loads(made.arguments)) == list(arguments)


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [*SPECIAL, "call:", "note", "{", "}", "[", "]", ",", ":", "a", "1", "null", " ", "\n", '"', "\\", "<|", "x"]
        ),
        max_size=16,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same(fragments: list[str], begun: bool, natural: bool) -> None:
    text = ("<|tool_call>call:note{a:" if begun else "") + "".join(fragments)
    read(text, natural=natural)


HOSTILE = [
    ("call:note{", "a:1,"),
    ("call:note{a:[", "1,"),
    ("call:note{a:[", "{},"),
    ('call:note{a:<|"|>', '<|"'),
    ('call:note{a:<|"|>', "<tool_call|>"),
    ('call:note{a:[<|"|>', '<|"|>,<|"|>'),
    ('call:note{"', "\\\\"),
    ("call:note{a:", "1"),
    ("call:note{a", " "),
    ("call:n", "o"),
    ("call:note{", " "),
    ("", " "),
    ("", "call:f{}"),
    ("call:f{}", "<|tool_call>call:f{}"),
    ("call:f{}", " "),
]


@pytest.mark.parametrize(("head", "unit"), HOSTILE)
def test_hostile_calls_take_linear_work(head: str, unit: str) -> None:
    sizes = [20_000, 40_000, 80_000]
    once, twice, four = (work(Gemma4Reader(), head + unit * (size // len(unit))) for size in sizes)
    assert once <= 4 * sizes[0] + 1000  # not much more than to look at each character once
    assert twice <= 2.2 * once + 1000 and four <= 2.2 * twice + 1000
    small = [
        calls_made(
            [(OTHER, char) for char in f"<|tool_call>{head}{unit * n}"], syntax=SYNTAX, tools=TOOLS, natural=False
        )
        for n in (200, 400, 800)
    ]
    assert small[1] <= 2.2 * small[0] + 1000 and small[2] <= 2.2 * small[1] + 1000
