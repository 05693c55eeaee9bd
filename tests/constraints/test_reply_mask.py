"""The phases of a reply under a constraint: free reasoning, then an answer of the grammar, or a call."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from random import Random
from typing import Any

import pytest

from flare.constraints import CallTracker, ReplyMask
from flare.conversation import Tool, Tools
from flare.errors import MaskError
from flare.output import OutputSyntax, Way, make_output, reply_ways
from flare.output.syntaxes import FORMATS
from tests.constraints.driving import (
    STOP,
    VOCABULARY,
    allowed,
    compiled,
    ends,
    forbids,
    is_answer,
    json_mask,
    token,
    wander,
    write,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWER = '{"a": 12}'
NO_TOOLS = Tools()
TOOLS = Tools((Tool("f"),))
CLOSE, CALL = token("</think>"), token("<tool_call>")
BY_TOKEN = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"), close_token=CLOSE)
BY_TEXT = OutputSyntax(tools="hermes", reasoning=("<think>", "</end>"))


class _Decoder:
    def push(self, token: int) -> str:
        return VOCABULARY.text(token).decode(errors="replace")


def begun(
    syntax: OutputSyntax, *, tools: Tools = NO_TOOLS, opens: bool = False, kind: Any = "json_schema", what: Any = SCHEMA
) -> ReplyMask:
    ways = reply_ways(syntax, tools)
    assert ways is not None
    tracker = None
    if ways.undecided:
        machine = make_output(syntax, tools, opens_reasoning=opens, call_prefix="c", structured=True)
        tracker = CallTracker(_Decoder(), machine)
    return compiled(kind, what).start(ways, opens_reasoning=opens, tracker=tracker)


def free(mask: ReplyMask) -> bool:
    return allowed(mask) is None


def reasoning(mask: ReplyMask) -> bool:
    """Whether everything may come but what ends the reply."""
    may = allowed(mask)
    return may is not None and may >= set(range(VOCABULARY.size)) - VOCABULARY.stops and not may & VOCABULARY.stops


def test_without_ways_the_grammar_holds_from_the_first_token_to_the_last() -> None:
    mask = json_mask(SCHEMA)
    assert forbids(json_mask(SCHEMA), STOP) and forbids(json_mask(SCHEMA), CLOSE) and not ends(json_mask(SCHEMA))
    assert write(mask, ANSWER) and allowed(mask) == VOCABULARY.stops
    mask.accept(STOP)


def test_reasoning_ends_at_its_token_only() -> None:
    mask = begun(BY_TOKEN, opens=True)
    assert reasoning(mask) and forbids(begun(BY_TOKEN, opens=True), STOP)
    for text in ("Let me think {", "<", "/", "think", ">", ANSWER, "\n"):
        assert write(mask, text) and reasoning(mask)
    mask.accept(CLOSE)
    assert not reasoning(mask) and not ends(mask)
    assert is_answer(mask, "\n\n" + ANSWER)


def test_line_breaks_before_the_answer_have_an_end() -> None:
    mask = begun(BY_TOKEN, opens=True)
    mask.accept(CLOSE)
    count = 0
    while write(mask, "\n"):
        count += 1
        assert count < 20
    assert count == 8 and is_answer(mask, ANSWER)
    mask = begun(BY_TOKEN)
    assert not write(mask, "\n"), "nothing was reasoned, so the answer begins at once"


@pytest.mark.parametrize("pieces", [("</end>",), ("</", "end", ">"), ("<", "/", "e", "n", "d", ">")])
def test_reasoning_ends_at_a_text(pieces: tuple[str, ...]) -> None:
    mask = begun(BY_TEXT, opens=True)
    assert write(mask, "hm </en no")
    for piece in pieces:
        assert reasoning(mask) or piece[-1:] == ">"
        assert write(mask, piece)
    assert not reasoning(mask) and is_answer(mask, "\n" + ANSWER)


def test_no_token_ends_reasoning_and_begins_something_else() -> None:
    """A token that holds the end of the delimiter and more text would leave the grammar unasked."""
    mask = begun(OutputSyntax(reasoning=("<think>", "</a")), opens=True)
    assert write(mask, "x</")
    may = allowed(mask)
    assert may is not None
    beyond = set(VOCABULARY.beyond(b"a"))
    assert beyond and not beyond & may and set(VOCABULARY.leading(b"a")) <= may


def test_a_reply_may_open_reasoning_itself() -> None:
    mask = begun(BY_TOKEN)
    assert write(mask, "<think>") and reasoning(mask)
    mask.accept(CLOSE)
    assert is_answer(mask, ANSWER)
    by_token = BY_TOKEN.__class__(reasoning=("[INST]", "</think>"), open_token=token("[INST]"), close_token=CLOSE)
    mask = begun(by_token)
    assert token("[INST]") in (allowed(mask) or ()) and not write(begun(by_token), "[IN")
    mask.accept(token("[INST]"))
    assert reasoning(mask)


def test_an_answer_holds_delimiters_and_openers_as_text() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS, opens=True, what={"type": "string"})
    mask.accept(CLOSE)
    assert write(mask, '"see ')
    for inside in (CLOSE, CALL):
        assert inside in (allowed(mask) or ())
        mask.accept(inside)
    assert is_answer(mask, ' and so on"') and allowed(mask) == VOCABULARY.stops


CALLED = '\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
DEEPSEEK = OutputSyntax(tools="deepseek_dsml", reasoning=("<think>", "</think>"), close_token=CLOSE)


def deepseek(text: str | bytes, *, opens: bool, tools: Tools = TOOLS) -> tuple[str, str, int] | None:
    """Writes a reply token by token, as its mask allows; returns what its machine reads: reasoning, answer and calls."""
    mask, rest = begun(DEEPSEEK, tools=tools, opens=opens), text.encode() if isinstance(text, str) else text
    machine = make_output(DEEPSEEK, tools, opens_reasoning=opens, call_prefix="c", structured=True)
    assert machine is not None
    read = {"reasoning": "", "text": "", "call": ""}
    decoder = getincrementaldecoder("utf-8")()
    while rest:
        may = allowed(mask)
        found = [t for t in VOCABULARY.leading(rest) if may is None or t in may]
        if not found:
            return None
        best = max(found, key=lambda t: len(VOCABULARY.text(t)))
        mask.accept(best)
        rest = rest[len(VOCABULARY.text(best)) :]
        for piece in machine.push(best, decoder.decode(VOCABULARY.text(best))):
            read[piece.kind] += "." if piece.kind == "call" else piece.text
    for piece in machine.end(natural=True):
        read[piece.kind] += "." if piece.kind == "call" else piece.text
    return read["reasoning"], read["text"], len(read["call"])


def test_deepseeks_replies_are_read_as_their_masks_write_them() -> None:
    """Its format has no opening delimiter: where the prompt does not end within reasoning, none can come."""
    called = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert deepseek("so</think>\n\n" + ANSWER, opens=True) == ("so", ANSWER, 0)
    assert deepseek(ANSWER, opens=False) == ("", ANSWER, 0)
    assert deepseek("<think>so</think>\n" + ANSWER, opens=False) is None
    assert deepseek("so</think>\n\n" + called, opens=True) == ("so", "", 1)
    assert deepseek(called, opens=False) == ("", "", 1)
    assert deepseek(called, opens=False, tools=NO_TOOLS) is None
    assert deepseek("so</think>" + called, opens=True, tools=NO_TOOLS) is None
    mask = begun(DEEPSEEK, opens=True)
    assert write(mask, "so")
    mask.accept(CLOSE)
    assert is_answer(mask, "\n" + ANSWER), "the delimiter's own token closes too"


def test_line_breaks_of_the_answer_are_no_gap() -> None:
    """Where the answer may begin with line breaks, every one of them is its own."""
    for breaks, what in ((False, "ab|c"), (True, "\n?ab")):
        assert compiled("regex", what).breaks == breaks
    mask = begun(BY_TOKEN, tools=TOOLS, opens=True, kind="regex", what="\n?ab")
    mask.accept(CLOSE)
    assert write(mask, "\n") and not write(mask, "\n") and not write(mask, "<tool") and is_answer(mask, "ab")


@pytest.mark.parametrize("opens", [False, True])
def test_a_call_instead_of_the_answer(opens: bool) -> None:
    mask = begun(BY_TOKEN, tools=TOOLS, opens=opens)
    if opens:
        assert write(mask, "so")
        mask.accept(CLOSE)
        assert write(mask, "\n\n")
    assert CALL in (allowed(mask) or ())
    assert write(mask, "<tool_call>") and not ends(mask), "no call has begun yet"
    assert write(mask, CALLED) and free(mask)


def test_an_opener_in_pieces_is_one_and_nothing_else_follows_its_beginning() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS)
    assert write(mask, "<") and write(mask, "t")
    assert not write(mask, "x") and write(mask, "ool_call>") and write(mask, CALLED) and free(mask)


def test_a_call_within_reasoning_ends_it_and_a_mention_does_not() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS, opens=True)
    assert write(mask, "I could use <tool_call> for that") and reasoning(mask)
    assert write(mask, " <tool_call>" + CALLED) and free(mask)


def test_an_opener_without_a_call_fails() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS)
    assert write(mask, "<tool_call>")
    with pytest.raises(MaskError, match="began a tool call and went on with something else"):
        write(mask, "no object")


def test_without_tools_there_is_no_way_to_a_call() -> None:
    for tools in (Tools(), Tools((Tool("f"),), "none")):
        assert CALL not in (allowed(begun(BY_TOKEN, tools=tools)) or ())


def test_a_grammar_that_begins_as_an_opener_does() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS, kind="lark", what='start: "<tool" /[a-z]+/')
    assert is_answer(mask, "<toolbox")
    mask = begun(BY_TOKEN, tools=TOOLS, kind="lark", what='start: "<tool" /[a-z_]+>?.*/')
    assert write(mask, "<tool_call>" + CALLED) and free(mask)


def test_an_empty_answer() -> None:
    mask = begun(BY_TOKEN, tools=TOOLS, kind="regex", what="(ab)?")
    assert ends(mask) and is_answer(mask, "ab")


def test_a_bare_object_is_the_answer() -> None:
    """Llama's calls begin as JSON does: under a constraint an object is the answer, and only the tag begins a call."""
    ways = reply_ways(OutputSyntax(tools="llama"), TOOLS)
    assert ways is not None and ways.first == (Way("<|python_tag|>", "call"),)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_ways(name: str) -> None:
    syntax = OutputSyntax(tools=name, reasoning=("<think>", "</think>"), spelled=frozenset({CALL}))
    ways = reply_ways(syntax, TOOLS)
    assert ways is not None and ways.close
    assert any(way.to == "call" for way in ways.first) and any(way.to == "call" for way in ways.behind)
    assert ways.direct_behind or any(way.to == "answer" for way in ways.behind)
    assert ways.direct_first or any(way.to == "answer" for way in ways.first)
    without = reply_ways(syntax, Tools())
    assert without is not None and not any(way.to == "call" for way in (*without.first, *without.behind))


