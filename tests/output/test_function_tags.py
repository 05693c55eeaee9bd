"""Calls written with `<function=...>` and `<parameter=...>` tags: "qwen" with line breaks, "mimo" without."""

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

QWEN = OutputSyntax(tools="qwen", reasoning=TAGS)
MIMO = OutputSyntax(tools="mimo", reasoning=TAGS)
QWEN_TOKENS = OutputSyntax(tools="qwen", reasoning=TAGS, open_token=OPEN, close_token=CLOSE)


def tool(name: str, **properties: Any) -> Tool:
    return Tool(name, parameters={"type": "object", "properties": properties})


TEXT = {"type": "string"}
TOOLS = Tools((tool("read", p=TEXT, q=TEXT, n={"type": "integer"}), tool("write", p=TEXT), tool("clock")))


def call(name: str = "read", **values: str) -> str:
    """A call as Qwen's template writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def compact(name: str = "read", **values: str) -> str:
    """A call as MiMo's template writes it."""
    written = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    return f"<tool_call><function={name}>{written}</function></tool_call>"


def read(text: str, **options: Any) -> Fed:
    return same_for_all_splits(text, **{"syntax": QWEN, "tools": TOOLS, **options})


A = ("call", "read", '{"p":"/a"}')
NOON = ("call", "clock", "{}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (call(p="/a"), [A]),
        (f"\n{call(p='/a')}\n", [A]),
        (call("clock"), [NOON]),
        ("<tool_call><function=clock></function></tool_call>", [NOON]),
        (f"{call(p='/a')}\n{call('clock')}\n", [A, NOON]),
        (f"I look.\n{call(p='/a')}\nDone.", [("text", "I look.\n"), A, ("text", "\nDone.")]),
        (f"Inline {call('clock')} as well", [("text", "Inline "), NOON, ("text", " as well")]),
        (f"<think>Hm.\n</think>\n\n{call(p='/a')}", [("reasoning", "Hm."), A]),
        (f"<think>Hm. {call(p='/a')}", [("reasoning", "Hm. "), A]),
        (call(n="7", p="7", x="7"), [("call", "read", '{"n":7,"p":"7","x":"7"}')]),
        # Tags that are missing.
        ("<function=clock>\n</function>", [NOON]),
        ("<function=clock>\n</function>\n</tool_call>\n", [NOON]),
        ("<tool_call>\n<function=clock>\n</function>\nSo.", [NOON, ("text", "\nSo.")]),
        ("<tool_call>\n<function=clock>\n</function>\n" + call(p="/a"), [NOON, A]),
        ("<function=clock>\n</function>\n<function=read>\n<parameter=p>\n/a\n</parameter>\n</function>", [NOON, A]),
        ("<tool_call>\n<function=read>\n<parameter=p>\n/a\n</function>\n</tool_call>", [A]),
        ("<tool_call><function=read><parameter=p>/a</function>", [A]),
        (
            "<function=read><parameter=p>\n/a\n<parameter=q>\n\n/b\n<parameter=n>7</parameter></function>",
            [("call", "read", '{"p":"/a","q":"\\n/b","n":7}')],
        ),
        # What only looks like a tag is a value's text.
        (
            call(p="a <parameter=\nx> <parameter=<b> <parameter=> </param> <function=f> </functions> <tool_call> <"),
            [
                (
                    "call",
                    "read",
                    '{"p":"a <parameter=\\nx> <parameter=<b> <parameter=> </param> <function=f> </functions> <tool_call> <"}',
                )
            ],
        ),
        (call(p="</think><think>"), [("call", "read", '{"p":"</think><think>"}')]),
        (call("clock") + "</tool_call>", [NOON, ("text", "</tool_call>")]),
    ],
)
def test_calls(text: str, parts: list[Any]) -> None:
    found = read(text)
    assert found.error is None and found.parts == parts


