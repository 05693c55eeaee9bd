"""Bodies of Messages to neutral requests: what becomes of every kind of block, field and marker."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import Boundary, Message, Thinking, Tool, ToolCall, Tools
from flare.errors import RequestError
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.messages_thinking import MARKER, Marker
from flare.thinking import template_variables
from tests.protocols.messages_bodies import (
    EPHEMERAL,
    MODEL,
    SCHEMA,
    TOOLS,
    USER,
    assistant,
    call,
    conversation,
    decode,
    marked,
    refusal,
    result,
    text,
    user,
)
from tests.support.live_server import make_model


def test_system_text_in_every_place_and_form() -> None:
    hook = {"role": "system", "content": [text("Hook says 7.")], "output_config": {"effort": "high"}}
    empty = {"role": "system", "content": ""}
    blocks = [text("Top.", cache_control=EPHEMERAL), text(""), text("More.")]
    expected = [
        Message("system", "Top.\n\nMore."),
        Message("user", "a"),
        Message("system", "Hook says 7."),
        Message("user", "b"),
    ]
    turns = ({"role": "user", "content": "a"}, hook, {"role": "user", "content": "b"}, empty)
    assert conversation(*turns, system=blocks).messages == expected
    assert conversation(*turns, system="Top.\n\nMore.").messages == expected
    for nothing in ("", [], [text("")], None):
        assert conversation(USER, system=nothing).messages == [Message("user", "hi")]


@pytest.mark.parametrize("tail", ["", "\nKeep this."])
def test_the_billing_header_never_reaches_the_prompt(tail: str) -> None:
    prompts = [
        conversation(USER, system=[text(f"x-anthropic-billing-header: cc_version=2.{build};{tail}"), text("You are.")])
        for build in ("1.abc", "2.def")
    ]
    assert prompts[0] == prompts[1]
    kept = "Keep this.\n\nYou are." if tail else "You are."
    assert prompts[0].messages[0] == Message("system", kept)
    spoken = conversation(user(text("x-anthropic-billing-header: what is that?")))
    assert spoken.messages == [Message("user", "x-anthropic-billing-header: what is that?")]


def test_an_assistants_blocks() -> None:
    thought = {"type": "thinking", "thinking": "plan", "signature": "EvQBCk"}
    other = {"type": "thinking", "thinking": "", "signature": "opaque"}
    used = call("t1", "read", {"b": 1.50, "a": [None, "é"]}) | {
        "caller": {"type": "direct"},
        "cache_control": EPHEMERAL,
    }
    said = conversation(
        USER, assistant(thought, text("One.", citations=None), other, text("Two."), used), user(result("t1"))
    )
    assert said.messages[1] == Message(
        "assistant", "One.\n\nTwo.", "plan", (ToolCall("t1", "read", '{"b":1.5,"a":[null,"é"]}'),)
    )
    assert said.messages[2] == Message("tool", "", call_id="t1")


def test_results_and_texts_of_one_message_keep_their_order() -> None:
    turn = user(
        text("before"),
        result("t2", "two", is_error=True),
        result("t1", [text("half"), text("page")], is_error=False),
        text("after"),
        text("all"),
        result("unknown", []),
    )
    said = conversation(USER, assistant(call("t1", "a"), call("t2", "b")), turn)
    assert said.messages[2:] == [
        Message("user", "before"),
        Message("tool", "<error>\ntwo\n</error>", call_id="t2"),
        Message("tool", "half\n\npage", call_id="t1"),
        Message("user", "after\n\nall"),
        Message("tool", "", call_id="unknown"),
    ]


def test_an_empty_message_stays_a_message() -> None:
    assert conversation(user()).messages == [Message("user", "")]
    assert conversation({"role": "user", "content": ""}).messages == [Message("user", "")]


@given(st.text(), st.text())
def test_a_marker_belongs_to_one_text(first: str, second: str) -> None:
    assert str(Marker(first)).startswith(MARKER)
    pieces = Marker()
    for letter in first:
        pieces.add(letter)
    assert str(pieces) == str(Marker(first))
    assert (str(Marker(first)) == str(Marker(second))) == (first == second)


def test_replayed_markers_are_checked() -> None:
    assert conversation(USER, assistant(marked("plan"), text("x")), USER).messages[1].reasoning == "plan"
    for altered in (marked("plan") | {"thinking": "another"}, marked("plan") | {"signature": MARKER}):
        error = refusal(messages=[USER, assistant(text("x"), altered), USER])
        assert error.param == "messages[1].content[1].signature"
    foreign = {"type": "thinking", "thinking": "edited", "signature": "someone-else:abc"}
    assert conversation(USER, assistant(foreign), USER).messages[1].reasoning == "edited"


@given(st.lists(st.tuples(st.booleans(), st.text(max_size=4), st.booleans()), max_size=8), st.booleans())
def test_a_marked_block_ends_where_its_boundary_is(blocks: list[tuple[bool, str, bool]], with_system: bool) -> None:
    """Over any mix of texts and results: the markers change no message, and each points behind its block's text."""

    def turn(marks: bool) -> dict[str, Any]:
        more = [{"cache_control": EPHEMERAL} if marks and mark else {} for _, _, mark in blocks]
        return user(
            *[
                result("t", said, **m) if is_result else text(said, **m)
                for (is_result, said, _), m in zip(blocks, more, strict=True)
            ]
        )

    system = "S" if with_system else ""
    plain, hinted = (conversation(turn(marks), system=system) for marks in (False, True))
    assert plain.messages == hinted.messages and not plain.boundaries
    ends = [hinted.messages[b.message].text[: b.characters] for b in hinted.boundaries]
    expected = [said for _, said, mark in blocks if mark and said][:4]
    assert len(ends) <= 4 and all(end for end in ends)
    if all(said for _, said, _ in blocks):
        assert len(ends) == len(expected)
        assert all(end.endswith(said) for end, said in zip(ends, expected, strict=True))
    assert list(hinted.boundaries) == sorted(hinted.boundaries, key=lambda b: (b.message, b.characters))


