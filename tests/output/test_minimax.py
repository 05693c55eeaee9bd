"""MiniMax's reasoning and calls: elements whose tags stand behind the namespace text, here written as a colon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tool, Tools
from flare.output import OutputError, OutputSyntax
from flare.output.minimax import PREFIX, MiniMaxReader
from flare.output.scanning import MAX_CALL_BYTES
from tests.output.cutting import calls_made, same_for_all_cuts, tokens, work
from tests.output.feeding import CLOSE, OPEN, OTHER, Fed, Pushed, feed

THINK = ("<mm:think>", "</mm:think>")
SYNTAX = OutputSyntax(tools="minimax", reasoning=THINK, open_token=OPEN, close_token=CLOSE)
DELIMITERS = {THINK[0]: OPEN, THINK[1]: CLOSE}
SPECIAL = DELIMITERS | {PREFIX: 15}

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = Tools(
    (
        Tool("pick", parameters={"type": "object", "properties": {"id": NUMBER}}),
        Tool("ping", parameters={"type": "object", "properties": {}}),
        Tool("bare"),
        Tool(
            "plan",
            parameters={
                "type": "object",
                "$defs": {"step": {"type": "object", "properties": {"n": NUMBER, "next": {"$ref": "#/$defs/step"}}}},
                "properties": {
                    "step": {"$ref": "#/$defs/step"},
                    "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
                    "ids": {"anyOf": [{"type": "null"}, {"type": "array", "items": NUMBER}]},
                    "pair": {"type": "array", "prefixItems": [TEXT, NUMBER]},
                    "by_name": {"type": "object", "additionalProperties": NUMBER},
                    "box": {"type": "object", "properties": {"item": NUMBER}},
                    "text": TEXT,
                    "list": {"type": "array"},
                },
            },
        ),
    )
)


def spelled(text: str) -> str:
    return text.replace(":<", f"{PREFIX}<")


def invoke(inner: str, name: str) -> str:
    return f'{PREFIX}<invoke name="{name}">{inner}{PREFIX}</invoke>'


def call(arguments: str = "", name: str = "plan") -> str:
    return invoke(spelled(arguments), name)


def block(*calls: str) -> str:
    return f"{PREFIX}<tool_call>\n" + "".join(f"{made}\n" for made in calls) + f"{PREFIX}</tool_call>"


def read(text: str, **options: Any) -> Fed:
    """What comes of a text where special tokens are tokens, and, but for the delimiters, of the same as text."""
    options = {"syntax": SYNTAX, "tools": TOOLS} | options
    found = same_for_all_cuts(tokens(text, SPECIAL), **options)
    again = same_for_all_cuts(tokens(text, DELIMITERS), **options)
    assert (again.parts, again.error) == (found.parts, found.error)
    return found


def arguments_of(written: str, name: str = "plan") -> Any:
    found = read(block(call(written, name)))
    assert found.error is None, found.error
    ((_, _, arguments),) = found.parts
    return json.loads(arguments)


PINGS = [("call", "ping", "{}"), ("call", "ping", "{}")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "Ok. " + block(call(":<id>1:</id>", "pick"), call(":<id>2:</id>", "pick"), call("", "ping")),
            [("text", "Ok. "), ("call", "pick", '{"id":1}'), ("call", "pick", '{"id":2}'), ("call", "ping", "{}")],
        ),
        ("<mm:think>Hm.</mm:think>Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        ("</mm:think>Yes.", [("text", "Yes.")]),  # turns without thinking are stored with a lone closing delimiter
        ("</mm:think></mm:think>" + block(call("", "ping")), PINGS[:1]),
        ("<mm:think></mm:think>\n\nYes.", [("text", "Yes.")]),
        ("<mm:think>Hm." + block(call("", "ping")), [("reasoning", "Hm."), *PINGS[:1]]),
        ("<mm:think>Hm.</mm:think>\n" + block(call("", "ping")), [("reasoning", "Hm."), *PINGS[:1]]),
        (block(call("", "ping")) + "Done.", [*PINGS[:1], ("text", "Done.")]),
        (block(call("", "ping")) + block(call("", "ping")), PINGS),
        # Without the closing tag.
        (f"{PREFIX}<tool_call>" + call("", "ping"), PINGS[:1]),
        (f"{PREFIX}<tool_call>" + call("", "ping") + f"{PREFIX}</tool", PINGS[:1]),
        (f"{PREFIX}<tool_call>" + call("", "ping") + block(call("", "ping")), PINGS),
        # Delimiters are data within a call.
        (
            block(call(":<text>a<mm:think>b</mm:think>:</text>")),
            [("call", "plan", '{"text":"a<mm:think>b</mm:think>"}')],
        ),
        (
            f"{PREFIX} and <tool_call> and {PREFIX}<tool",
            [("text", f"{PREFIX} and <tool_call> and {PREFIX}<tool")],
        ),
    ],
)
def test_parts_of_an_answer(text: str, parts: list[Any]) -> None:
    found = read(text)
    assert (found.parts, found.error) == (parts, None)
    assert len({made.id for made in found.calls}) == len(found.calls)


def test_the_delimiters_are_tokens() -> None:
    found = same_for_all_cuts(
        ["Write <mm:think> or </mm:think>.", (CLOSE, THINK[1]), "So."], syntax=SYNTAX, tools=Tools(), opens=True
    )
    assert found.parts == [("reasoning", "Write <mm:think> or </mm:think>."), ("text", "So.")]
    assert (
        feed([(OTHER, "a"), (OTHER, "b"), (CLOSE, ""), (OTHER, "c")], syntax=SYNTAX, opens=True).reasoning_tokens == 2
    )


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("\n:<text>a:</text>\n:<by_name>\n  :<x>1:</x>\n:</by_name>\n", {"text": "a", "by_name": {"x": 1}}),
        (":<text> 1\n<b>&amp;</b> {} :</text>", {"text": " 1\n<b>&amp;</b> {} "}),
        (f":<text>{PREFIX} a {PREFIX[:5]}:</text>", {"text": f"{PREFIX} a {PREFIX[:5]}"}),
        (":<text>:</text>:<ids>:</ids>:<by_name>\n:</by_name>", {"text": "", "ids": [], "by_name": {}}),
        (":<step>:<n>1:</n>:<next>:<n>2:</n>:</next>:</step>", {"step": {"n": 1, "next": {"n": 2}}}),
        (
            ":<steps>:<item>:<n>1:</n>:</item>:<item>:<n>2:</n>:</item>:</steps>",
            {"steps": [{"n": 1}, {"n": 2}]},
        ),
        (":<steps>:<item>:<n>1:</n>:</item>:</steps>", {"steps": [{"n": 1}]}),
        (":<ids>:<item>1:</item>:<item>2:</item>:</ids>", {"ids": [1, 2]}),
        (":<pair>:<item>1:</item>:<item>2:</item>:</pair>", {"pair": ["1", 2]}),
        (":<list>[1, 2.50]:</list>", {"list": [1, 2.5]}),
        (":<box>:<item>1:</item>:</box>", {"box": {"item": 1}}),
        (":<box>:<item>a:</item>:<item>b:</item>:</box>", {"box": ["a", "b"]}),
        (":<item>a:</item>:<-A>b:</-A>:<a b>c:</a b>", {"item": "a", "-A": "b", "a b": "c"}),
        (":<list>:<item>a:</item>:<item>:<item>b:</item>:</item>:</list>", {"list": ["a", ["b"]]}),
        (":<mix>:<item>a:</item>:<k>b:</k>:</mix>", {"mix": {"item": "a", "k": "b"}}),
        (":<invoke>a:</invoke>:<tool_call>b:</tool_call>", {"invoke": "a", "tool_call": "b"}),
        # The opening tag of the first argument is missing.
        (f"{PREFIX}a.md:</text>:<step>:<n>1:</n>:</step>", {"text": "a.md", "step": {"n": 1}}),
        (f"{PREFIX}:</text>", {"text": ""}),
    ],
)
def test_arguments(written: str, arguments: Any) -> None:
    found = arguments_of(written)
    assert found == arguments and list(found) == list(arguments)
    whole = read(block(call(written, "undeclared")))
    assert whole.error is None and [made.name for made in whole.calls] == ["undeclared"]


def test_values_without_a_schema_keep_their_structure() -> None:
    for name in ("bare", "undeclared"):
        assert arguments_of(":<a>:<item>x:</item>:<item>:<k>y:</k>:</item>:</a>:<b>:</b>", name) == {
            "a": ["x", {"k": "y"}],
            "b": "",
        }


def test_a_name_may_hold_entities_and_brackets() -> None:
    for written, name in (
        ("a&amp;b", "a&b"),
        ("&lt;&#x41;&#66;&gt;&quot;&apos;", "<AB>\"'"),
        ("a&copy;&b;&ampc", "a&copy;&b;&ampc"),
        ("a>b", "a>b"),
        (">", ">"),
        ("it's", "it's"),
        ('a"b', 'a"b'),
    ):
        assert read(block(call("", written))).parts == [("call", name, "{}")]
    for tag in ("invoke  name = 'ping' ", 'invoke\nname="ping"\n'):
        assert read(block(spelled(f":<{tag}>:</invoke>"))).parts == PINGS[:1]


@pytest.mark.parametrize(
    "inner",
    [
        "",
        ":<tool_call>",
        "text" + call("", "ping"),
        '<invoke name="ping">' + "</invoke>",
        PREFIX + "text" + call("", "ping"),
        spelled(":<invoke>:</invoke>"),
        spelled(":<invoke ping>:</invoke>"),
        spelled(":<invoke name=ping>:</invoke>"),
        spelled(":<invoke id='ping'>:</invoke>"),
        spelled(":<invokes name='ping'>:</invokes>"),
        call("", ""),
        call("", " "),
        spelled(":<ping>:</ping>"),
        spelled(":</invoke>"),
        call("text"),
        call(":<text>a:</texts>"),
        call(":<text>a"),
        call(":<text>a:<step>b:</step>:</text>"),
        call(":<step>:<n>1:</n>b:</step>"),
        call(":<step>:<n>1:</n>:</n>:</step>"),
        call(":<>a:</>"),
        call(":<step>:<>a:</>:</step>"),
        call(":<text>a:</text>:<text>b:</text>"),
        call(":<step>:<n>1:</n>:<n>2:</n>:</step>"),
        call(f":<step>:<n>1:</n>{PREFIX}2:</m>:</step>"),
        call(f"{PREFIX}a:<text>b:</text>:</a>"),
        spelled(':<invoke name="ping">:<invoke name="ping">:</invoke>'),
        spelled(':<invoke name="ping">:</tool_call>'),
        call(":<a>" * MAX_NESTING + ":<a>:</a>" + ":</a>" * MAX_NESTING),
    ],
)
def test_blocks_that_break_the_syntax(inner: str) -> None:
    found = read("So: " + block(inner))
    assert found.parts == [("text", "So: ")] and found.error is not None


def test_what_stands_behind_a_call() -> None:
    for behind in ("text", f"{PREFIX}text", f"{PREFIX}</invoke>", f"{PREFIX}<a>", f"{PREFIX}</tool_calls>"):
        found = read(f"{PREFIX}<tool_call>{call('', 'ping')}{behind}")
        assert found.parts == PINGS[:1] and found.error is not None


ONE = call(":<step>:<n>1:</n>:</step>")
WHOLE = block(ONE)


def test_the_bounds_of_a_call() -> None:
    nested = ":<a>" * (MAX_NESTING - 1) + ":<a>x:</a>" + ":</a>" * (MAX_NESTING - 1)
    assert read(block(call(nested))).error is None
    options: dict[str, Any] = {"syntax": SYNTAX, "tools": TOOLS}
    most = "ü" * ((MAX_ARGUMENTS_BYTES - len('{"text":""}') - 1) // 2)
    (made,) = feed(block(call(f":<text>{most}x:</text>")), **options).calls
    assert len(made.arguments.encode()) == MAX_ARGUMENTS_BYTES
    found = feed(block(call(f":<text>{most}xx:</text>")), **options)
    assert found.error is not None and str(MAX_ARGUMENTS_BYTES) in found.error
    opener = f"{PREFIX}<tool_call>"
    begun = opener + call().removesuffix(f"{PREFIX}</invoke>")
    for text, unit in (
        (f"{begun}{PREFIX}<text>", "x"),
        (f"{begun}{PREFIX}<text", "x"),
        (begun, " "),
        (opener, " "),
        (f"{opener}{PREFIX}<invoke name='>", "x"),
    ):
        piece = unit * (1 << 20)
        found = feed([text, *[piece] * 17], natural=False, **options)
        assert found.error is not None and str(MAX_CALL_BYTES) in found.error
        assert feed([text, *[piece] * 15], natural=False, **options).error is None


KEYS = st.text(st.characters(exclude_characters=">:]<", exclude_categories=["Cs"]), min_size=1).filter(
    lambda key: key[0] != "/" and key != "item"
)
NAMES = st.text(st.characters(categories=["L", "N"], include_characters="_-.>"), min_size=1, max_size=20)
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from([PREFIX, "]", "<", "[", "]<]", "</a>", "&lt;", ">"])).map("".join)
)
TEXTS = TEXTS.filter(lambda text: f"{PREFIX}<" not in f"{text}{PREFIX}<"[:-1] and text.strip())
VALUES = st.recursive(
    TEXTS,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3)
PROSE = st.text(min_size=1).filter(lambda text: text == text.strip() and PREFIX not in text)


def schema_for(value: Any) -> dict[str, Any]:
    """A schema that says of every text that it is one."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_for(item) for key, item in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema_for(item) for item in value]}
    return {"type": "string"}


