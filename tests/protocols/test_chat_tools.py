"""Tools in Chat Completions requests: what is offered, what must be called, and the calls of earlier turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import (
    MAX_ARGUMENTS_BYTES,
    MAX_NESTING,
    MAX_TOOL_NAME,
    Message,
    Tool,
    ToolCall,
    Tools,
)
from flare.errors import RequestError
from flare.output import OutputSyntax, make_output
from flare.prompting import template_tools
from flare.protocols.chat import ChatCompletions
from flare.served import ServedModel
from tests.support.live_server import make_model

CHAT = ChatCompletions()
MODEL = make_model(output=OutputSyntax(tools="hermes"))
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def tools(model: ServedModel = MODEL, **fields: Any) -> Tools:
    """The neutral tools of a request with these fields."""
    body = json.dumps({"messages": [USER], **fields}).encode()
    (prompt,) = CHAT.decode(body, model).generation.prompts
    return prompt.tools


def messages(*sent: Any, model: ServedModel = MODEL) -> list[Message]:
    body = json.dumps({"messages": [USER, *sent]}).encode()
    (prompt,) = CHAT.decode(body, model).generation.prompts
    return prompt.messages[1:]


def assistant(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def call(arguments: Any, name: Any = "look", **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def refusal(decode: Any, *arguments: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(*arguments, **fields)
    error = caught.value
    assert error.status == 400 and error.type == "invalid_request_error" and error.param
    assert str(error).startswith(f"{error.param}: ") and "\n" not in str(error) and len(str(error)) < 300
    return error


def test_what_is_offered() -> None:
    offered = [function("look", description="Looks.", parameters=SCHEMA), function("ping")]
    expected = (Tool("look", "Looks.", SCHEMA), Tool("ping"))
    assert tools(tools=offered) == Tools(expected)
    assert tools(tools=offered, tool_choice="auto", parallel_tool_calls=True) == Tools(expected)
    assert tools(tools=offered, tool_choice="none") == Tools(expected, "none")
    assert tools(tools=offered, tool_choice="required") == Tools(expected, "required")
    assert tools(tools=offered, tool_choice=function("ping")) == Tools(expected, "named", "ping")
    assert tools(tools=offered, parallel_tool_calls=False) == Tools(expected, parallel=False)
    one = {"tool_choice": function("ping"), "parallel_tool_calls": False}
    assert tools(tools=offered, **one) == Tools(expected, "named", "ping", parallel=False)
    assert tools(tools=[function("look", strict=False, response=SCHEMA)]) == Tools((Tool("look"),))


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}])
def test_without_tools_there_is_nothing_to_choose(fields: dict[str, Any]) -> None:
    assert tools(**fields, parallel_tool_calls=False) == Tools()


LOOK = [function("look")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [*LOOK, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [function("a") | {"custom": {}}]}, "tools[0].custom"),
        ({"tools": [function("a") | {"x": 1}]}, "tools[0].x"),
        ({"tools": [function("a", x=1)]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("a" * (MAX_TOOL_NAME + 1))]}, "tools[0].function.name"),
        ({"tools": [function("a\nb")]}, "tools[0].function.name"),
        ({"tools": [function(5)]}, "tools[0].function.name"),
        ({"tools": [function("a"), function("b"), function("a")]}, "tools[2].function.name"),
        ({"tools": [function("a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function("a", strict=1)]}, "tools[0].function.strict"),
        ({"tools": LOOK, "tool_choice": "any"}, "tool_choice"),
        ({"tools": LOOK, "tool_choice": ""}, "tool_choice"),
        ({"tools": LOOK, "tool_choice": 1}, "tool_choice"),
        ({"tools": LOOK, "tool_choice": {}}, "tool_choice.type"),
        ({"tools": LOOK, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": LOOK, "tool_choice": {"type": "function", "name": "look"}}, "tool_choice.name"),
        ({"tools": LOOK, "tool_choice": function("other")}, "tool_choice.function.name"),
        ({"tools": LOOK, "tool_choice": function("look") | {"custom": {}}}, "tool_choice.custom"),
        ({"tools": LOOK, "tool_choice": {"type": "custom", "custom": {"name": "look"}}}, "tool_choice.type"),
        ({"tools": LOOK, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": function("look")}, "tool_choice.function.name"),
        ({"tools": LOOK, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"function_call": {"name": "look"}}, "function_call"),
    ],
)
def test_what_cannot_be_offered_or_chosen_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(tools, **fields).param == param


def test_names_of_other_alphabets_and_full_length_are_names() -> None:
    for name in ("wx&al", "mcp__files__read", "погода", "a.b/c", "a" * MAX_TOOL_NAME):
        assert tools(tools=[function(name)], tool_choice=function(name)).name == name


def test_the_documents_state_the_bounds(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    assert f"up to {MAX_TOOL_NAME} printable characters" in text and f"at most {MAX_NESTING} levels" in text
    assert f"up to {MAX_ARGUMENTS_BYTES // 2**20} MiB" in text


def test_enforced_schemas_are_refused_unless_the_operator_relaxed_that() -> None:
    offered = [function("look"), function("ping", strict=True)]
    error = refusal(tools, tools=offered)
    assert (error.param, error.code) == ("tools[1].function.strict", "unsupported_parameter")
    relaxed = make_model(output=OutputSyntax(tools="hermes"), strict_tools="relax")
    assert tools(relaxed, tools=offered) == Tools((Tool("look"), Tool("ping")))


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_nesting_is_bounded() -> None:
    assert tools(tools=[function("a", parameters=nested(MAX_NESTING))]).offered[0].parameters == nested(MAX_NESTING)
    assert refusal(tools, tools=[function("a", parameters=nested(MAX_NESTING + 1))]).param == (
        "tools[0].function.parameters"
    )
    messages(assistant(call(json.dumps(nested(MAX_NESTING)))))
    for deep in (json.dumps(nested(MAX_NESTING + 1)), '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"):
        error = refusal(messages, assistant(call(deep)))
        assert error.param == "messages[1].tool_calls[0].function.arguments" and str(MAX_NESTING) in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": LOOK},
        {"tools": LOOK, "tool_choice": "auto"},
        {"tools": LOOK, "tool_choice": "required"},
        {"tools": LOOK, "tool_choice": function("look")},
        {"tool_choice": "required"},
        {"tool_choice": function("look")},
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        {"messages": [USER, assistant(call("{}"))]},
    ],
)
def test_a_model_without_tools_refuses_them_by_name(fields: dict[str, Any]) -> None:
    """Nor does one with a syntax of calls whose template shows no tools."""
    for model in (make_model(), make_model(output=OutputSyntax(tools="hermes"), shows_tools=False)):
        error = refusal(tools, model, **fields)
        assert error.code == "unsupported_parameter" and "takes no tools" in str(error)


def test_a_model_without_tools_takes_those_that_it_must_not_call() -> None:
    """They are checked all the same, and neither the template nor the output machine has to do with them."""
    for model in (make_model(), make_model(output=OutputSyntax(tools="hermes"), shows_tools=False)):
        found = tools(model, tools=LOOK, tool_choice="none")
        assert found == Tools((Tool("look"),), "none") and template_tools(found) is None
        assert make_output(model.output, found, opens_reasoning=False, call_prefix="c") is None
        assert refusal(tools, model, tools=[function("")], tool_choice="none").param == "tools[0].function.name"


def test_calls_and_results_of_earlier_turns() -> None:
    sent = [
        assistant(call('{"q": 1}'), call("{}", "ping", id="c2"), content="Looking.", reasoning_content="Hm."),
        {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look"},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "c2",
        },
        {"role": "tool", "content": ""},
    ]
    assert messages(*sent) == [
        Message("assistant", "Looking.", "Hm.", (ToolCall("c1", "look", '{"q": 1}'), ToolCall("c2", "ping", "{}"))),
        Message("tool", "found", call_id="c1", name="look"),
        Message("tool", "a\n\nb", call_id="c2"),
        Message("tool", ""),
    ]


@pytest.mark.parametrize("content", [None, "", [], "text"])
def test_content_beside_calls(content: Any) -> None:
    (message,) = messages(assistant(call("{}"), content=content))
    assert message.text == (content or "") and len(message.calls) == 1


def test_reasoning_stands_for_content_too() -> None:
    """So an answer that was cut within its reasoning can be sent back."""
    for spelling in ("reasoning_content", "reasoning"):
        (message,) = messages({"role": "assistant", "content": None, spelling: "Hm."})
        assert message == Message("assistant", "", "Hm.")
    assert refusal(messages, {"role": "assistant", "content": None}).param == "messages[1].content"
    assert refusal(messages, assistant()).param == "messages[1].content"


@pytest.mark.parametrize("arguments", ["", "  \n"])
def test_blank_arguments_are_an_empty_object(arguments: str) -> None:
    (message,) = messages(assistant(call(arguments)))
    assert message.calls[0].arguments == "{}"


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans() | st.none()))
def test_arguments_stay_as_they_were_sent(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, indent=1, ensure_ascii=False)
    (message,) = messages(assistant(call(text)))
    assert message.calls[0].arguments == text


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (assistant(call("[]")), "tool_calls[0].function.arguments"),
        (assistant(call("{}"), call("{")), "tool_calls[1].function.arguments"),
        (assistant(call('{"a": NaN}')), "tool_calls[0].function.arguments"),
        (assistant(call('{"a": "\\ud83d"}')), "tool_calls[0].function.arguments"),
        (assistant(call("null")), "tool_calls[0].function.arguments"),
        (assistant(call({})), "tool_calls[0].function.arguments"),
        (assistant(call("{}", "")), "tool_calls[0].function.name"),
        (assistant(call("{}", "a" * (MAX_TOOL_NAME + 1))), "tool_calls[0].function.name"),
        (assistant(call("{}", "a\nb")), "tool_calls[0].function.name"),
        (assistant({"id": "a"}), "tool_calls[0].function"),
        (assistant({"type": "function", "function": {}}), "tool_calls[0].function.name"),
        (assistant({"function": {"name": "a", "arguments": "{}"}}), "tool_calls[0].id"),
        (assistant(call("{}", type="custom")), "tool_calls[0].type"),
        (assistant({"id": "a", "type": "custom", "custom": {"name": "a", "input": ""}}), "tool_calls[0].type"),
        (assistant(call("{}", x=1)), "tool_calls[0].x"),
        ({"role": "tool", "tool_call_id": "c1"}, "content"),
        ({"role": "tool", "content": None, "tool_call_id": "c1"}, "content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_calls": [call("{}")]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, "tool_call_id"),
        ({"role": "user", "content": "x", "reasoning_content": "Hm."}, "reasoning_content"),
        ({"role": "system", "content": "x", "reasoning": "Hm."}, "reasoning"),
        ({"role": "function", "content": "x", "name": "look"}, "role"),
        ({"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}, "function_call"),
    ],
)
def test_what_earlier_turns_cannot_hold_is_named(sent: dict[str, Any], param: str) -> None:
    error = refusal(messages, sent)
    assert error.param == f"messages[1].{param}"


def test_arguments_are_bounded() -> None:
    room = MAX_ARGUMENTS_BYTES - len('{"a":""}')
    assert messages(assistant(call('{"a":"' + "x" * room + '"}')))
    for text in ("x" * (room + 1), "é" * (room // 2 + 1)):
        error = refusal(
            CHAT.decode,
            json.dumps({"messages": [USER, assistant(call('{"a":"' + text + '"}'))]}, ensure_ascii=False).encode(),
            MODEL,
        )
        assert error.param == "messages[1].tool_calls[0].function.arguments" and str(MAX_ARGUMENTS_BYTES) in str(error)


def continued(model: ServedModel | None = None, **fields: Any) -> bool:
    body = {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True, **fields}
    model = model or make_model(output=OutputSyntax(tools="hermes"), continuation="")
    (prompt,) = CHAT.decode(json.dumps(body).encode(), model).generation.prompts
    return prompt.continue_final


def test_a_last_message_can_be_continued() -> None:
    assert continued() and continued(add_generation_prompt=False)
    assert not continued(continue_final_message=False) and not continued(continue_final_message=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [USER]}, "assistant"),
        ({"messages": [USER, assistant(call("{}"))]}, "tool_calls"),
        ({"continue_final_message": 1}, "true or false"),
    ],
)
def test_what_cannot_be_continued(fields: dict[str, Any], says: str) -> None:
    error = refusal(continued, **fields)
    assert error.param == "continue_final_message" and says in str(error)


def test_a_template_that_cannot_continue_says_so_before_any_work() -> None:
    error = refusal(continued, make_model(continuation=None))
    assert error.param == "continue_final_message" and "template" in str(error)


NAMES = [
    "type",
    "function",
    "name",
    "parameters",
    "strict",
    "custom",
    "id",
    "arguments",
    "role",
    "content",
    "text",
    "x",
]
scalars = (
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "function", "look", "assistant", "tool", "{}"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner), max_leaves=10
)


@given(st.dictionaries(st.sampled_from(["tools", "tool_choice", "messages", "continue_final_message"]), values))
def test_any_value_is_taken_or_refused_by_name(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": [USER, assistant(call("{}"))], "tools": LOOK, **fields}).encode()
    try:
        CHAT.decode(body, MODEL)
    except RequestError as error:
        assert error.status == 400 and error.param and str(error).startswith(f"{error.param}: ")


@given(
    st.lists(values, min_size=1, max_size=3), st.sampled_from(["tool_calls", "content", "tool_call_id", "reasoning"])
)
def test_any_value_in_a_message_is_taken_or_refused_by_name(inner: list[Any], field: str) -> None:
    sent = {"role": "assistant", "content": "x", field: inner if field == "tool_calls" else inner[0]}
    try:
        messages(sent)
    except RequestError as error:
        assert error.param and error.param.startswith("messages[1]")
