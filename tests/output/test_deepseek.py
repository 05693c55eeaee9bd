"""DeepSeek's replies: reasoning, answer and calls in DSML, with the official package as the judge."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING, Tool, Tools
from flare.output import OutputSyntax
from tests.output.feeding import OTHER, Fed, Pushed, feed, same_for_all_splits
from tests.output.work import assert_linear

SYNTAX = OutputSyntax(tools="deepseek_dsml", reasoning=("<think>", "</think>"))
TOOLS = Tools((Tool("sh"), Tool("clock")))

OPEN, CLOSE = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"


def parameter(name: str, value: str, *, string: bool = True, gap: str = "") -> str:
    flag = "true" if string else "false"
    return f'<｜DSML｜{gap}parameter name="{name}" string="{flag}">{value}</｜DSML｜{gap}parameter>\n'


def invoke(name: str, *parameters: str, gap: str = "") -> str:
    return f'<｜DSML｜{gap}invoke name="{name}">\n{"".join(parameters)}</｜DSML｜{gap}invoke>\n'


def block(*invokes: str) -> str:
    return OPEN + "".join(invokes) + CLOSE


def read(text: str, **options: Any) -> Fed:
    return same_for_all_splits(text, **{"syntax": SYNTAX, "tools": TOOLS} | options)


LS = invoke("sh", parameter("cmd", "ls /nope 2>&1"), parameter("tries", "2", string=False))
LISTED = ("call", "sh", '{"cmd":"ls /nope 2>&1","tries":2}')
CLOCK = ("call", "clock", "{}")


@pytest.mark.parametrize(
    ("text", "opens", "parts"),
    [
        ("Hi.\n", False, [("text", "Hi.\n")]),
        ("Hm.\n</think>\n\nYes.", True, [("reasoning", "Hm."), ("text", "Yes.")]),
        ("cut", True, [("reasoning", "cut")]),
        (block(LS), False, [LISTED]),
        ("\n\n" + block(LS), False, [LISTED]),
        ("See:\n\n" + block(LS, invoke("clock")), False, [("text", "See:"), LISTED, CLOCK]),
        ("I need it.</think>\n\n" + block(LS), True, [("reasoning", "I need it."), LISTED]),
        ("I need it.\n\n" + block(LS), True, [("reasoning", "I need it."), LISTED]),
        (block(LS) + "and more, <｜DSML｜tool_calls>", False, [LISTED]),  # what follows the block is discarded
        ("So " + LS, False, [("text", "So "), LISTED]),  # no outer tags
        (OPEN + LS, False, [LISTED]),
        ("a < b, </b> <｜DSM", False, [("text", "a < b, </b> <｜DSM")]),
        (
            block(
                invoke("sh", parameter("a", ' "é" \\ \n<b>&amp;'), parameter("b", '{"x": [1.50, null]}', string=False))
            ),
            False,
            [("call", "sh", '{"a":" \\"é\\" \\\\ \\n<b>&amp;","b":{"x":[1.50,null]}}')],
        ),
    ],
)
def test_parts_of_a_reply(text: str, opens: bool, parts: list[Any]) -> None:
    found = read(text, opens=opens)
    assert (found.parts, found.error) == (parts, None)


def test_the_other_spelling_of_the_tags() -> None:
    text = "<｜DSML｜ calls>\n" + LS.replace("｜DSML｜", "｜DSML｜ ") + "</｜DSML｜ calls> over"
    assert read(text).parts == [LISTED]


B15 = [
    "Run it.",
    (1, "</think>"),
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="sh">\n<｜DSML｜parameter name="cmd" string="true">ls /nope 2>&1'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="tries" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
]


@given(st.sets(st.integers(0, 250)))
def test_a_closing_tag_behind_an_ampersand(cuts: set[int]) -> None:
    pushed: list[str | Pushed] = []
    for item in B15:
        if isinstance(item, tuple):
            pushed.append(item)
        else:
            places = sorted({0, len(item), *(cut for cut in cuts if cut < len(item))})
            pushed += [item[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    found = feed(pushed, syntax=SYNTAX, tools=TOOLS, opens=True)
    assert (found.parts, found.error) == ([("reasoning", "Run it."), LISTED], None)


@pytest.mark.parametrize(
    "call",
    [
        invoke("sh", parameter("cmd", "a"), parameter("cmd", "b")),
        invoke("sh", parameter("n", '{"a": 1, "a": 2}', string=False)),
        invoke("sh", parameter("", "a")),
        invoke(""),
        invoke(" "),
        invoke("sh", parameter("n", "", string=False)),
        invoke("sh", parameter("n", "two", string=False)),
        invoke("sh", parameter("n", "2}", string=False)),
        invoke("sh", parameter("n", "{}}", string=False)),
        invoke("sh", parameter("n", "[1", string=False)),
        invoke("sh", parameter("n", '"a', string=False)),
        invoke("sh", parameter("n", "NaN", string=False)),
        invoke("sh", parameter("n", '1, "m": 2, "n": 3', string=False)),
        invoke("sh", parameter("n", "[" * MAX_NESTING + "]" * MAX_NESTING, string=False)),
        "<｜DSML｜invoke nome='sh'></｜DSML｜invoke>",
        "",
    ],
)
def test_calls_that_are_refused(call: str) -> None:
    for natural in (True, False):
        found = read("So" + block(LS, call), natural=natural)
        if call:
            assert found.parts == [("text", "So"), LISTED] and found.error is not None
            assert "DSML" not in found.error or "valid DSML" in found.error
        else:
            assert found.error is None
        assert read("So" + block(call), natural=natural).error is not None


@pytest.mark.parametrize("cut", range(1, len(OPEN + LS)))
def test_a_call_that_is_cut(cut: int) -> None:
    begun = (OPEN + LS)[:cut]
    complete = cut >= (OPEN + LS).rindex("invoke>")
    limited, natural = (read("So: " + begun, natural=natural) for natural in (False, True))
    assert limited.error is None
    if complete:
        assert limited.parts == natural.parts == [("text", "So: "), LISTED] and natural.error is None
    elif cut < len("<｜DSML｜"):
        assert limited.parts == natural.parts == [("text", "So: " + begun)] and natural.error is None
    else:
        assert limited.parts == natural.parts == [("text", "So: ")] and natural.error is not None


def test_a_second_call_that_is_cut() -> None:
    for rest in ("<｜DSML｜", '<｜DSML｜invoke name="', invoke("clock")[:-12]):
        limited, natural = (read(OPEN + LS + rest, natural=natural) for natural in (False, True))
        assert limited.parts == natural.parts == [LISTED]
        assert limited.error is None and natural.error is not None
    value = OPEN + '<｜DSML｜invoke name="sh">' + parameter("n", "{}}", string=False)[: -len("</｜DSML｜parameter>\n")]
    assert read(value, natural=False).parts == []  # it looked complete, and is not


def test_a_delimiter_as_text() -> None:
    """The parser recognises delimiters by their text, as the model's maker does."""
    assert read("Its close</think>is", opens=True).parts == [("reasoning", "Its close"), ("text", "is")]
    assert read("<think>a", opens=True).parts == [("reasoning", "<think>a")]
    assert read("a</think>b</think>c", opens=True).parts == [("reasoning", "a"), ("text", "bc")]


