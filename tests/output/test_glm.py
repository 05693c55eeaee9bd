"""Calls written as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import Tool, Tools
from flare.output import OutputSyntax
from flare.output.scanning import MAX_NAME_WRITTEN
from tests.output.feeding import CLOSE, OPEN, OTHER, TAGS, Fed, feed, same_for_all_splits

GLM = OutputSyntax(tools="glm", reasoning=TAGS)
GLM_TOKENS = OutputSyntax(tools="glm", reasoning=TAGS, open_token=OPEN, close_token=CLOSE)


def tool(name: str, **properties: Any) -> Tool:
    return Tool(name, parameters={"type": "object", "properties": properties})


TEXT = {"type": "string"}
TOOLS = Tools((tool("read", p=TEXT, q=TEXT, n={"type": "integer"}), tool("clock"), tool("two words")))


def call(name: str = "read", **values: str) -> str:
    written = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{''.join(written)}</tool_call>"


def read(text: str, **options: Any) -> Fed:
    return same_for_all_splits(text, **{"syntax": GLM, "tools": TOOLS, **options})


A = ("call", "read", '{"p":"/a"}')
NOON = ("call", "clock", "{}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (call(p="/a"), [A]),
        (call("clock"), [NOON]),
        (f"\n{call(p='/a')}{call('clock')}\n", [A, NOON]),
        (f"I look. {call(p='/a')} Done.", [("text", "I look. "), A, ("text", " Done.")]),
        (f"<think>Hm.\n</think>\n{call('clock')}", [("reasoning", "Hm."), NOON]),
        (f"<think>Hm.{call('clock')}", [("reasoning", "Hm."), NOON]),
        (call(n="7", p="7", x="7"), [("call", "read", '{"n":7,"p":"7","x":"7"}')]),
        (call(p="\n  a \n"), [("call", "read", '{"p":"\\n  a \\n"}')]),
        (call(p=""), [("call", "read", '{"p":""}')]),
        (call("two words"), [("call", "two words", "{}")]),
        (call("a.b-c_d:e/1"), [("call", "a.b-c_d:e/1", "{}")]),
        # Line breaks between the tags, as earlier models write them.
        (
            "<tool_call>read\n<arg_key>p</arg_key>\n<arg_value>/a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7\n"
            "</arg_value>\n</tool_call>",
            [("call", "read", '{"p":"/a","n":7}')],
        ),
        ("<tool_call>\nclock\n</tool_call>", [NOON]),
        # Values whose closing tag is missing.
        ("<tool_call>read<arg_key>p</arg_key><arg_value>/a</tool_call>" + call("clock"), [A, NOON]),
        (
            "<tool_call>read<arg_key>p</arg_key><arg_value>/a<arg_key>n</arg_key>\n<arg_value>7</tool_call>",
            [("call", "read", '{"p":"/a","n":7}')],
        ),
        # What only looks like tags is a value's text.
        (
            call(p="</think><think> <tool_call> </arg_key> <arg_value> </arg_val> <arg_key> <arg_key>k<b> <"),
            [
                (
                    "call",
                    "read",
                    '{"p":"</think><think> <tool_call> </arg_key> <arg_value> </arg_val> <arg_key> <arg_key>k<b> <"}',
                )
            ],
        ),
        (call(p="<arg_key>k</arg_key> x"), [("call", "read", '{"p":"<arg_key>k</arg_key> x"}')]),
        (call(p="<arg_key>k"), [("call", "read", '{"p":"<arg_key>k"}')]),
        (call(p="<arg_key>k</arg_key>"), [("call", "read", '{"p":"<arg_key>k</arg_key>"}')]),
        (call(p="<arg_key>" + "k" * 2000), [("call", "read", '{"p":"<arg_key>' + "k" * 2000 + '"}')]),
        (call("clock") + "</tool_call>", [NOON, ("text", "</tool_call>")]),
    ],
)
def test_calls(text: str, parts: list[Any]) -> None:
    found = read(text)
    assert found.error is None and found.parts == parts


@pytest.mark.parametrize(
    "mention",
    [
        "Write `<tool_call>` first, then </tool_call>. Done.",
        "<tool_call></tool_call> are the tags",
        "<tool_call>...</tool_call>",
        "`<tool_call>`/`</tool_call>`",
        "<tool_call> is a tag and </tool_call> too",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>...</tool_call>",
        '<tool_call>{"name": "read"}</tool_call>',
        "<tool_call>two wolves</tool_call>",
        "<tool_call>\n\n<tool_call>",
        "<tool_call>read<b></tool_call>",
        "<tool_call>read</arg_key>",
        "<tool_call>" + "f" * (MAX_NAME_WRITTEN + 1) + "</tool_call>",
        "</tool_call> <arg_key>a</arg_key><arg_value>b</arg_value>",
    ],
)
def test_mentions_are_text(mention: str) -> None:
    text = mention + " \nThe end."
    assert read(text).parts == [("text", text)]
    assert read(text, opens=True).parts == [("reasoning", text)]
    found = read(text + call(p="/a"))
    assert found.parts == [("text", text), A] and found.error is None


def test_a_mention_is_shown_as_soon_as_it_is_one() -> None:
    assert feed("<tool_call>is a", syntax=GLM, tools=TOOLS).parts == [("text", "<tool_call>is a")]
    assert feed("Use <tool_call>.", syntax=GLM, tools=TOOLS).parts == [("text", "Use <tool_call>.")]
    for undecided in ("<tool_call>", "<tool_call>\n", "<tool_call>two wor", "<tool_call>name \n", "<tool_call>name</"):
        assert read(undecided).error is not None and read(undecided, natural=False) == ([], 0, None, [], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "without a name"),
        (call(**{"": "1"}), "argument without a name"),
        (call(**{" ": "1"}), "argument without a name"),
        (call(p="1", n="1").replace("<arg_key>n", "<arg_key>p"), "'p' twice"),
        (call(p="1", n="1").replace("<arg_key>n", "Then <arg_key>n"), "text between"),
        (call(p="1").replace("</tool_call>", "</arg_value></tool_call>"), "text between"),
        (call(p="1").replace("</arg_key>", "</arg_key>:"), "not a name and a value"),
        (call(p="1").replace("</arg_key>", ""), "not a name and a value"),
        (call(p="1").replace("<arg_value>", ""), "not a name and a value"),
        (call(**{"k" * (MAX_NAME_WRITTEN + 1): "1"}), "not a name and a value"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    found = read("So: " + text)
    assert found.parts == [("text", "So: ")] and says in str(found.error)


def test_a_delimiter_token_before_and_within_a_call() -> None:
    tokens = [(OTHER, "a<tool_call>read"), (CLOSE, TAGS[1]), (OTHER, "b")]
    found = feed(tokens, syntax=GLM_TOKENS, tools=TOOLS, opens=True)
    assert found.parts == [("reasoning", "a<tool_call>read"), ("text", "b")]
    before, after = call(p="X").split("X")
    found = feed([(OTHER, before), (CLOSE, TAGS[1]), (OTHER, after)], syntax=GLM_TOKENS, tools=TOOLS, opens=True)
    assert found.parts == [("call", "read", '{"p":"</think>"}')]


# Faults of other servers.


def test_arguments_of_every_type() -> None:
    properties = {"q": "string", "limit": "integer", "skip": "array", "safe": "boolean"}
    tools = Tools((tool("find", **{name: {"type": kind} for name, kind in properties.items()}),))
    found = read(call("find", q="10", limit="10", skip='["a"]', safe="false"), tools=tools)
    assert found.parts == [("call", "find", '{"q":"10","limit":10,"skip":["a"],"safe":false}')]


# Any text.

FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<arg_key>p</arg_key>",
    "<arg_value>7</arg_value>",
    "<think>",
    "</think>",
    "read",
    "<",
    "\n",
    " ",
    "7",
    call(p="/a"),
    call("clock"),
]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([TOOLS, Tools(TOOLS.offered, parallel=False)]),
    st.booleans(),
    st.booleans(),
)
def test_any_split_gives_the_same(
    fragments: list[str], sizes: list[int], tools: Tools, opens: bool, natural: bool
) -> None:
    text = "".join(fragments)
    options = {"syntax": GLM, "tools": tools, "opens": opens, "natural": natural}
    whole = same_for_all_splits(text, **options)
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    split = feed(pieces, **options)
    assert (split.parts, split.error) == (whole.parts, whole.error)


PROSE = st.text(alphabet='ab <>/=_\n"é🙂', min_size=1, max_size=8).map(lambda text: f".{text}.")
KEYS = st.text(alphabet='ab_-"é .>', min_size=1, max_size=5).map(lambda key: key.strip() or "k")
STRINGS = st.text(alphabet='ab \n"\\{}é🙂<>/=', max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(st.sampled_from(["f", "g.h", "a b"]), st.dictionaries(KEYS, STRINGS | JSON, max_size=3))
KINDS = {type(None): "null", bool: "boolean", int: "integer", list: "array", dict: "object", str: "string"}


@settings(max_examples=300)
@given(st.text(alphabet="ab \n<é", max_size=9), st.lists(st.tuples(PROSE, CALLS), max_size=4), st.data())
def test_what_was_written_comes_back(thought: str, said: list[Any], data: Any) -> None:
    """Reasoning, prose and calls, generated in the syntax and cut at random."""
    thought = thought.strip("\n")
    expected: list[Any] = [("reasoning", thought)] if thought else []
    text = f"<think>{thought}</think>"
    tools = [tool("other")]
    for i, (prose, (name, values)) in enumerate(said):
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        text += prose + call(f"{name}{i}", **shown)
        expected += [("text", prose), ("call", f"{name}{i}", list(values.items()))]
        tools.append(tool(f"{name}{i}", **{key: {"type": KINDS[type(value)]} for key, value in values.items()}))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = feed(pieces, syntax=GLM, tools=Tools(tuple(tools)))
    assert found.error is None
    got = [(*part[:2], list(json.loads(part[2]).items())) if part[0] == "call" else part for part in found.parts]
    assert got == expected
