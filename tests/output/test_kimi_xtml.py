"""Kimi's channels and calls in tags of control tokens."""

from __future__ import annotations

import html
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tool, Tools
from flare.output import kimi_xtml
from flare.output.kimi_xtml import MAX_TAG
from flare.output.scanning import MAX_CALL_BYTES
from tests.output.feeding import OTHER, WEATHER, feed
from tests.output.frames import Frames, Item, Tok

KIMI = Frames("kimi_xtml", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
OSLO = ("call", "weather", '{"city":"Oslo"}')
NOON = ("call", "clock", "{}")
CUT = "the model ended its answer within a tool call"


def opens(name: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>"


def closes(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def channel(name: str, text: str) -> str:
    return opens(name) + text + closes(name)


def argument(key: str, value: str, type: str | None = "string") -> str:
    typed = "" if type is None else f' type="{type}"'
    return opens("argument", f' key="{key}"{typed}') + value + closes("argument")


def call(name: str = "weather", *parts: str) -> str:
    return opens("call", f' tool="{name}" index="1"') + "".join(parts) + closes("call")


def tools(*calls: str) -> str:
    return channel("tools", "".join(calls))


WEATHER_CALL = call("weather", argument("city", "Oslo"))
END = closes("message") + "<|end_of_msg|>"
ANSWER = "Yes." + closes("response")


@pytest.mark.parametrize("natural", [True, False])
def test_a_reported_call_with_entities_types_and_spaces(natural: bool) -> None:
    reply = (
        "plan" + closes("think") + channel("response", "On it.")
        + tools(call("wx&amp;al", argument("city", " New Lund "), argument("days", "2", "integer")))
    )  # fmt: skip
    offered = Tools((Tool("wx&al", parameters={"properties": {"city": {"type": "string"}}}),))
    found = KIMI.same(reply, tools=offered, opens=True, natural=natural)
    assert found.error is None
    assert found.parts == [
        ("reasoning", "plan"),
        ("text", "On it."),
        ("call", "wx&al", '{"city":" New Lund ","days":2}'),
    ]


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        ("", []),
        (ANSWER, [("text", "Yes.")]),
        (ANSWER + END, [("text", "Yes.")]),
        ("Yes." + END, [("text", "Yes.")]),
        ("Yes.", [("text", "Yes.")]),
        ("\n Yes. \n" + closes("response") + END, [("text", "\n Yes. \n")]),
        ("a < b <| c |> <|opener|>", [("text", "a < b <| c |> <|opener|>")]),
        (closes("response") + tools(WEATHER_CALL) + END, [OSLO]),
        (closes("response") + tools(WEATHER_CALL, call("clock")) + END, [OSLO, NOON]),
        (closes("response") + tools("\n", WEATHER_CALL, "\n", call("clock", "\n"), "\n") + "\n" + END, [OSLO, NOON]),
        ("Yes." + tools(WEATHER_CALL), [("text", "Yes."), OSLO]),  # the answer is not closed
        ("Yes." + WEATHER_CALL, [("text", "Yes."), OSLO]),  # without the outer tags
        (closes("response") + opens("tools") + WEATHER_CALL, [OSLO]),
        (closes("response") + opens("tools") + WEATHER_CALL + END, [OSLO]),
        (closes("response") + opens("tools") + WEATHER_CALL + channel("response", "So."), [OSLO, ("text", "So.")]),
        (channel("think", "Hm.") + channel("response", "Yes."), [("reasoning", "Hm."), ("text", "Yes.")]),
        (
            "Well" + channel("think", "hm") + channel("response", " yes"),
            [("text", "Well"), ("reasoning", "hm"), ("text", " yes")],
        ),
        (closes("response") + tools(), []),
        (closes("response") + "\n" + channel("think", "a") + "\n", [("reasoning", "a")]),
        (closes("response") + "\nStray\n" + END, [("text", "\nStray\n")]),
        (closes("response") + "\n" + closes("x") + " Stray", [("text", " Stray")]),
        (ANSWER + closes("think") + closes("call") + closes(""), [("text", "Yes.")]),
        ("Yes." + closes("") + channel("think", "x"), [("text", "Yes."), ("reasoning", "x")]),
        ("Yes.<|close|> response <|sep|>" + END, [("text", "Yes.")]),
        ("Yes.<|close|>response" + END, [("text", "Yes.")]),
        ("Yes.<|sep|>" + ANSWER, [("text", "Yes.Yes.")]),
        ("Yes.<|close|>response", [("text", "Yes.")]),
        ("Yes.<|close|>resp", [("text", "Yes.")]),
        ("Yes.<|open|>", [("text", "Yes.")]),
        (ANSWER + END + "More" + WEATHER_CALL, [("text", "Yes.")]),
        (ANSWER + opens("message", ' role="user"') + "Hi", [("text", "Yes.")]),
        ("Yes.<|end_of_msg|>More", [("text", "Yes.")]),
        ("Yes.<|close|>response<|end_of_msg|>More", [("text", "Yes.")]),
    ],
)
def test_parts_of_a_reply(reply: str, parts: list[Any]) -> None:
    found = KIMI.same(reply)
    assert (found.parts, found.error) == (parts, None)
    limited = KIMI.same(reply, natural=False)
    assert (limited.parts, limited.error) == (parts, None)


def test_a_prompt_that_ends_within_reasoning() -> None:
    for reply, parts in (
        ("Hm.\n" + closes("think") + channel("response", "Yes."), [("reasoning", "Hm.\n"), ("text", "Yes.")]),
        (closes("think") + channel("response", "Yes."), [("text", "Yes.")]),
        ("Hm." + opens("response") + "Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        ("Hm." + tools(WEATHER_CALL), [("reasoning", "Hm."), OSLO]),
        ("Hm." + WEATHER_CALL, [("reasoning", "Hm."), OSLO]),
        ("Hm." + closes("think") + "Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        ("Hm" + closes("think") + opens("think") + "m." + closes("think"), [("reasoning", "Hmm.")]),
        ("Hm.", [("reasoning", "Hm.")]),
    ):
        found = KIMI.same(reply, opens=True)
        assert (found.parts, found.error) == (parts, None), reply


def test_control_tokens_spelled_in_ordinary_text_are_data() -> None:
    written = 'Say "<|close|>think<|sep|>", then <|open|>response<|sep|> <|end_of_msg|>.'
    thought: list[Item] = [written, *KIMI.items(closes("think") + opens("response")), written]
    found = KIMI.same(thought, opens=True)
    assert found.parts == [("reasoning", written), ("text", written)]
    value: list[Item] = [*KIMI.items(opens("call", ' tool="f"') + opens("argument", ' key="a"'))]
    value += [written, *KIMI.items(closes("argument") + closes("call"))]
    found = KIMI.same(value)
    assert found.parts == [("call", "f", json.dumps({"a": written}, separators=(",", ":")))]


def arguments_of(*parts: str) -> str:
    found = KIMI.same(tools(call("f", *parts)))
    assert found.error is None, found.error
    ((_, _, arguments),) = found.parts
    return arguments


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        ((), "{}"),
        ((argument("a", ""),), '{"a":""}'),
        ((argument("a", " \n x\n"), argument("b", "2")), '{"a":" \\n x\\n","b":"2"}'),
        ((argument("a", 'C:\\t "x" {[}] ü 🙂 &amp; </b>'),), '{"a":"C:\\\\t \\"x\\" {[}] ü 🙂 &amp; </b>"}'),
        ((argument("a", "2", None),), '{"a":"2"}'),
        ((argument("a", "null"),), '{"a":"null"}'),
        ((argument("a", "null", "null"),), '{"a":null}'),
        ((argument("a", "true", "boolean"), argument("b", " false\n", "boolean")), '{"a":true,"b":false}'),
        ((argument("a", "1.50", "number"), argument("b", "-0", "integer")), '{"a":1.50,"b":-0}'),
        ((argument("a", "1e400", "number"), argument("b", "9" * 30, "integer")), '{"a":1e400,"b":' + "9" * 30 + "}"),
        ((argument("a", '[1, {"z": 1, "b": "x"}]', "array"),), '{"a":[1,{"z":1,"b":"x"}]}'),
        ((argument("a", '{"z": 1.0, "b": null}', "object"),), '{"a":{"z":1.0,"b":null}}'),
        ((argument("a", '"x"', "number"),), '{"a":"x"}'),  # no schema is enforced
        ((argument("z", "1"), argument("a", "2")), '{"z":"1","a":"2"}'),
        ((argument("a&quot;b&amp;quot;&lt;&gt;&apos;&c", "1"),), '{"a\\"b&quot;<>\'&c":"1"}'),
        ((argument("a b", "1"),), '{"a b":"1"}'),
        (("\n", argument("a", "1"), "\n ", argument("b", "2"), "\n"), '{"a":"1","b":"2"}'),
        ((channel("json", '{"z": 1.50, "a": {"b": []}}'),), '{"z":1.50,"a":{"b":[]}}'),
        ((opens("json", ' type="object"') + "{}" + closes("json"),), "{}"),
        ((opens("argument", ' key="a"') + "1" + argument("b", "2"),), '{"a":"1","b":"2"}'),  # not closed
        ((opens("argument", ' key="a"') + "1",), '{"a":"1"}'),
        ((opens("argument", '  type="string"\n key="a"  ') + "1",), '{"a":"1"}'),
    ],
)  # fmt: skip
def test_arguments_are_passed_on_as_written(parts: tuple[str, ...], arguments: str) -> None:
    assert arguments_of(*parts) == arguments
    json.loads(arguments)


@pytest.mark.parametrize(
    "written",
    [
        opens("call") + closes("call"),
        opens("call", ' tool=""') + closes("call"),
        opens("call", ' tool=" "') + closes("call"),
        opens("call", " tool=weather") + closes("call"),
        opens("call", " tool='weather'") + closes("call"),
        opens("call", ' tool="weather') + closes("call"),
        opens("call", ' tool="weather" tool="clock"') + closes("call"),
        opens("call", ' tool="weather" x') + closes("call"),
        opens("call", ' tool="weather"index="1"') + closes("call"),
        call("f", opens("argument") + "1" + closes("argument")),
        call("f", argument("", "1")),
        call("f", argument("a", "1"), argument("a", "2")),
        call("f", argument("a", "", "integer")),
        call("f", argument("a", "two", "integer")),
        call("f", argument("a", "True", "boolean")),
        call("f", argument("a", "NaN", "number")),
        call("f", argument("a", '1,"b":2', "number")),
        call("f", argument("a", "1}", "number")),
        call("f", argument("a", '{"b": 1, "b": 2}', "object")),
        call("f", argument("a", "{'b': 1}", "object")),
        call("f", argument("a", '"\\ud800"', "object")),
        call("f", argument("a", "[" * MAX_NESTING + "]" * MAX_NESTING, "array")),
        call("f", channel("json", "")),
        call("f", channel("json", "[1]")),
        call("f", channel("json", '{"": 1}')),
        call("f", channel("json", "{} {}")),
        call("f", channel("json", "{}"), channel("json", "{}")),
        call("f", channel("json", "{}"), argument("a", "1")),
        call("f", "text"),
        call("f", argument("a", "1"), "text"),
        call("f", channel("value", "1")),
        call("f", opens("argument", ' key="a"') + "1<|sep|>2" + closes("argument")),
        call("f", opens("argument", ' key="a"') + "1" + channel("b", "2") + closes("argument")),
        call("f", opens("argument", ' key="a"') + "1" + closes("json")),
        call("f", opens("argument", ' key="a"') + "1" + closes("")),
        call("f", opens("argument", ' key="a"') + "1<|close|>argument"),
        call("f", '<|open|>argument key="a"' + argument("b", "1")),
        '<|open|>call tool="g"' + argument("a", "1") + closes("call"),
        opens("call", ' tool="f"') + "<|close|>call",
        opens("call", ' tool="f"') + closes(""),
        call("f", opens("json") + "{}" + closes("argument")),
        call("f", opens("call", ' tool="g"')),
        opens("call", ' tool="f"') + closes("tools") + closes("call"),
        opens("call", ' tool="f"') + closes("message"),
        opens("call", ' tool="f"') + opens("response"),
        opens("call", ' tool="f"') + "<|end_of_msg|>",
        "text" + call("f"),
        channel("argument", "1"),
        channel("json", "{}"),
        channel("calls", "1"),
        opens("call", ' tool="' + "f" * MAX_TAG + '"') + closes("call"),
    ],
)
def test_calls_that_are_none(written: str) -> None:
    for natural in (True, False):
        found = KIMI.same("So:" + closes("response") + tools(WEATHER_CALL, written), natural=natural)
        assert found.parts == [("text", "So:"), OSLO] and found.error is not None
        assert "'" not in found.error or len(found.error) < 200


def test_channels_that_there_are_none() -> None:
    found = KIMI.same(ANSWER + channel("thinking", "Hm."))
    assert found.parts == [("text", "Yes.")] and "'thinking'" in str(found.error)
    found = KIMI.same("Yes.<|open|>" + "x" * 9000)
    assert found.parts == [("text", "Yes.")] and str(MAX_TAG) in str(found.error)


@pytest.mark.parametrize("cut", range(len(KIMI.items(WEATHER_CALL))))
@pytest.mark.parametrize("before", [[], [WEATHER_CALL]])
def test_an_answer_that_ends_within_a_call(cut: int, before: list[str]) -> None:
    begun = [*KIMI.items(closes("response") + opens("tools") + "".join(before))]
    begun += KIMI.items(WEATHER_CALL)[:cut]
    whole = [OSLO] * len(before)
    limited = KIMI.same(begun, natural=False)
    assert (limited.parts, limited.error) == (whole, None)
    natural = KIMI.same(begun)
    assert natural.parts == whole
    assert natural.error == (None if before and not cut else CUT)
    for end in ("<|end_of_msg|>", END):
        ended = KIMI.same([*begun, *KIMI.items(end)])
        assert ended.parts == whole and (ended.error is None) is (natural.error is None)


def test_the_bounds_of_calls() -> None:
    nested = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert arguments_of(argument("a", nested, "array")) == f'{{"a":{nested}}}'
    room = MAX_ARGUMENTS_BYTES - len('{"a":""}')
    for value, fits in (("ü" * (room // 2), True), ("ü" * (room // 2) + "x", False)):
        found = feed(KIMI.pushed(KIMI.items(call("f", argument("a", value)))), syntax=KIMI.tokens)
        assert (found.error is None) is fits and len(found.calls) == fits
        assert fits or str(MAX_ARGUMENTS_BYTES) in str(found.error)
    endless = KIMI.items(opens("call", ' tool="f"') + opens("argument", ' key="a"'))
    chunks: list[Item] = ["ü" * (1 << 19)] * 15
    assert feed(KIMI.pushed([*endless, *chunks]), syntax=KIMI.tokens, natural=False).error is None
    found = feed([*KIMI.pushed(endless), *[(OTHER, "ü" * (1 << 19))] * 17], syntax=KIMI.tokens, natural=False)
    assert str(MAX_CALL_BYTES) in str(found.error)


def test_reasoning_tokens_are_those_between_the_tags() -> None:
    reply = KIMI.pushed(KIMI.items("hm\n\n<m" + closes("think") + channel("response", "yes")), 1)
    assert feed(reply, syntax=KIMI.tokens, opens=True).reasoning_tokens == 6
    assert feed([text for _, text in reply], syntax=KIMI.texts, opens=True).reasoning_tokens == 6
    assert feed(list("hm" + closes("think") + "yes"), syntax=KIMI.texts, opens=True).reasoning_tokens == 2
    assert feed([*"hm<|cl", "ox", *"<|op"], syntax=KIMI.texts, opens=True).reasoning_tokens == 11
    odd = [(OTHER, ""), (OTHER, "h"), (KIMI.ids["<|close|>"], "\ufffd<|close|>"), (OTHER, "think"), (-1, "")]
    found = feed(odd, syntax=KIMI.tokens, opens=True)
    assert found.parts == [("reasoning", "h\ufffd")] and found.reasoning_tokens == 3


PIECES = st.sampled_from(["a", " ", "\n", "<", "|", "é", "<|", "open", "|>", "think", '"', "&", "\\", "<|sep|>"])
TEXT = st.lists(PIECES, max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = TEXT.filter(lambda name: name.strip() and name.isprintable())
CALLS = st.tuples(NAMES, st.dictionaries(TEXT.filter(bool), TEXT | VALUES, max_size=3), st.booleans())


def written_call(name: str, arguments: dict[str, Any], block: bool) -> list[Item]:
    def tag(marker: str, name: str, **attributes: str) -> list[Item]:
        pairs = (f' {key}="{html.escape(value)}"' for key, value in attributes.items())
        return [Tok(marker), name + "".join(pairs).replace("&#x27;", "&apos;"), Tok("<|sep|>")]

    items = tag("<|open|>", "call", tool=name, index="1")
    if block:
        items += [*tag("<|open|>", "json", type="object"), json.dumps(arguments), *tag("<|close|>", "json")]
    else:
        for key, value in arguments.items():
            string = isinstance(value, str)
            items += tag("<|open|>", "argument", key=key, type="string" if string else "object")
            items += [value if string else json.dumps(value), *tag("<|close|>", "argument")]
    return [*items, *tag("<|close|>", "call")]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["think", "response"]), TEXT) | st.lists(CALLS, max_size=3), max_size=4),
    st.integers(),
    st.booleans(),
)
def test_replies_come_back_as_they_were_meant(
    blocks: list[tuple[str, str] | list[tuple[str, dict[str, Any], bool]]], seed: int, opens_reasoning: bool
) -> None:
    items: list[Item] = KIMI.items(closes("think" if opens_reasoning else "response"))
    meant: list[Any] = []
    for block in blocks:
        if isinstance(block, list):
            calls = [item for one in block for item in written_call(*one)]
            items += [*KIMI.items(opens("tools")), *calls, *KIMI.items(closes("tools"))]
            meant += [("call", name, arguments) for name, arguments, _ in block]
            continue
        name, text = block
        items += [*KIMI.items(opens(name)), text, *KIMI.items(closes(name))]
        kind = "reasoning" if name == "think" else "text"
        if text and meant and meant[-1][0] == kind:
            meant[-1] = (kind, meant[-1][1] + text)
        elif text:
            meant.append((kind, text))
    items = [item for item in items if item]
    for pushed in (KIMI.pushed(items), KIMI.pushed(items, 1), KIMI.pushed(items, seed=seed)):
        found = feed(pushed, syntax=KIMI.tokens, opens=opens_reasoning)
        assert found.error is None
        parts = [part if len(part) == 2 else (*part[:2], json.loads(part[2])) for part in found.parts]
        assert parts == meant
        orders = [list(part[2]) for part in parts if len(part) == 3]
        assert orders == [list(part[2]) for part in meant if len(part) == 3]


FRAGMENTS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "think", "response", "tools", "call", "message", " "]
FRAGMENTS += [
    'call tool="f"',
    'argument key="a"',
    'argument key="b" type="number"',
    "argument",
    "json",
    "{}",
    "1",
    "\n",
]
FRAGMENTS += [opens("tools"), closes("tools"), opens("think"), closes("response"), WEATHER_CALL, closes("call"), "é<|"]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.sampled_from([WEATHER, Tools(WEATHER.offered, "required", parallel=False), Tools()]),
    st.booleans(),
    st.booleans(),
)
def test_any_split_gives_the_same(reply: str, tools: Tools, opens_reasoning: bool, natural: bool) -> None:
    found = KIMI.same(reply, tools=tools, opens=opens_reasoning, natural=natural)
    for kind, *content in found.parts:
        assert kind == "call" or not any(spelling in content[0] for spelling in KIMI.ids)


def test_the_module_says_what_it_reads() -> None:
    example = "".join(line.strip() for line in str(kimi_xtml.__doc__).splitlines() if line.startswith("    "))
    found = KIMI.same(example)
    assert found.parts == [("reasoning", "..."), ("text", "..."), ("call", "f", '{"k":"v"}')] and found.error is None