def written(value: Any) -> str:
    """A value as the chat template writes it."""
    if isinstance(value, dict):
        return "".join(f"{PREFIX}<{key}>{written(item)}{PREFIX}</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"{PREFIX}<item>{written(item)}{PREFIX}</item>" for item in value)
    return value


PARTS = st.lists(
    st.one_of(
        PROSE.map(lambda text: ("text", text)),
        PROSE.map(lambda text: ("reasoning", text)),
        st.lists(st.tuples(st.just("call"), NAMES, OBJECTS), min_size=1, max_size=3).map(
            lambda calls: ("calls", calls)
        ),
    ),
    max_size=5,
).filter(lambda parts: not any(a[0] == b[0] != "calls" for a, b in zip(parts, parts[1:], strict=False)))


@settings(max_examples=150)
@given(PARTS)
def test_any_answer_comes_back_the_same(parts: list[Any]) -> None:
    stream: list[str | Pushed] = []
    expected: list[Any] = []
    tools: dict[str, Tool] = {}
    for kind, content in parts:
        if kind != "calls":
            stream += [(OPEN, THINK[0]), content, (CLOSE, THINK[1])] if kind == "reasoning" else [content]
            expected.append((kind, content))
            continue
        for _, name, arguments in content:
            tools[name] = Tool(name, parameters=schema_for(arguments))
        kept = [made for made in content if tools[made[1]].parameters == schema_for(made[2])]
        stream.append(block(*(invoke(written(arguments), name) for _, name, arguments in kept)))
        expected += kept
    found = same_for_all_cuts(stream, syntax=SYNTAX, tools=Tools(tuple(tools.values()) or (Tool("other"),)))
    assert found.error is None
    assert [part if part[0] != "call" else (*part[:2], json.loads(part[2])) for part in found.parts] == expected


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [
                *SPECIAL,
                "<tool_call>",
                "</tool_call>",
                '<invoke name="',
                '<invoke name="ping">',
                "</invoke>",
                "<item>",
                "</item>",
                "<a>",
                "</a>",
                '">',
                "]",
                "]<",
                "<",
                ">",
                "/",
                "x",
                " ",
                "\n",
            ]
        ),
        max_size=16,
    ),
    st.sampled_from(["", f"{PREFIX}<tool_call>", f"{PREFIX}<tool_call>{call().removesuffix(f'{PREFIX}</invoke>')}"]),
    st.booleans(),
)
def test_any_cut_gives_the_same(fragments: list[str], begun: str, natural: bool) -> None:
    read(begun + "".join(fragments), natural=natural)