def test_without_tools_calls_are_text() -> None:
    text = block(LS)
    for tools in (Tools(), Tools(TOOLS.offered, "none")):
        assert read("Hm</think>" + text, opens=True, tools=tools).parts == [("reasoning", "Hm"), ("text", text)]
        assert read("Hm" + text, opens=True, tools=tools).parts == [("reasoning", "Hm" + text)]
        assert read(text[:60], tools=tools).error is None


def test_reasoning_tokens_are_those_before_the_delimiter() -> None:
    def count(*tokens: str | Pushed, opens: bool = True) -> int:
        return feed(tokens, syntax=SYNTAX, tools=TOOLS, opens=opens).reasoning_tokens

    for text, expected in (
        ("hmm</think>yes", 3),
        ("\nh\n\n</think>\n\nyes", 4),
        ("h</th < m", 9),
        ("h</th</think>yes", 6),
        ("h\n" + block(LS), 2),
        ("h</thi", 6),
        ("h\n\n", 3),
    ):
        assert count(*text) == expected, text
    assert count("hm", "</think>", "yes") == 1
    assert count("hm</think>", "\n\n", "yes") == 1
    assert count("hm", "", "\n", "</think>", "", "yes") == 3
    assert count("h", "", (-1, "\ufffd")) == 2
    assert count("h", (-1, "\n")) == 1
    assert count("yes", "</think>", "\n", opens=False) == 0


