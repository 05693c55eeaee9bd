"""Muse's messages, whose headers say whom they are for, and calls in ATEM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, Tool, Tools
from flare.output.muse_atem import MAX_HEADER
from flare.output.scanning import MAX_CALL_BYTES, MAX_NAME_WRITTEN
from tests.output.feeding import OTHER, WEATHER, feed
from tests.output.frames import Frames, Item, Tok

SPELLINGS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
MUSE = Frames("muse_atem", *SPELLINGS)
BODY = Frames("muse_atem", *SPELLINGS, continues=True)  # the prompt ends within the text of a message
OSLO = ("call", "weather", '{"city":"Oslo"}')
NOON = ("call", "clock", "{}")
CUT = "the model ended its answer within a tool call"
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "list": {"type": "array"},
        "map": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    },
}
TYPED = Tools((Tool("f", parameters=SCHEMA), Tool("weather"), Tool("clock")))


def message(to: str, text: str, end: str = "<|eom|>") -> str:
    """A message of a prompt that ended behind `assistant`; the next one begins the same way."""
    return f" to={to}<|message|>{text}{end}" + ("<|start|>assistant" if end == "<|eom|>" else "")


def parameter(name: str, value: str) -> str:
    return f'<atem:parameter name="{name}">{value}</atem:parameter>\n'


def invoke(name: str, *parts: str) -> str:
    return f'<atem:invoke name="{name}">\n' + "".join(parts) + "</atem:invoke>\n"


def block(*invokes: str) -> str:
    return "<atem:function_calls>\n" + "".join(invokes) + "</atem:function_calls>"


def call(name: str = "weather", *parts: str, end: str = "<|eom|>") -> str:
    return message(name, block(invoke(name, *parts)), end)


WEATHER_CALL = call("weather", parameter("city", "Oslo"))


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        ("", []),
        (message("user", "Yes.", ""), [("text", "Yes.")]),
        (message("user", "\n Yes. \n", "<|eot|>"), [("text", "\n Yes. \n")]),
        (message("user", "a < b <|c|> to me to= to=x", ""), [("text", "a < b <|c|> to me to= to=x")]),
        (message("self", "Hm.") + message("user", "Yes.", ""), [("reasoning", "Hm."), ("text", "Yes.")]),
        (message("self", "Hm.", ""), [("reasoning", "Hm.")]),
        (message("self", "a") + message("self", "b") + message("user", "c", ""), [("reasoning", "ab"), ("text", "c")]),
        (message("self", "") + message("user", "c", ""), [("text", "c")]),
        (message("commentary", "I look. ") + WEATHER_CALL, [("text", "I look. "), OSLO]),
        (message("commentary", "a") + message("user", "b", ""), [("text", "ab")]),
        (message("developer", "secret " + block(invoke("f"))) + message("user", "b", ""), [("text", "b")]),
        (message("self", "Hm.") + WEATHER_CALL + call("clock", end=""), [("reasoning", "Hm."), OSLO, NOON]),
        (WEATHER_CALL + message("self", "So.") + call("clock", end="<|eot|>"), [OSLO, ("reasoning", "So."), NOON]),
        (message("tools", block(invoke("weather", parameter("city", "Oslo")), invoke("clock")), ""), [OSLO, NOON]),
        (message("weather", invoke("weather", parameter("city", "Oslo"))), [OSLO]),  # without the outer tags
        (
            message("weather", "Now:\n" + block(invoke("clock")) + "\nDone.") + message("user", "b", ""),
            [NOON, ("text", "b")],
        ),
        (message("self", block(invoke("f"))), [("reasoning", block(invoke("f")))]),
        (message("user", block(invoke("f"))), [("text", block(invoke("f")))]),
        ("<|message|>Yes.", [("text", "Yes.")]),  # to nobody
        ("assistant to=self<|message|>Hm.<|eom|>assistant<|message|>Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        ("assist<|message|>Yes.", [("text", "Yes.")]),
        ("assistants to=self", [("text", "assistants to=self")]),
        ("assistant for you", [("text", "assistant for you")]),
        ("assistantto=self", [("text", "assistantto=self")]),
        (" to=<|message|>Yes.", [("text", "Yes.")]),
        ("to=user <|message|>Yes.", [("text", "Yes.")]),
        (" to=self<|message|>Hm.<|eom|> to=user<|message|>Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        (" to=self<|message|>Hm.<|eom|>\n<|start|>assistant<|message|>Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        (" to=self<|message|>Hm.<|start|>assistant to=user<|message|>Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        (" to=self<|message|>Hm. to=user<|message|>Yes.", [("reasoning", "Hm. "), ("text", "Yes.")]),
        (" to=self<|message|>to=user<|message|>Yes.", [("text", "Yes.")]),
        (
            " to=self<|message|>Hm. to=clock<|message|>" + block(invoke("clock")),
            [("reasoning", "Hm. "), NOON],
        ),
        (" to=self<|message|>into=user<|message|>Yes.", [("reasoning", "into=userYes.")]),
        (" to=self<|message|>Hm. to<|message|>me", [("reasoning", "Hm. tome")]),
        (" to=self<|message|>Hm. to<|message|>to=user<|message|>x", [("reasoning", "Hm. toto=userx")]),
        (" to=self<|message|>Hm. to=user<|eom|>", [("reasoning", "Hm. to=user")]),
        (" to=self<|message|>Hm. to=user", [("reasoning", "Hm. to=user")]),
        ("Yes, plainly.", [("text", "Yes, plainly.")]),
        (" \n to go", [("text", " \n to go")]),
        (" to=x\nis it", [("text", " to=x\nis it")]),
        (" to=" + "x" * MAX_HEADER + "<|eot|>", [("text", " to=" + "x" * MAX_HEADER)]),
        (message("user", "Yes.") + "<|start|> to=self<|message|>Hm.", [("text", "Yes."), ("reasoning", "Hm.")]),
        (message("user", "Yes.")[:-9] + "user<|message|>Next?" + WEATHER_CALL, [("text", "Yes.")]),
        (message("user", "Yes.")[:-9] + "tool f<|message|>Sun.", [("text", "Yes.")]),
        (message("user", "Yes.", "<|eot|>") + WEATHER_CALL, [("text", "Yes.")]),
        (message("user", "Yes."), [("text", "Yes.")]),
        (message("user", "Yes.") + " to=wea", [("text", "Yes.")]),
        (message("user", "Yes.") + "<|eom|>\n<|eom|>", [("text", "Yes.")]),
        (message("user", "Yes.") + "<|start|>assis", [("text", "Yes.")]),
        (" to=us", []),
        (" t", []),
    ],
)
def test_parts_of_a_reply(reply: str, parts: list[Any]) -> None:
    for natural in (True, False):
        found = MUSE.same(reply, natural=natural)
        assert (found.parts, found.error) == (parts, None)


def test_where_a_prompt_ends() -> None:
    for reply in ("Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Hm.<|eom|> to=user<|message|>Yes."):
        for frames in (MUSE, BODY):
            found = frames.same(reply, opens=True)
            assert (found.parts, found.error) == ([("reasoning", "Hm."), ("text", "Yes.")], None)
    assert BODY.same(" to me. to=").parts == [("text", " to me. to=")]
    assert BODY.same("and on<|eot|>").parts == [("text", "and on")]
    assert BODY.same(message("self", "Hm.") + message("user", "Yes.", "")).parts[1:] == [
        ("reasoning", "Hm."),
        ("text", "Yes."),
    ]


def test_control_tokens_spelled_in_ordinary_text_are_data() -> None:
    written = "Say <|eom|><|start|>assistant to=user<|message|> and <|eot|>."
    items = [*MUSE.items(" to=self<|message|>"), written, *MUSE.items("<|eom|> to=user<|message|>"), written]
    assert MUSE.same(items).parts == [("reasoning", written), ("text", written)]
    items = MUSE.items(" to=f<|message|>")
    items += ['<atem:invoke name="f">' + parameter("text", written) + "</atem:invoke>"]
    assert MUSE.same(items, tools=TYPED).parts == [
        ("call", "f", json.dumps({"text": written}, separators=(",", ":"))),
    ]


def arguments_of(*parts: str, name: str = "f") -> str:
    found = MUSE.same(call(name, *parts), tools=TYPED)
    assert found.error is None, found.error
    ((_, _, arguments),) = found.parts
    return arguments


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        ((), "{}"),
        ((parameter("text", ""),), '{"text":""}'),
        ((parameter("text", "\n  if x:\n\n"),), '{"text":"\\n  if x:\\n\\n"}'),
        ((parameter("text", 'C:\\t "x" {[}] ü 🙂 &amp; </b>'),), '{"text":"C:\\\\t \\"x\\" {[}] ü 🙂 &amp; </b>"}'),
        ((parameter("text", "7"), parameter("count", "7")), '{"text":"7","count":7}'),
        ((parameter("count", "-0"), parameter("ratio", "1.50")), '{"count":-0,"ratio":1.50}'),
        ((parameter("ratio", "1e400"), parameter("count", "9" * 30)), '{"ratio":1e400,"count":' + "9" * 30 + "}"),
        ((parameter("flag", "true"), parameter("maybe", "null")), '{"flag":true,"maybe":null}'),
        ((parameter("list", '[1, {"z": 1.0}]'), parameter("map", "{}")), '{"list":[1,{"z":1.0}],"map":{}}'),
        ((parameter("count", "seven"),), '{"count":"seven"}'),  # no schema is enforced
        ((parameter("other", "7"),), '{"other":"7"}'),
        ((parameter("z", "1"), parameter("a", "2")), '{"z":"1","a":"2"}'),
        ((parameter('a"b>c', "1"),), '{"a\\"b>c":"1"}'),
        ((parameter("a&quot;b&amp;amp;", "1"),), '{"a\\"b&amp;":"1"}'),
        ((parameter("text", "a</atem:parameter>b"),), '{"text":"a</atem:parameter>b"}'),
        (
            (parameter("text", "</atem:parameter></atem:parameter>\n<"),),
            '{"text":"</atem:parameter></atem:parameter>\\n<"}',
        ),
        (
            (parameter("text", "</atem:parameter> x</atem:parameter>\n"),),
            '{"text":"</atem:parameter> x</atem:parameter>\\n"}',
        ),
        ((parameter("text", "</atem:parameter>\n</atem:x"),), '{"text":"</atem:parameter>\\n</atem:x"}'),
        ((parameter("text", '<atem:parameter name="b">'),), '{"text":"<atem:parameter name=\\"b\\">"}'),
        ((parameter("text", "</atem:invoke>"),), '{"text":"</atem:invoke>"}'),
        ((parameter("text", "</atem:function_calls>"),), '{"text":"</atem:function_calls>"}'),
        ((parameter("text", "</atem:para"),), '{"text":"</atem:para"}'),
        (("  ", parameter("a", "1"), " \n"), '{"a":"1"}'),
        ((parameter("text", "go to=user"),), '{"text":"go to=user"}'),
    ],
)
def test_arguments_are_passed_on_as_written(parts: tuple[str, ...], arguments: str) -> None:
    assert arguments_of(*parts) == arguments
    json.loads(arguments)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "Oslo, please.",
        '{"city": "Oslo"}',
        "<atem:function_calls>\n</atem:function_calls>",
        "<atem:invok name=\"f\"></atem:invoke>",
        '<atem:invoke name="f">',
        '<atem:invoke name="f"></atem:invok>',
        "<atem:invoke>" + parameter("a", "1") + "</atem:invoke>",
        "<atem:invoke name=f>" + parameter("a", "1") + "</atem:invoke>",
        "<atem:invoke  id=\"f\">" + parameter("a", "1") + "</atem:invoke>",
        "<atem:invokename=\"f\">" + parameter("a", "1") + "</atem:invoke>",
        '<atem:invoke name="' + "f" * MAX_NAME_WRITTEN + '"></atem:invoke>',
        invoke(""),
        invoke(" "),
        invoke("f", "text"),
        invoke("f", parameter("", "1")),
        invoke("f", parameter("a", "1"), parameter("a", "2")),
        invoke("f", '<atem:parameter nam="a">1</atem:parameter>'),
        invoke("f", '<atem:parameter name="a">1'),
        invoke("f", '<atem:parameter name="a">1</atem:parameter'),
        invoke("f", '<atem:parameter name="a">1</atem:parameter>text'),
        invoke("f", '<atem:parameter name="a">1</atem:parameter>')[:-3],
        invoke("f", '<atem:parameter name="'),
        invoke("g") + '<atem:invoke name="f">',
    ],
)  # fmt: skip
def test_calls_that_are_none(written: str) -> None:
    made = [("call", "g", "{}")] if written.startswith('<atem:invoke name="g"') else []
    for end in ("<|eom|>", "<|eot|>", "<|start|>", " to=user<|message|>"):
        for natural in (True, False):
            found = MUSE.same(message("self", "Hm.") + message("f", written, end), natural=natural)
            assert found.parts == [("reasoning", "Hm."), *made] and found.error is not None


def test_headers_that_are_none() -> None:
    before = message("user", "Yes.")
    found = MUSE.same(before + " to=" + "x" * MAX_HEADER + "<|message|>")
    assert found.parts == [("text", "Yes.")] and str(MAX_HEADER) in str(found.error)
    found = MUSE.same(before + " for=user<|message|>Hm.")
    assert found.parts == [("text", "Yes.")] and "for=user" in str(found.error)


@pytest.mark.parametrize("before", ["", WEATHER_CALL])
def test_an_answer_that_ends_within_a_call(before: str) -> None:
    begun = message("self", "Hm.") + before
    made = [("reasoning", "Hm."), *([OSLO] if before else [])]
    body = block(invoke("weather", parameter("city", "Oslo")))
    whole = body.index("</atem:invoke>") + len("</atem:invoke>")
    for cut in range(len(body)):
        reply = MUSE.items(begun + " to=weather<|message|>" + body[:cut])
        complete = [OSLO] if cut >= whole else []
        limited = feed(MUSE.pushed(reply, 3), syntax=MUSE.tokens, natural=False)
        assert (limited.parts, limited.error) == ([*made, *complete], None)
        natural = feed(MUSE.pushed(reply, 1), syntax=MUSE.tokens)
        assert (natural.parts, natural.error) == ([*made, *complete], None if complete else CUT)


def test_the_bounds_of_calls() -> None:
    room = MAX_ARGUMENTS_BYTES - len('{"text":""}')
    for value, fits in (("ü" * (room // 2), True), ("ü" * (room // 2) + "xx", False)):
        pushed = MUSE.pushed(MUSE.items(call("f", parameter("text", value))))
        found = feed(pushed, syntax=MUSE.tokens, tools=TYPED)
        assert (found.error is None) is fits and len(found.calls) == fits
        assert fits or str(MAX_ARGUMENTS_BYTES) in str(found.error)
    begun = MUSE.pushed(MUSE.items(' to=f<|message|><atem:invoke name="f"><atem:parameter name="text">'))
    for chunks, fits in ((15, True), (17, False)):
        found = feed([*begun, *[(OTHER, "ü" * (1 << 19))] * chunks], syntax=MUSE.tokens, natural=False)
        assert found.error is None if fits else str(MAX_CALL_BYTES) in str(found.error)
    longest = MAX_NAME_WRITTEN - len(' name="')
    found = MUSE.same(message("f", '<atem:invoke name="' + "f" * longest + '"></atem:invoke>'))
    assert "characters, the limit is" in str(found.error)  # of a name; the tag could be read
    found = MUSE.same(message("f", '<atem:invoke name="' + "f" * (longest + 1)), natural=False)
    assert f"a tag of more than {MAX_NAME_WRITTEN} characters" in str(found.error)


def test_reasoning_tokens_are_those_of_messages_to_self() -> None:
    reply = MUSE.pushed(MUSE.items(message("self", "hm\n\nm") + message("user", "yes", "")), 1)
    assert feed(reply, syntax=MUSE.tokens).reasoning_tokens == 5
    assert feed([text for _, text in reply], syntax=MUSE.texts).reasoning_tokens == 5
    spread = [*"hm", " ", "to", "=", "user", (MUSE.ids["<|message|>"], "<|message|>"), "yes"]
    assert feed(spread, syntax=BODY.tokens, opens=True, continues=True).reasoning_tokens == 3  # the header's are none
    assert (
        feed(
            ["h", (MUSE.ids["<|message|>"], "<|message|>"), "m"], syntax=BODY.tokens, opens=True, continues=True
        ).reasoning_tokens
        == 2
    )
    assert feed([*"hm", " ", "to", "=", "us"], syntax=BODY.tokens, opens=True, continues=True).reasoning_tokens == 6
    assert (
        feed([*"hm", " ", "to", "=", "us", " x"], syntax=BODY.tokens, opens=True, continues=True).reasoning_tokens == 7
    )


PIECES = [
    "a",
    " ",
    "\n",
    "<",
    "é",
    "to",
    "=",
    "to=x",
    "<atem:",
    "</atem:parameter>",
    "</atem:invoke",
    ">",
    '"',
    "<|eom|>",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
VALUE = TEXT.filter(
    lambda text: "</atem:parameter>\n</atem:invoke" not in text and "</atem:parameter></atem:i" not in text
)
NAME = st.sampled_from(["f", "weather", "wx&al", "ns__f", 'q"t', "ü"])
CALLS = st.tuples(NAME, st.dictionaries(st.sampled_from(["a", "b c", 'd"e', "&"]), VALUE, max_size=3))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["self", "user", "commentary", "developer"]), TEXT) | CALLS, max_size=6),
    st.integers(),
)
def test_replies_come_back_as_they_were_meant(messages: list[tuple[str, Any]], seed: int) -> None:
    items: list[Item] = []
    meant: list[Any] = []
    for to, content in messages:
        items += [Tok("<|start|>"), "assistant to=" + to, Tok("<|message|>")]
        if isinstance(content, dict):
            items.append(
                block(
                    invoke(
                        to.replace("&", "&amp;"),
                        *(parameter(key.replace("&", "&amp;"), value) for key, value in content.items()),
                    )
                )
            )
            meant.append(("call", to, content))
        else:
            items += [content] if content else []
            kind = {"self": "reasoning", "developer": None}.get(to, "text")
            if content and kind and meant and meant[-1][0] == kind:
                meant[-1] = (kind, meant[-1][1] + content)
            elif content and kind:
                meant.append((kind, content))
        items.append(Tok("<|eom|>"))
    for pushed in (MUSE.pushed(items), MUSE.pushed(items, 1), MUSE.pushed(items, seed=seed)):
        found = feed(pushed, syntax=MUSE.tokens)
        assert found.error is None
        parts = [part if len(part) == 2 else (*part[:2], json.loads(part[2])) for part in found.parts]
        assert parts == meant
        orders = [list(part[2]) for part in parts if len(part) == 3]
        assert orders == [list(part[2]) for part in meant if len(part) == 3]


FRAGMENTS = [*SPELLINGS, "assistant", " to=self", " to=user", " to=f", "to=", "t", " ", "\n", "a", "é<|", "=x"]
FRAGMENTS += ['<atem:invoke name="f">', "</atem:invoke>", '<atem:parameter name="a">', "</atem:parameter>", "<atem:"]
FRAGMENTS += [WEATHER_CALL, message("self", "a"), message("user", "b"), block(), " to=f<|message|>"]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.sampled_from([WEATHER, Tools(WEATHER.offered, "required", parallel=False), Tools()]),
    st.sampled_from([MUSE, BODY]),
    st.booleans(),
    st.booleans(),
)
def test_any_split_gives_the_same(
    reply: str, tools: Tools, frames: Frames, opens_reasoning: bool, natural: bool
) -> None:
    found = frames.same(reply, tools=tools, opens=opens_reasoning, natural=natural)
    for kind, *content in found.parts:
        assert kind == "call" or not any(spelling in content[0] for spelling in SPELLINGS)


def test_a_call_with_many_arguments() -> None:
    meant = {f"key_{index}": str(index) for index in range(200)}
    found = feed(
        MUSE.pushed(MUSE.items(call("f", *(parameter(*pair) for pair in meant.items()))), 7), syntax=MUSE.tokens
    )
    assert found.error is None and json.loads(found.calls[0].arguments) == meant