def test_only_a_users_blocks_hold_boundaries_and_only_four_of_them() -> None:
    m = {"cache_control": EPHEMERAL}
    said = conversation(
        user(text("aa", **m), text("b")),
        assistant(text("x", **m), call("t1") | m),
        user(result("t1", [text("in", **m)], **m), text("c", **m), text("dd", **m)),
        {"role": "system", "content": [text("s", **m)]},
        user(text("e", **m), text("f", **m)),
        system=[text("S", **m)],
        tools=[{"name": "f", "input_schema": {}, **m}],
        **m,
    )
    assert said.boundaries == (Boundary(1, 2), Boundary(3, 2), Boundary(4, 1), Boundary(4, 5))


def test_many_marked_blocks_cost_what_unmarked_ones_do() -> None:
    blocks = [text("x" * 200) for _ in range(60_000)]
    body = json.dumps({"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}).encode()
    marked = body.replace(b'"type": "text"', b'"type": "text", "cache_control": {"type": "ephemeral"}')
    started = time.process_time()
    (plain,) = Messages().decode(body, MODEL).generation.prompts
    between = time.process_time()
    (hinted,) = Messages().decode(marked, MODEL).generation.prompts
    assert time.process_time() - between < 100 * (between - started)  # joined one by one: 1000 times
    assert hinted.messages == plain.messages and len(hinted.boundaries) == 4


def test_a_last_assistant_message_is_continued() -> None:
    said = conversation(USER, {"role": "assistant", "content": "The answer is"})
    assert said.continue_final and said.messages[-1] == Message("assistant", "The answer is")
    assert conversation(USER, assistant(text("x")), {"role": "system", "content": ""}).continue_final
    assert not conversation(USER, assistant(text("x")), {"role": "system", "content": "y"}).continue_final
    assert refusal(messages=[USER, assistant(text("x"), call("t1"))]).param == "messages"


OFFERED = (Tool("a", "d", SCHEMA), Tool("b", None, {}))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, Tools(OFFERED)),
        ({"type": "auto"}, Tools(OFFERED)),
        ({"type": "auto", "disable_parallel_tool_use": True}, Tools(OFFERED, parallel=False)),
        ({"type": "any"}, Tools(OFFERED, "required")),
        ({"type": "any", "disable_parallel_tool_use": True}, Tools(OFFERED, "required", parallel=False)),
        ({"type": "tool", "name": "b"}, Tools(OFFERED, "named", "b")),
        ({"type": "none"}, Tools(OFFERED, "none")),
    ],
)
def test_tools_and_the_choice_between_them(choice: Any, expected: Tools) -> None:
    assert conversation(USER, tools=TOOLS, tool_choice=choice).tools == expected