def test_the_bounds_of_calls() -> None:
    fits = "x" * (MAX_ARGUMENTS_BYTES - len('{"a":""}'))
    for value, error in ((fits, False), (fits + "x", True)):
        found = feed(block(invoke("sh", parameter("a", value))), syntax=SYNTAX, tools=TOOLS)
        assert (found.error is not None) is error and len(found.calls) == (not error)
    chunk = "x" * (1 << 20)
    for begin in (OPEN + '<｜DSML｜invoke name="', OPEN, OPEN + '<｜DSML｜invoke name="sh"><｜DSML｜parameter name="'):
        found = feed([begin, *[chunk] * 17], syntax=SYNTAX, tools=TOOLS, natural=False)
        assert found.error is not None and "bytes" in found.error
        assert feed([begin, *[chunk] * 15], syntax=SYNTAX, tools=TOOLS, natural=False).error is None
    many = [block(*[invoke("sh", parameter("a", chunk))] * 20)]
    assert len(feed(many, syntax=SYNTAX, tools=TOOLS).calls) == 20  # each by itself


def judged(text: str, *, thinking: bool) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, answer and calls of a whole reply, as the package's own Chat Completions response has them."""
    from deepseek_recipe import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        Conversation,
        ConversationRequest,
        InferenceChunk,
        InferenceFinishReason,
        ModelVersion,
        ParsingOptions,
        StreamProcessor,
        ThinkingInitialStage,
    )

    request = ConversationRequest(Conversation(thinking_mode=thinking), ModelVersion.DeepseekV4Pro)
    options = ParsingOptions(thinking_initial_stage=ThinkingInitialStage.ReasoningStart if thinking else None)
    processor = StreamProcessor(ChatCompletionRequest.chunk_generator(request, "id", "m"), options)
    response = ChatCompletionResponse("id", "m", 0, 0, 0)
    last = InferenceChunk.finish(InferenceFinishReason.Stop)
    for chunk in (InferenceChunk.ready(), InferenceChunk.text(text, 1), last):
        for made in processor.push(chunk):
            response.accumulate(made)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message.get("reasoning_content") or "", message.get("content") or "", calls


PROSE = st.text(alphabet="abé <>/&\n\"'{}\\｜🙂", max_size=30).filter(lambda text: "<｜DSML｜" not in text)
NAMES = st.text(alphabet="abcé_-.\\ ", min_size=1, max_size=12).filter(str.strip)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PROSE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(alphabet="abcé_-.", min_size=1, max_size=12)  # the package takes no white space in names of parameters
ARGUMENTS = st.dictionaries(KEYS, JSON, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)


def written(calls: list[tuple[str, dict[str, Any]]], *, spaced: bool, indent: int | None) -> str:
    gap, outer = (" ", " calls") if spaced else ("", "tool_calls")
    invokes = "".join(
        invoke(
            name,
            *(
                parameter(key, value, gap=gap)
                if isinstance(value, str)
                else parameter(key, json.dumps(value, indent=indent, ensure_ascii=False), string=False, gap=gap)
                for key, value in arguments.items()
            ),
            gap=gap,
        )
        for name, arguments in calls
    )
    return f"<｜DSML｜{outer}>\n{invokes}</｜DSML｜{outer}>" if calls else ""


@settings(max_examples=60)
@given(PROSE, PROSE, CALLS, st.booleans(), st.booleans(), st.sampled_from([None, 1]), st.sets(st.integers(0, 400)))
def test_any_reply_reads_as_the_package_reads_it(
    reasoning: str,
    answer: str,
    calls: list[tuple[str, dict[str, Any]]],
    thinking: bool,
    spaced: bool,
    indent: int | None,
    cuts: set[int],
) -> None:
    text = (reasoning + "</think>" if thinking else "") + answer + written(calls, spaced=spaced, indent=indent)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    expected = judged(text, thinking=thinking)
    assert expected[2] == [(name, arguments) for name, arguments in calls]
    for split in (pieces, [text], list(text)):
        found = feed(split, syntax=SYNTAX, tools=TOOLS, opens=thinking)
        assert found.error is None
        kinds = [part[0] for part in found.parts]
        assert kinds == sorted(kinds, key=["reasoning", "text", "call"].index)
        joined = {kind: "".join(part[1] for part in found.parts if part[0] == kind) for kind in ("reasoning", "text")}
        made = [(part[1], json.loads(part[2])) for part in found.parts if part[0] == "call"]
        assert (joined["reasoning"], joined["text"], made) == expected
        for (_, arguments), (_, wanted) in zip(made, calls, strict=True):
            assert list(arguments) == list(wanted)