@pytest.mark.parametrize(
    "mention",
    [
        "Write `<tool_call>` first; the header looks like <function=NAME> and ends with a close tag. Done.",
        "<tool_call> is a tag",
        "<tool_call></tool_call>",
        "<tool_call>\n\n<tool_call>",
        "<tool_call>\n<function=f>\nand then",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f\n>\n</function>",
        "<function=f> <parameter",
        "<function=f> <parameter=a",
        "<function=f><parameter=a\n>",
        "<function=<f>></function>",
        "<function=" + "f" * (MAX_NAME_WRITTEN + 1) + "></function>",
        "<function=f><parameter=" + "a" * (MAX_NAME_WRITTEN + 1) + ">",
        "</function> </parameter> <parameter=a>",
        '<tool_call>{"name": "read"}',
    ],
)
def test_mentions_are_text(mention: str) -> None:
    text = mention + " \nEnd."
    assert read(text).parts == [("text", text)]
    assert read(text, opens=True).parts == [("reasoning", text)]
    found = read(text + call(p="/a"))
    assert found.parts == [("text", text), A] and found.error is None


def test_a_function_without_its_outer_tag_is_a_call_in_the_answer_only() -> None:
    bare = "<function=clock></function>"
    assert read(f"<think>As in {bare}</think>{bare}").parts == [("reasoning", f"As in {bare}"), NOON]
    assert read(f"<think>So <tool_call>{bare}{bare}").parts == [("reasoning", "So "), NOON, NOON]


@pytest.mark.parametrize("limit", [1, 2, MAX_NAME_WRITTEN])
def test_names_up_to_the_limit(limit: int) -> None:
    key = "k" * limit
    assert read(call("clock", **{key: "1"})).parts == [("call", "clock", f'{{"{key}":"1"}}')]
    assert read(call("clock", p=f"<parameter={key}>")).calls[0].arguments == f'{{"p":"","{key}":""}}'


def test_an_answer_that_ends_within_a_second_function() -> None:
    begun = "<tool_call>\n<function=clock>\n</function>\n<function="
    for text in (begun[:-7], begun, *(begun + rest for rest in ("read", "read>", "read>\n<parameter=p>"))):
        limited = read(text, natural=False)
        assert limited.parts == [NOON] and limited.error is None
        assert read(text).error is not None
    for rest in ("", "\n", "\n<", "\n</tool_"):
        found = read("<tool_call><function=clock></function>" + rest)
        assert found.parts == [NOON] and found.error is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>\n<function=>\n</function>", "without a name"),
        ("<tool_call>\n<function= >\n<parameter=a>", "without a name"),
        ("<function=f>\n<parameter=>\n1\n</parameter>\n</function>", "argument without a name"),
        (call(p="/a").replace("</function>", "<parameter=p>\n/b\n</parameter>\n</function>"), "'p' twice"),
        ("<function=f><parameter=p>1<parameter=p>2</function>", "'p' twice"),
        (call(p="/a").replace("</function>", "Well.</function>"), "text between"),
        (call(p="/a").replace("</function>", "</tool_call>"), "text between"),
        (call(p="/a").replace("</function>", "</parameter></function>"), "text between"),
        (call(p="/a").replace("</function>", "<parameter=a<b>\n</function>"), "not closed"),
    ],
)
def test_malformed_calls(text: str, says: str) -> None:
    found = read("So: " + text)
    assert found.parts == [("text", "So: ")] and says in str(found.error)


@pytest.mark.parametrize(
    ("value", "qwen", "mimo"),
    [
        ("\n    if ok:\n        go()\n\n", "    if ok:\n        go()\n", None),
        ("\n", "", None),
        ("\n\n", "", None),
        ("\n\n\n", "\n", None),
        ("", "", None),
        ("a", "a", None),
        (" a\n", " a", None),
        ("\r\na\r\n", "\r\na\r", None),
        ("\n\ta \n", "\ta ", None),
    ],
)
def test_white_space_of_values(value: str, qwen: str, mimo: str | None) -> None:
    text = f"<tool_call><function=write><parameter=p>{value}</parameter></function></tool_call>"
    assert json.loads(read(text).calls[0].arguments) == {"p": qwen}
    assert json.loads(read(text, syntax=MIMO).calls[0].arguments) == {"p": value}
    open_ended = text.replace("</parameter>", "")
    assert json.loads(read(open_ended, syntax=MIMO).calls[0].arguments) == {"p": value}


