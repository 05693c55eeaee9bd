"""What holds for every format alike: neutral replies, written as its models write them, come back; so do the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, MAX_TOOL_NAME, Tool, Tools
from flare.output import FORMATS
from tests.output.feeding import Fed, feed
from tests.output.work import lines_run
from tests.output.writers import WRITERS, Part, Writer, decoded, dumped, offering

CUT = "the model ended its answer within a tool call"
A: Part = ("call", "f", '{"a":"x","n":7}')
B: Part = ("call", "g", "{}")
TOOLS = offering(A, B)

every = pytest.mark.parametrize("format", sorted(WRITERS))


def read(format: str, text: str | Sequence[str], **options: Any) -> Fed:
    return feed(text, **{"syntax": WRITERS[format].syntax, "tools": TOOLS} | options)


def same(format: str, text: str, **options: Any) -> Fed:
    """Feeds a text whole, by characters and by threes; what comes out must be the same."""
    whole = read(format, text, **options)
    for size in (1, 3):
        split = read(format, [text[i : i + size] for i in range(0, len(text), size)], **options)
        assert (split.parts, split.error) == (whole.parts, whole.error)
    return whole


def meaning(parts: Sequence[Any]) -> list[Any]:
    """Parts with the order of members, and numbers as they are written."""
    return [(*part[:2], list(decoded(part[2]).items())) if part[0] == "call" else part for part in parts]


def comes_back(format: str, *parts: Part, tools: Tools | None = None) -> None:
    writer = WRITERS[format]
    offered = offering(*parts) if tools is None else tools
    found = same(format, writer.reply(*parts), tools=offered, opens=writer.opens(*parts))
    assert found.error is None, found.error
    assert meaning(found.parts) == meaning(parts)


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == FORMATS


ARGUMENTS = {
    "none": "{}",
    "text": '{"a":"x"}',
    "numbers as written": '{"a":1e400,"b":-0,"c":1.0,"d":123456789012345678901234567890,"e":-1.50E-7}',
    "nested": '{"a":{"b":[1,{"c":null}],"d":"q"},"e":[],"f":{},"g":[true,false,[[],{}]]}',
    "quotes and braces": '{"a":"she said \\"go\\" {[}] \\\\ \\\\\\" \'\'","b":"}"}',
    "other alphabets": '{"a":"ü 🙂 \u2028 \u00a0 е́","é":"ключ"}',
    "line breaks": '{"a":"l1\\r\\nl2\\r\\n","b":"\\n","c":"\\n\\n"}',
    "indentation": '{"a":"    if ok:\\n\\tgo()  \\n"}',
    "empty text": '{"a":"","b":" "}',
    "words for other types": '{"a":"null","b":"1","c":"true","d":"[1]","e":"{}","f":"None"}',
    "nothing": '{"a":null,"b":true,"c":false}',
    "names of members": '{"k.x-y/z":"v","k_1":"w","$":1}',
    "reasoning's tags": '{"a":"</think><think>","b":["</think>"]}',
    "entities": '{"a":"&amp;&lt;&#10;","b":"<b>&</b>"}',
    "control characters": '{"a":"\\u0000\\u0001\\t\\u007f"}',
    "a fence": '{"a":"```json\\n{\\"b\\": 1}\\n```"}',
}


@every
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_come_back(format: str, arguments: str) -> None:
    comes_back(format, ("call", "f", arguments))


@every
@pytest.mark.parametrize(
    "parts",
    [
        [A],
        [A, B, A],
        [("text", "So."), A],
        [("text", "So.\n"), A, B],
        [("reasoning", "Hm.\n\nWell."), A],
        [("reasoning", "Hm."), ("text", "So."), A, B],
        [("reasoning", "Hm."), ("text", "So.")],
        [("reasoning", "Hm.")],
        [("text", " So.\n\n- a\n")],
        [A, ("text", "Done.")],
        [A, B, ("text", "Between."), B],
        [("text", "```\n"), A, ("text", "\n```")],
    ],
    ids=lambda parts: "-".join(part[0] for part in parts),
)
def test_parts_come_back_in_their_order(format: str, parts: list[Part]) -> None:
    if parts[0][0] == "text" and format == "deepseek_dsml" and len(parts) > 1:
        # The parser takes white space before a block for the block's.
        parts = [("text", parts[0][1].rstrip()), *parts[1:]]
    behind = [at for at, part in enumerate(parts) if at and parts[at - 1][0] == "call" != part[0]]
    if not WRITERS[format].goes_on and behind:
        found = same(format, WRITERS[format].reply(*parts))
        assert found.error is None and meaning(found.parts) == meaning(parts[: behind[0]])
        return
    comes_back(format, *parts)


@every
@pytest.mark.parametrize("name", ["a.b/c-d", "ns__x", "a:b", "é1", "x" * MAX_TOOL_NAME])
@pytest.mark.parametrize("declared", [True, False])
def test_names_come_back(format: str, name: str, declared: bool) -> None:
    comes_back(format, ("call", name, '{"a":"1"}'), tools=None if declared else TOOLS)


@every
def test_names_that_are_refused(format: str) -> None:
    for name in ("", " ", "a\nb", "x" * (MAX_TOOL_NAME + 1), "x" * 2000):
        found = same(format, WRITERS[format].reply(("call", name, "{}")))
        assert not found.calls
    found = same(format, WRITERS[format].reply(("call", "f", '{"":"1"}')))
    assert not found.calls and found.error is not None


@every
def test_a_name_that_occurs_twice_is_an_error(format: str) -> None:
    once = WRITERS[format].reply(("call", "f", '{"one":"1","two":"2"}'))
    found = same(format, once.replace("two", "one"))
    assert found.parts == [] and found.error == "the model wrote a tool call that has 'one' twice"


@every
@pytest.mark.parametrize("escape", ["\\ud83d", "\\udcf0", "\\ude00\\ud83d"])
def test_half_a_character_within_a_value(format: str, escape: str) -> None:
    """As JSON it cannot be passed on; as plain text it is a backslash and letters."""
    for arguments in ('{"a":"#"}', '{"a":{"b":["#"]}}', '{"a":{"#":1}}'):
        part = ("call", "f", arguments)
        found = same(format, WRITERS[format].reply(part).replace("#", escape), tools=offering(part))
        for call in found.calls:
            assert escape.replace("\\", "\\\\") in call.arguments and decoded(call.arguments)
        assert found.calls or found.error == "the model wrote a tool call that is not valid JSON"


@every
def test_a_reply_that_is_cut(format: str) -> None:
    """At a limit what is not whole is left out; at a natural end a call that has begun is an error."""
    writer = WRITERS[format]
    lead: list[Part] = [("reasoning", "Hm.")] if format == "llama" else [("reasoning", "Hm."), ("text", "So.")]
    whole, before = writer.reply(*lead, A, B), writer.reply(*lead)
    completed = None
    for end in range(len(before), len(whole) + 1):
        cut = whole[:end]
        limited, natural = (same(format, cut, opens=writer.opens(*lead), natural=natural) for natural in (False, True))
        assert limited.error is None and natural.parts == limited.parts and natural.error in (None, CUT), cut
        calls = [part for part in limited.parts if part[0] == "call"]
        assert meaning(calls) == meaning([A, B][: len(calls)])
        shown = "".join(part[1] for part in limited.parts if part[0] == "text")
        rest = shown.removeprefix("" if format == "llama" else "So.").strip()
        assert writer.opener.startswith(rest) and rest != writer.opener
        if completed is None and calls:
            completed = end
        if completed is None and end >= len(before) + len(writer.opener):
            assert natural.error == CUT, cut
        if end == completed or end == len(whole):
            assert natural.error is None
    assert completed is not None and len(calls) == 2


@every
def test_what_stands_behind_a_complete_call_and_is_cut(format: str) -> None:
    """The beginning of what closes a call is left out as a missing closer is; any other text is shown."""
    writer = WRITERS[format]
    whole = writer.reply(A)
    first = next(end for end in range(len(whole) + 1) if read(format, whole[:end]).calls)
    for end in range(first, len(whole) + 1):
        for natural in (True, False):
            found = same(format, whole[:end], natural=natural)
            assert found.error is None and meaning(found.parts) == meaning([A])
    if writer.goes_on:
        for rest in ("Done.", "<b", "]x", "-"):
            found = same(format, whole + rest)
            assert found.error is None and found.parts[1:] == [("text", rest)]


@every
def test_closing_tags_that_are_repeated(format: str) -> None:
    writer = WRITERS[format]
    whole = writer.reply(A, B)
    first = next(end for end in range(len(whole) + 1) if len(read(format, whole[:end]).calls) == 2)
    found = same(format, whole + whole[first:])
    assert found.error is None and meaning([part for part in found.parts if part[0] == "call"]) == meaning([A, B])


@every
def test_calls_that_follow_each_other_at_once(format: str) -> None:
    writer = WRITERS[format]
    text = writer.reply(A) + writer.reply(B) if not writer.in_frames and writer.goes_on else writer.reply(A, B)
    found = same(format, text)
    assert found.error is None and meaning(found.parts) == meaning([A, B])


@every
def test_line_breaks_of_another_system_between_tags(format: str) -> None:
    found = same(format, WRITERS[format].reply(B, B).replace("\n", "\r\n"))
    assert found.error is None and meaning(found.parts) == meaning([B, B])


@every
def test_an_opener_that_is_quoted(format: str) -> None:
    writer = WRITERS[format]
    if not writer.mentions:
        return
    text = f"A call begins with `{writer.opener}`, which I use below."
    assert same(format, text).parts == [("text", text)]
    assert same(format, text, opens=True).parts == [("reasoning", text)]
    if format != "llama":
        found = same(format, f"{text} {writer.calls(A)}", opens=True)
        assert found.error is None and meaning(found.parts) == meaning([("reasoning", text + " "), A])


@every
def test_a_call_within_reasoning(format: str) -> None:
    writer = WRITERS[format]
    if format in ("llama", "muse_atem"):  # their reasoning ends at its delimiter alone
        found = same(format, "Hm. " + writer.calls(A), opens=True)
        assert found.parts == [("reasoning", "Hm. " + writer.calls(A))] and found.error is None
        return
    found = same(format, "Hm. " + writer.calls(A), opens=True)
    assert found.error is None and meaning(found.parts) == meaning([("reasoning", "Hm. "), A])
    limited = read(format, "Hm. " + writer.calls(A)[: len(writer.opener) + 1], opens=True, natural=False)
    assert limited.parts == [("reasoning", "Hm. ")] and limited.error is None


@every
def test_what_a_choice_of_tools_allows(format: str) -> None:
    writer = WRITERS[format]
    named, required = Tools(TOOLS.offered, "named", "f"), Tools(TOOLS.offered, "required")
    one = Tools(TOOLS.offered, parallel=False)
    answer: list[Part] = [("reasoning", "Hm."), ("text", "So."), A]
    found = same(format, writer.reply(*answer), opens=writer.opens(*answer), tools=named)
    assert found.error is None and meaning(found.parts) == meaning([answer[0], A])
    for natural in (True, False):
        for tools, parts, kept, says in (
            (named, [B], [], "called 'g'"),
            (named, [A, B], [A], "called 'g'"),
            (named, [("text", "So.")], [], "completed no call of 'f'"),
            (required, [("text", "So.")], [("text", "So.")], "completed no call"),
            (required, [("call", "h", "{}")], [("call", "h", "{}")], "completed no call"),
            (one, [A, B], [A], "a second tool call"),
        ):
            found = same(format, writer.reply(*parts), tools=tools, natural=natural)
            assert meaning(found.parts) == meaning(kept) and says in str(found.error)
        cut = writer.reply(A)[:-1].partition("x")[0]
        assert "completed no call" in str(read(format, cut, tools=required, natural=False).error)
    for tools in (required, one):
        found = same(format, writer.reply(A), tools=tools)
        assert found.error is None and meaning(found.parts) == meaning([A])
    found = same(format, writer.reply(("call", "h", "{}"), A), tools=required)
    assert found.error is None and len(found.calls) == 2


@every
def test_calls_where_none_may_come(format: str) -> None:
    """They are text, or left out with the frames that they stand in."""
    writer = WRITERS[format]
    text = writer.reply(("text", "So."), A)
    for tools in (Tools(), Tools(TOOLS.offered, "none")):
        found = same(format, text, tools=tools, natural=False)
        assert found.error is None and found.parts == [("text", "So." if writer.in_frames else text)]


@every
def test_custom_and_namespaced_tools(format: str) -> None:
    tools = Tools((Tool("patch", custom=True), Tool("spawn", namespace="agents"), Tool("spawn")))
    text = '*** 1\n"é" \\ \t<b>\n'
    parts: list[Part] = [
        ("call", "patch", dumped({"input": text})),
        ("call", "agents__spawn", "{}"),
        ("call", "spawn", "{}"),
        ("call", "other__spawn", "{}"),
    ]
    made = same(format, WRITERS[format].reply(*parts), tools=tools).calls
    assert [(call.namespace, call.name, call.arguments, call.custom) for call in made] == [
        (None, "patch", text, True),
        ("agents", "spawn", "{}", False),
        (None, "spawn", "{}", False),
        (None, "other__spawn", "{}", False),
    ]
    assert len({call.id for call in made}) == 4
    for wrong in ('{"text":"a"}', "{}", '{"input":"a","more":"b"}'):
        found = same(format, WRITERS[format].reply(("call", "patch", wrong)), tools=tools)
        assert not found.calls and "patch" in str(found.error)


@every
def test_the_bounds_of_arguments(format: str) -> None:
    fits = "ü" * ((MAX_ARGUMENTS_BYTES - len('{"a":""}')) // 2)
    for value, error in ((fits, None), (fits + "x", str(MAX_ARGUMENTS_BYTES))):
        part = ("call", "f", dumped({"a": value}))
        found = read(format, WRITERS[format].reply(part))
        assert len(found.calls) == (error is None) and (error or "") in str(found.error)
    chunks = ["x" * (1 << 20)] * 17
    begun = WRITERS[format].reply(("call", "f", '{"a":"#"}')).partition("#")[0]
    found = read(format, [begun, *chunks], natural=False)
    assert found.calls == [] and f"of more than {2 * MAX_ARGUMENTS_BYTES} bytes" in str(found.error)


@every
def test_white_space_that_comes_at_once_is_taken_at_once(format: str) -> None:
    """Before a call, between its tokens or tags, and behind it: beyond the length of a name, more of it costs no more."""
    options: Any = {"syntax": WRITERS[format].syntax, "tools": TOOLS}
    text = WRITERS[format].reply(A)
    lines_run([text], **options)  # what is made once is made
    for at in (place for place, char in enumerate(text) if char in "{<[]>}"):
        few, many = (lines_run([text[:at], " " * count, text[at:]], **options) for count in (2_000, 20_000))
        assert many <= few + 100, (text[:at], few, many)


@every
def test_the_depth_of_arguments(format: str) -> None:
    for levels, error in ((MAX_NESTING - 1, None), (MAX_NESTING, f"deeper than {MAX_NESTING} levels")):
        part = ("call", "f", '{"a":' + "[" * levels + "1" + "]" * levels + "}")
        found = same(format, WRITERS[format].reply(part), tools=offering(part))
        if format in ("qwen", "mimo", "glm", "muse_atem") and error:
            assert found.calls[0].arguments == f'{{"a":"{part[2][5:-1]}"}}'  # conversion fails no call
        else:
            assert len(found.calls) == (error is None) and (error or "") in str(found.error)


TEXTS = st.text(alphabet='ab \n"\\{}[]é🙂:,;=/&.', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, min_size=2, max_size=3) | st.dictionaries(st.sampled_from("pqr"), inner, max_size=2),
    max_leaves=6,
)
CALLS = st.tuples(
    st.just("call"),
    st.sampled_from(["f", "g.h", "n__k"]),
    st.dictionaries(st.sampled_from(["a", "b-c", "é", "d.e"]), VALUES, max_size=3).map(dumped),
)
PROSE = st.text(alphabet='ab.,!é🙂"-', min_size=1, max_size=8)
ANSWERS = st.lists(st.tuples(st.just("text"), PROSE) | CALLS, min_size=1, max_size=5)


@every
@settings(max_examples=60)
@given(PROSE, ANSWERS, st.lists(st.integers(0, 2000), max_size=30))
def test_any_reply_comes_back_however_it_is_cut(format: str, thought: str, answer: list[Part], cuts: list[int]) -> None:
    """Reasoning, prose and calls; neighbouring prose is joined."""
    writer: Writer = WRITERS[format]
    parts: list[Part] = [("reasoning", thought)]
    for number, part in enumerate(answer):
        if part[0] == "text" and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + part[1])
        elif part[0] == "call":
            parts.append((part[0], f"{part[1]}{number}", part[2]))
        else:
            parts.append(part)
    if not writer.goes_on:
        calls = [at for at in range(1, len(parts)) if parts[at - 1][0] == "call" != parts[at][0]]
        parts = parts[: calls[0]] if calls else parts
    text = writer.reply(*parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    found = read(format, pieces, tools=offering(*parts), opens=writer.opens(*parts))
    assert found.error is None, text
    assert meaning(found.parts) == meaning(parts)