@pytest.mark.parametrize("name", ["kimi_xtml", "muse_atem"])
def test_frames_that_are_no_tokens_leave_no_way(name: str) -> None:
    assert reply_ways(OutputSyntax(tools=name), TOOLS) is None


def test_at_random_a_reply_is_reasoning_and_then_an_answer() -> None:
    random = Random(5)
    ended = 0
    for _ in range(10):
        mask = begun(BY_TOKEN, opens=True)
        for _ in range(random.randrange(30)):
            mask.accept(random.choice(sorted((allowed(mask) or set()) - {CLOSE})))
            assert reasoning(mask)
        mask.accept(CLOSE)
        text = wander(mask, random)
        if text is not None:
            ended += 1
            assert isinstance(json.loads(text.strip())["a"], int)
    assert ended >= 5


def test_replies_of_one_constraint_do_not_meet() -> None:
    one, other = begun(BY_TOKEN), begun(BY_TOKEN)
    assert write(one, '{"a"') and write(other, ANSWER) and allowed(other) == VOCABULARY.stops
    assert is_answer(one, ": 3}")


@pytest.mark.parametrize("choice", ["required", "named"])
def test_where_a_call_is_demanded_no_answer_stands_instead(choice: Any) -> None:
    mask = begun(BY_TOKEN, tools=Tools((Tool("f"),), choice, "f"), opens=True)
    mask.accept(CLOSE)
    assert not write(mask, "{") and write(mask, "<tool_call>" + CALLED) and free(mask)