def test_mimo_writes_the_same_tags_compactly() -> None:
    text = f"Ok.{compact(p='/a', n='7')}{compact('clock')}"
    assert read(text, syntax=MIMO).parts == [("text", "Ok."), ("call", "read", '{"p":"/a","n":7}'), NOON]


def test_what_the_request_allows() -> None:
    one = Tools(TOOLS.offered, parallel=False)
    two = "<tool_call><function=clock></function><function=clock></function></tool_call>"
    found = read(two, tools=one)
    assert found.parts == [NOON] and "second" in str(found.error)
    assert read(call("clock") + "<function=NAME> is how", tools=one).error is None
    named = Tools(TOOLS.offered, "named", "read")
    assert read("Sure! " + call(p="/a") + " Done.", tools=named).parts == [A]
    assert "selected" in str(read(call("clock"), tools=named).error)
    assert read("<function=clock></function>", tools=Tools()).parts == [("text", "<function=clock></function>")]


# Faults of other servers.


def schema(name: str, **properties: Any) -> Tools:
    return Tools((tool(name, **properties),))


def arguments(text: str, tools: Tools) -> Any:
    found = read(text, tools=tools)
    assert found.error is None and len(found.parts) == 1
    return json.loads(found.calls[0].arguments)


def test_a_parameter_that_the_function_closes() -> None:
    text = (
        "<tool_call>\n<function=set_fan>\n<parameter=room>\nattic\n<parameter=opts>\n"
        '{"mode": "eco", "level": 3, "on": true}\n</function>\n</tool_call>'
    )
    expected = {"room": "attic", "opts": {"mode": "eco", "level": 3, "on": True}}
    assert arguments(text, schema("set_fan", opts={"type": "object"}, room=TEXT)) == expected


def test_a_call_before_the_reasoning_is_closed() -> None:
    rest = "<tool_call>\n<function=lookup>\n<parameter=q>\nrain oslo\n</parameter>\n</function>\n</tool_call>"
    found = read("Need the forecast.\n" + rest, tools=schema("lookup", q=TEXT), opens=True)
    assert found.parts == [("reasoning", "Need the forecast."), ("call", "lookup", '{"q":"rain oslo"}')]