FRAGMENTS = [
    *("<｜DSML｜", "</｜DSML｜", "tool_calls>", " calls>", 'invoke name="', '">', "invoke>", "</think>", "<think>"),
    *("parameter>", 'parameter name="k" string="true">', 'parameter name="n" string="false">', "｜", "<", "</", "\n"),
    *("a", "}", "{", '"', "2", " ", "é", LS, OPEN, CLOSE, invoke("clock")),
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([TOOLS, Tools(), Tools(TOOLS.offered, "named", "sh"), Tools(TOOLS.offered, parallel=False)]),
)
def test_any_split_gives_the_same(fragments: list[str], opens: bool, natural: bool, tools: Tools) -> None:
    text = "".join(fragments)
    options = {"syntax": SYNTAX, "tools": tools, "opens": opens, "natural": natural}
    whole = feed(text, **options)
    for split in (fragments, list(text), [piece for char in text for piece in ((OTHER, char), (OTHER, ""))]):
        found = feed(split, **options)
        assert (found.parts, found.error) == (whole.parts, whole.error)


@pytest.mark.parametrize(
    ("head", "unit"),
    [
        ("", OPEN),
        ("", "｜"),
        ("", "\n"),
        ("", "<"),
        ("", "</think>"),
        ("", "prose "),
        (OPEN, "x"),
        (OPEN, "</｜DSML｜"),
        (OPEN, '<｜DSML｜invoke name="f"></｜DSML｜'),
        (OPEN + '<｜DSML｜invoke name="f">', parameter("k", "v")),
        (OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">', "｜}"),
        (OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="false">[', "1,"),
        (OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="false">', "["),
    ],
)
def test_work_grows_with_the_length(head: str, unit: str) -> None:
    assert_linear(head, unit, syntax=SYNTAX, tools=TOOLS)
    assert_linear(head, unit, syntax=SYNTAX, tools=TOOLS, opens=True)


def test_the_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flare.errors import InputError
    from flare.output import require

    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(InputError, match=r"deepseek_dsml.*pip install 'flare-ignition\[deepseek\]'") as caught:
        require(SYNTAX)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    require(OutputSyntax(tools="hermes"))
    require(OutputSyntax())


def test_a_close_whose_spelling_is_left_out_closes() -> None:
    syntax = OutputSyntax(tools="deepseek_dsml", reasoning=("<think>", "</think>"), close_token=7)
    for spelling in ("", "</think>"):
        fed = feed([(OTHER, "Hm."), (7, spelling), (OTHER, "Yes.")], syntax=syntax, tools=TOOLS, opens=True)
        assert (fed.parts, fed.reasoning_tokens) == ([("reasoning", "Hm."), ("text", "Yes.")], 1)
        fed = feed(
            [(OTHER, "Hm."), (OTHER, "<"), (7, spelling), (OTHER, "Yes.")], syntax=syntax, tools=TOOLS, opens=True
        )
        assert (fed.parts, fed.reasoning_tokens) == ([("reasoning", "Hm.<"), ("text", "Yes.")], 2)


def test_the_token_that_closes_reasoning_comes_with_the_rest_of_a_text() -> None:
    """Bytes that were held back may become text with a special token, whose own spelling is left out."""
    syntax = OutputSyntax(tools="deepseek_dsml", reasoning=("<think>", "</think>"), close_token=7)
    for text in ("é", "", "é</think>"):
        found = feed([(OTHER, "Hm"), (7, text), (OTHER, "Yes")], syntax=syntax, tools=TOOLS, opens=True)
        assert found.parts == [("reasoning", "Hm" + text.removesuffix("</think>")), ("text", "Yes")]