def test_tools_of_real_clients() -> None:
    extras = {"defer_loading": True, "eager_input_streaming": True, "strict": False, "allowed_callers": ["direct"]}
    assert conversation(USER, tools=[TOOLS[0] | extras]).tools.offered == OFFERED[:1]
    assert conversation(USER, tools=[], tool_choice={"type": "auto"}).tools == Tools()
    relaxed = make_model(output=MODEL.output, strict_tools="relax")
    assert conversation(USER, tools=[TOOLS[0] | {"strict": True}], model=relaxed).tools.offered == OFFERED[:1]


LEVELS = ("none", "low", "medium", "xhigh")
THINKS = {
    "supported": True,
    "source": "probe",
    "toggle": "enable_thinking",
    "effort": "reasoning_effort",
    "default_level": "medium",
    "levels": [
        {
            "id": id,
            "default": id == "medium",
            "enable_thinking": id != "none",
            "reasoning_effort": None if id == "none" else id,
            "opens_reasoning": id != "none",
        }
        for id in LEVELS
    ],
}


@pytest.mark.parametrize(
    ("thinking", "effort", "level"),
    [
        (None, None, None),
        ({"type": "disabled"}, None, "none"),
        ({"type": "disabled"}, "high", "none"),
        ({"type": "enabled"}, None, "medium"),
        ({"type": "adaptive", "display": "omitted"}, None, "medium"),
        ({"type": "enabled", "budget_tokens": 1}, None, "low"),
        ({"type": "enabled", "budget_tokens": 5_000}, None, "low"),
        ({"type": "enabled", "budget_tokens": 5_001}, None, "xhigh"),
        ({"type": "enabled", "budget_tokens": 20_000}, None, "xhigh"),
        ({"type": "adaptive", "budget_tokens": 20_001}, None, "xhigh"),
        ({"type": "enabled", "budget_tokens": 2**40}, None, "xhigh"),
        ({"type": "enabled", "budget_tokens": 2**40}, "low", "low"),
        ({"type": "adaptive"}, "medium", "medium"),
        ({"type": "adaptive"}, "max", "xhigh"),
        (None, "minimal", "low"),
        (None, "none", "none"),
    ],
)
def test_thinking_becomes_the_nearest_level(thinking: Any, effort: str | None, level: str | None) -> None:
    model = make_model(thinking=THINKS)
    output = None if effort is None else {"effort": effort}
    asked = conversation(USER, model=model, thinking=thinking, output_config=output).thinking
    variables = template_variables(asked, THINKS)
    row = next((row for row in THINKS["levels"] if row["id"] == level), None)
    expected = {} if row is None else {"enable_thinking": row["enable_thinking"]}
    if row is not None and row["reasoning_effort"] is not None:
        expected["reasoning_effort"] = row["reasoning_effort"]
    assert variables == expected
    assert template_variables(asked, MODEL.thinking) == {}, "a model without thinking takes all of them"


def test_budgets_choose_between_low_high_and_max() -> None:
    names = {
        budget: conversation(USER, thinking={"type": "enabled", "budget_tokens": budget}).thinking.level
        for budget in (5_000, 5_001, 20_000, 20_001)
    }
    assert names == {5_000: "low", 5_001: "high", 20_000: "high", 20_001: "max"}
    assert conversation(USER).thinking == Thinking(
        nearest=True, level_field="output_config.effort", switch_field="thinking.type"
    )


def test_what_concerns_the_answer() -> None:
    asked = decode(max_tokens=7, temperature=0.5, top_k=3, top_p=0.9, seed=1, stop_sequences=["a", "b"], stream=True)
    assert (asked.max_tokens, asked.stop, asked.n) == (7, ("a", "b"), 1)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p, asked.sampling.seed) == (
        0.5,
        3,
        0.9,
        1,
    )
    assert decode(stop_token_ids=[3]).stop_token_ids == {3}
    assert Messages().decode(b'{"max_tokens":1,"stream":true,"messages":[{"role":"user","content":"x"}]}', MODEL).stream


def test_counting_prepares_the_same_prompt() -> None:
    body = {
        "messages": [USER],
        "system": "s",
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "thinking": {"type": "adaptive"},
    }
    counted = CountTokens().count(json.dumps(body).encode(), MODEL)
    assert counted.prompts == decode(**body).prompts
    assert counted.max_tokens == 0, "no limit, no room needed: a prompt of any length is counted"
    assert json.loads(CountTokens().encode(17)) == {"input_tokens": 17}
    with pytest.raises(RequestError, match="max_tokens: this field is required"):
        Messages().decode(json.dumps(body).encode(), MODEL)