def test_values_that_are_converted_by_their_schema() -> None:
    values = {"count": "7", "limit": "null", "label": "none", "code": "1", "ratio": "2.5", "flag": "true"}
    tools = schema(
        "grade",
        count={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        limit={"type": ["integer", "null"]},
        label={"type": "string", "enum": ["none", "nil", "yes"]},
        code={"type": "string", "enum": ["1", "2"]},
        ratio={"type": "number"},
        flag={"type": "boolean"},
    )
    expected = {"count": 7, "limit": None, "label": "none", "code": "1", "ratio": 2.5, "flag": True}
    assert arguments(call("grade", **values), tools) == expected


def test_two_functions_in_one_pair_of_outer_tags() -> None:
    text = (
        "<tool_call>\n<function=read>\n<parameter=p>\n/a\n</parameter>\n</function>\n"
        "<function=write>\n<parameter=p>\n/b\n</parameter>\n</function>\n</tool_call>"
    )
    found = read(text)
    assert found.parts == [A, ("call", "write", '{"p":"/b"}')]
    assert len({one.id for one in found.calls}) == 2


def test_quotes_backslashes_and_other_characters() -> None:
    value = 'C:\\tmp\t"x"\nü 🙂 \u2028 </b>'
    assert arguments(call("w", **{'a"b': value}), schema("w", **{'a"b': TEXT})) == {'a"b': value}


def test_a_closing_tag_spelled_as_text() -> None:
    pieces = ["Its close is ", "</", "think", ">", " as text", (CLOSE, TAGS[1]), "Use ", "</", "think", ">", " once."]
    found = feed(pieces, syntax=QWEN_TOKENS, tools=Tools(), opens=True)
    assert found.parts == [("reasoning", "Its close is </think> as text"), ("text", "Use </think> once.")]
    assert feed(pieces, syntax=QWEN_TOKENS, tools=TOOLS, opens=True).parts == found.parts


def test_a_delimiter_token_within_a_call_and_before_one() -> None:
    pieces = [*call(p="</think>").partition("</think>")]
    tokens = [(CLOSE, piece) if piece == TAGS[1] else (OTHER, piece) for piece in pieces]
    assert feed(tokens, syntax=QWEN_TOKENS, tools=TOOLS).parts == [("call", "read", '{"p":"</think>"}')]
    tokens = [(OTHER, "<tool_call>\n<function=read>"), (CLOSE, TAGS[1]), (OTHER, "b")]
    found = feed(tokens, syntax=QWEN_TOKENS, tools=TOOLS, opens=True)
    assert found.parts == [("reasoning", "<tool_call>\n<function=read>"), ("text", "b")]


# Any text.

FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=read>",
    "</function>",
    "<parameter=",
    "<parameter=p>",
    "<parameter=n>",
    "</parameter>",
    "<think>",
    "</think>",
    "read",
    ">",
    "<",
    "\n",
    " ",
    "7",
    call(p="/a"),
    compact(n="7"),
]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([QWEN, MIMO]),
    st.sampled_from([TOOLS, Tools(TOOLS.offered, parallel=False)]),
    st.booleans(),
    st.booleans(),
)
def test_any_split_gives_the_same(
    fragments: list[str], sizes: list[int], syntax: OutputSyntax, tools: Tools, opens: bool, natural: bool
) -> None:
    text = "".join(fragments)
    options = {"syntax": syntax, "tools": tools, "opens": opens, "natural": natural}
    whole = same_for_all_splits(text, **options)
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    split = feed(pieces, **options)
    assert (split.parts, split.error) == (whole.parts, whole.error)
    if whole.error is None and "<function=" not in text:
        assert not whole.calls


PROSE = st.text(alphabet='ab <>/=_\n"é🙂', min_size=1, max_size=8).map(lambda text: f".{text}.")
KEYS = st.text(alphabet='ab_-"é .', min_size=1, max_size=5).filter(str.strip)
STRINGS = st.text(alphabet='ab \n"\\{}é🙂<>/=', max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
).filter(lambda value: "<" not in json.dumps(value))
CALLS = st.tuples(st.sampled_from(["f", "g.h", "n__k"]), st.dictionaries(KEYS, STRINGS | JSON, max_size=3))
KINDS = {type(None): "null", bool: "boolean", int: "integer", list: "array", dict: "object", str: "string"}


def offered(calls: list[Any]) -> Tools:
    """Declares what one list of calls needs: a tool for each of them, every argument with its own type."""
    tools = []
    for i, (name, values) in enumerate(calls):
        properties = {key: {"type": KINDS[type(value)]} for key, value in values.items()}
        tools.append(tool(f"{name}{i}", **properties))
    return Tools((*tools, tool("other")))


@settings(max_examples=300)
@given(st.text(alphabet="ab \n<é", max_size=9), st.lists(st.tuples(PROSE, CALLS), max_size=4), st.booleans(), st.data())
def test_what_was_written_comes_back(thought: str, said: list[Any], verbatim: bool, data: Any) -> None:
    """Reasoning, prose and calls, generated in the syntax and cut at random."""
    thought = thought.strip("\n")
    expected: list[Any] = [("reasoning", thought)] if thought else []
    text = f"<think>{thought}</think>"
    for i, (prose, (name, values)) in enumerate(said):
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        text += prose + (compact if verbatim else call)(f"{name}{i}", **shown)
        expected += [("text", prose), ("call", f"{name}{i}", values)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tools = offered([one for _, one in said])
    found = feed(pieces, syntax=MIMO if verbatim else QWEN, tools=tools)
    assert found.error is None
    got = [(*part[:2], json.loads(part[2])) if part[0] == "call" else part for part in found.parts]
    assert got == expected
    for part, wanted in zip(got, expected, strict=True):
        if part[0] == "call":
            assert list(part[2]) == list(wanted[2])
