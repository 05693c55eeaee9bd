"""What a Messages request is refused for: every refusal names its field, and holds for its count too."""

from __future__ import annotations

from typing import Any

import pytest

from flare.conversation import Tools
from flare.errors import RequestError
from tests.protocols.messages_bodies import (
    PNG,
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

KEPT = {"type": "clear_thinking_20251015", "keep": "all"}


def test_keeping_all_thinking_is_the_only_edit() -> None:
    for edits in (None, [], [KEPT], [KEPT | {"keep": {"type": "all"}}, KEPT]):
        assert conversation(USER, context_management={"edits": edits}) == conversation(USER)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"context_management": {"edits": [KEPT, KEPT | {"trigger": 1}]}}, "context_management.edits[1]"),
    ({"context_management": {"compact": True}}, "context_management.compact"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [user(text("x", foo=1))]}, "messages[0].content[0].foo"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [user(call("t"))]}, "messages[0].content[0].type"),
    ({"messages": [user(marked("x"))]}, "messages[0].content[0].type"),
    ({"messages": [USER, assistant(result("t", "x")), USER]}, "messages[1].content[0].type"),
    ({"messages": [{"role": "system", "content": [result("t", "x")]}]}, "messages[0].content[0].type"),
    ({"messages": [user(text("a"), PNG)]}, "messages[0].content[1].type"),
    ({"messages": [user(result("t", [text("a"), PNG]))]}, "messages[0].content[0].content[1].type"),
    ({"messages": [USER, assistant(call("t", "")), USER]}, "messages[1].content[0].name"),
    (
        {"messages": [USER, assistant({"type": "tool_use", "id": "", "name": "f", "input": {}})]},
        "messages[1].content[0].id",
    ),
    (
        {"messages": [USER, assistant({"type": "tool_use", "id": "t", "name": "f", "input": "{}"})]},
        "messages[1].content[0].input",
    ),
    ({"messages": [USER, assistant({"type": "redacted_thinking", "data": "x"}), USER]}, "messages[1].content[0].type"),
    ({"system": [PNG]}, "system[0].type"),
    ({"system": [{"text": "x"}]}, "system[0].type"),
    ({"messages": [user(result("t", [{"text": "x"}]))]}, "messages[0].content[0].content[0].type"),
    ({"system": 5}, "system"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    ({"tools": [TOOLS[0] | {"strict": True}]}, "tools[0].strict"),
    ({"tools": [TOOLS[0] | {"input_examples": [{"q": "x"}]}]}, "tools[0].input_examples"),
    ({"tools": [TOOLS[0] | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "c"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "a"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0]"),
    (
        {
            "context_management": {
                "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
            }
        },
        "context_management.edits[0]",
    ),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["é" * 2049]}, "stop_sequences"),
    ({"stop_sequences": ["a"], "stop_token_ids": [3]}, "stop_token_ids"),
    ({"stop_sequences": ["a"], "stop_token_sequences": [[3]]}, "stop_token_sequences"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"mystery": 1}, "mystery"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{i}-{param}" for i, (_, param) in enumerate(REFUSED)])
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    if fields == {"max_tokens": None}:
        with pytest.raises(RequestError) as caught:
            decode(**fields)
        assert caught.value.param == param
    else:
        assert refusal(**fields).param == param


def test_a_model_without_tools_refuses_them_and_what_tells_of_them() -> None:
    plain = make_model()
    assert conversation(USER, model=plain, tools=[]).tools == Tools()
    assert refusal(plain, tools=TOOLS).param == "tools"
    assert refusal(plain, tool_choice={"type": "any"}).param == "tool_choice"
    unasked = conversation(USER, model=plain, tools=TOOLS, tool_choice={"type": "none"}).tools
    assert unasked.choice == "none" and len(unasked.offered) == len(TOOLS)
    assert refusal(plain, messages=[USER, assistant(call("t")), USER]).param == "messages[1].content[0].type"
    assert refusal(plain, messages=[user(result("t", "x"))]).param == "messages[0].content[0].type"
    assert refusal(make_model(has_template=False)).param == "messages"