PING = spelled(':<invoke name="ping">:</invoke>')
HOSTILE = [
    ("", " "),
    (spelled(':<invoke name="'), ">"),
    (spelled(":<invoke name="), " "),
    (spelled(':<invoke name="f">:<a>'), PREFIX),
    (spelled(':<invoke name="f">:<a>'), "]<"),
    (spelled(':<invoke name="f">:<'), "x"),
    (spelled(':<invoke name="f">:<a>'), spelled(":<item>1:</item>")),
    (spelled(':<invoke name="f">'), spelled(":<a>1:</a>")),
    (spelled(':<invoke name="f">'), spelled(":<a>")),
    (spelled(':<invoke name="f">'), " "),
    ("", PING),
    (PING, spelled(":<tool_call>") + PING),
    (PING, " "),
]


@pytest.mark.parametrize(("head", "unit"), HOSTILE)
def test_hostile_calls_take_linear_work(head: str, unit: str) -> None:
    def worked(size: int) -> int:
        try:
            return work(MiniMaxReader(TOOLS), head + unit * (size // len(unit)))
        except OutputError:
            return 0  # a call whose elements nest too deep ends at once

    sizes = [20_000, 40_000, 80_000]
    once, twice, four = map(worked, sizes)
    assert once <= 4 * sizes[0] + 1000
    assert twice <= 2.2 * once + 1000 and four <= 2.2 * twice + 1000
    opener = f"{PREFIX}<tool_call>"
    small = [
        calls_made([(OTHER, char) for char in f"{opener}{head}{unit * n}"], syntax=SYNTAX, tools=TOOLS, natural=False)
        for n in (100, 200, 400)
    ]
    assert small[1] <= 2.2 * small[0] + 1000 and small[2] <= 2.2 * small[1] + 1000
