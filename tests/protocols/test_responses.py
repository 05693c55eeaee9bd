"""Requests of Responses without a server: items and tools to the neutral request, or the field that cannot be taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from flare.conversation import Conversation, Message, SamplingRequest, Thinking, Tool, ToolCall, Tools
from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.prompting import check_tools, template_messages, template_tools
from flare.protocols.openapi_requests import request_schemas
from flare.protocols.responses import Responses
from flare.protocols.responses_fields import INERT, UNBUILT, ResponsesRequest
from tests.support.live_server import make_model
from tests.support.scripted_server import THINKING

ENDPOINT = Responses()
MODEL = make_model(output=OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")), thinking=THINKING)
SCHEMA = request_schemas(MODEL)["ResponsesRequest"]
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}


def decode(model: Any = MODEL, **body: Any) -> Conversation:
    decoded = ENDPOINT.decode(json.dumps({"input": "hi", **body}).encode(), model)
    (prompt,) = decoded.generation.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def refused(model: Any = MODEL, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(model, **body)
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    return caught.value


def test_text_and_instructions() -> None:
    assert decode().messages == [Message("user", "hi")]
    assert decode(instructions="be brief").messages == [Message("system", "be brief"), Message("user", "hi")]
    assert decode(instructions="").messages == [Message("user", "hi")]


def test_items_become_messages_in_order() -> None:
    """What an assistant thought, said and called between two turns is one message of the template."""
    items = [
        {"role": "developer", "content": "rules"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"p": 1}', "namespace": "fs"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": "go on"},
    ]
    calls = (ToolCall("c1", "read", '{"p": 1}', "fs"), ToolCall("c2", "patch", "***", custom=True))
    assert decode(input=items).messages == [
        Message("developer", "rules"),
        Message("user", "a\n\nb"),
        Message("assistant", "ok", "why", calls),
        Message("tool", "one", call_id="c1"),
        Message("tool", "two", call_id="c2"),
        Message("user", "go on"),
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "opaque"}, "input[0].encrypted_content"),
        ({"type": "reasoning", "summary": [{"type": "input_image"}]}, "input[0].summary[0].type"),
        (
            {"type": "reasoning", "summary": [{}], "content": [{"type": "text", "text": "x"}]},
            "input[0].summary[0].type",
        ),
        ({"type": "", "role": "user", "content": "x"}, "input[0].type"),
        ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}, "input[0].content[0].refusal"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input[0].arguments"),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": ""},
            "input[0].namespace",
        ),
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type"),
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": "x", "colour": 1}, "input[0].colour"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}, "input[0].arguments"),
        ({"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}, "input[0].name"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input[0].output[0].type",
        ),
        ({"type": ["message"]}, "input[0].type"),
    ],
)
def test_items_that_cannot_be_taken(item: dict[str, Any], param: str) -> None:
    assert refused(input=[item]).param == param


def test_there_must_be_something_to_answer() -> None:
    assert refused(input=[]).param == "input"
    assert refused(input=[{"type": "reasoning", "summary": []}]).param == "input"
    assert decode(input=[{"role": "system", "content": "x"}]).messages == [Message("system", "x")]


def test_a_summary_stands_for_reasoning_without_content() -> None:
    """Reasoning of another provider has both; what only that one can read is then no loss."""
    parts = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    item = {"type": "reasoning", "id": "rs_1", "summary": parts, "encrypted_content": "opaque", "status": "completed"}
    assert decode(input=[item, {"role": "assistant", "content": "x"}]).messages == [Message("assistant", "x", "a\n\nb")]
    both = {**item, "content": [{"type": "reasoning_text", "text": "c"}]}
    assert decode(input=[both]).messages == [Message("assistant", "", "c")]


def test_what_sdks_add_to_answers_is_taken_back() -> None:
    """`model_dump()` of an SDK's objects gives every field that it has, most of them null."""
    null = {"async_": None, "caller": None, "namespace": None, "status": None, "id": None}
    call: Any = {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
        "parsed_arguments": {},
        **null,
    }
    text: Any = {"type": "output_text", "text": "x", "annotations": [], "logprobs": None, "parsed": None}
    message = {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "content": [text],
        "status": "completed",
        "phase": None,
    }
    assert decode(input=[message, call]).messages == [Message("assistant", "x", calls=(ToolCall("c", "f", "{}"),))]


def test_instructions_and_developer_items_become_one_leading_message() -> None:
    """Their sections keep role and order, and the conversation around them its own order."""
    items = [
        {"role": "user", "content": "u1"},
        {"role": "developer", "content": "D1"},
        {"role": "user", "content": "u2"},
        {"role": "system", "content": "S2"},
    ]
    messages = template_messages(decode(instructions="S1", input=items).messages, inline_system=False)
    assert [m["role"] for m in messages] == ["system", "user", "user"]
    leading = messages[0]["content"]
    assert leading.index("S1") < leading.index("D1") < leading.index("S2") and "developer" in leading
    assert [m["content"] for m in messages[1:]] == ["u1", "u2"]


def test_results_of_parallel_calls_follow_the_order_of_the_calls() -> None:
    def call(id: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": id, "name": "read", "namespace": "fs", "arguments": "{}"}

    def result(id: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": id, "output": id, "name": "read", "namespace": "fs"}

    items = [call("a"), call("b"), result("b"), result("a")]
    _, *results = template_messages(decode(input=items).messages, inline_system=False)
    assert [(m["content"], m["name"]) for m in results] == [("a", "fs__read"), ("b", "fs__read")]


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_fields_that_are_not_built(name: str) -> None:
    for neutral in (None, *UNBUILT[name]):
        decode(**{name: neutral})
    error = refused(**{name: "something"})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_every_field_is_decided() -> None:
    used = {"input", "instructions", "stream", "max_output_tokens", "stop", "tools", "tool_choice"}
    used |= {"parallel_tool_calls", "reasoning", "text", "chat_template_kwargs", "thinking_token_budget"}
    used |= {"include", "top_logprobs", "logprob_token_ids", "return_tokens_as_token_ids"}
    sampling = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"}
    used |= {"grammar", "structured_outputs"}
    sampling |= {"frequency_penalty", "seed", "stop_token_ids", "stop_token_sequences", "ignore_eos"}
    assert set(ResponsesRequest.__struct_fields__) == used | sampling | set(INERT) | set(UNBUILT)


def test_the_documentation_has_both_tables(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    inert = [f"| `{name}` | {reason} |" for name, reason in INERT.items()]
    unbuilt = [f"| `{name}` | {', '.join(f'`{json.dumps(v)}`' for v in values)} |" for name, values in UNBUILT.items()]
    for heading, lines in (("without an effect", inert), ("that are not served", unbuilt)):
        table = text.split(f"### Response fields {heading}\n")[1].split("|---|---|\n")[1].split("\n\n")[0]
        assert table.splitlines() == lines


def test_forms_of_the_answer() -> None:
    decode(text={"format": {"type": "text"}, "verbosity": "medium"}, include=["reasoning.encrypted_content", "what"])
    assert refused(text={"format": {"type": "json_schema", "name": "x"}}).param == "text.format.schema"
    assert refused(text={"verbosity": "low"}).param == "text.verbosity"
    assert refused(max_output_tokens=0).param == "max_output_tokens"
    assert refused(max_tokens=5).param == "max_tokens"


def test_efforts_take_the_nearest_level() -> None:
    thinking = decode(reasoning={"effort": "max", "summary": "auto"}).thinking
    assert (thinking.level, thinking.nearest) == ("max", True)
    error = refused(reasoning={"effort": "huge"})
    assert (error.param, error.code) == ("reasoning.effort", "unsupported_reasoning_effort")
    assert error.extra == {"levels": ["low", "high"]}
    assert decode(reasoning={"effort": None}).thinking == Thinking()
    for name in ("context", "mode"):
        assert refused(reasoning={name: "pro"}).param == f"reasoning.{name}"
    decode(reasoning={"context": "auto", "mode": "standard"})


def test_template_variables_are_exact() -> None:
    thinking = decode(chat_template_kwargs={"reasoning_effort": "max", "enable_thinking": True}).thinking
    assert (thinking.level, thinking.switch, thinking.nearest) == ("max", True, False)
    error = refused(chat_template_kwargs={"reasoning_effort": "low"}, reasoning={"effort": "high"})
    assert (error.param, error.code) == ("chat_template_kwargs.reasoning_effort", "conflicting_thinking")
    decode(chat_template_kwargs={"reasoning_effort": "high"}, reasoning={"effort": "high"})
    assert refused(chat_template_kwargs={"enable_thinking": "no"}).param == "chat_template_kwargs.enable_thinking"
    error = refused(chat_template_kwargs={"colour": 1})
    assert (error.param, error.code) == ("chat_template_kwargs.colour", "unknown_parameter")


def test_tools_keep_their_names() -> None:
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**READ, "name": "spawn"}]}
    custom = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
    tools = decode(tools=[READ, space, custom], parallel_tool_calls=False).tools
    assert tools == Tools(
        (
            Tool("read", None, {"type": "object"}),
            Tool("spawn", None, {"type": "object"}, "agents"),
            Tool("patch", "d", custom=True),
        ),
        parallel=False,
    )
    named = decode(tools=[READ, space], tool_choice={"type": "function", "name": "agents__spawn"}).tools
    assert (named.choice, named.name, named.namespace) == ("named", "spawn", "agents")
    assert decode(tools=[], tool_choice="none").tools == Tools()


LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "go " /[a-z]+/'}


def custom(format: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "p", "format": format}


def test_formats_of_custom_tools() -> None:
    for format in (None, {"type": "text"}):
        assert decode(tools=[custom(format)]).tools.offered[0].grammar is None
    grammar = decode(tools=[custom(LARK)]).tools.offered[0].grammar
    assert grammar is not None and grammar.matches("go home") and not grammar.matches("go 1")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**READ, "strict": True}]}, "tools[0].strict"),
        ({"tools": [READ, READ]}, "tools[1].name"),
        ({"tools": [{"name": "read"}]}, "tools[0].type"),
        ({"tools": [{**READ, "async": True}]}, "tools[0].async"),
        ({"tools": [{**READ, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**READ, "function": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "name": ""}]}, "tools[0].name"),
        ({"tools": [custom({"type": "grammar"})]}, "tools[0].format.syntax"),
        ({"tools": [custom({"type": "text", "syntax": "lark"})]}, "tools[0].format.syntax"),
        ({"tools": [custom({"type": "json"})]}, "tools[0].format.type"),
        ({"tools": [custom({})]}, "tools[0].format.type"),
        ({"tools": [custom({**LARK, "syntax": "gbnf"})]}, "tools[0].format.syntax"),
        ({"tools": [custom({**LARK, "definition": "start: nosuch"})]}, "tools[0].format.definition"),
        ({"tools": [custom({**LARK, "strict": True})]}, "tools[0].format.strict"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [READ], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [READ], "tool_choice": {"type": "function", "name": "write"}}, "tool_choice.name"),
        ({"tools": [READ], "tool_choice": {"type": "custom", "name": "read"}}, "tool_choice.name"),
        ({"tools": [READ], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [READ], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ({"tools": [READ], "tool_choice": {"name": "read"}}, "tool_choice.type"),
        ({"tools": [READ], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ],
)
def test_tools_that_cannot_be_offered(body: dict[str, Any], param: str) -> None:
    assert refused(**body).param == param


def test_a_model_without_tools_refuses_them() -> None:
    plain = make_model()
    assert refused(plain, tools=[READ]).param == "tools"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert refused(plain, input=[call]).param == "input[0]"
    assert refused(plain, tool_choice="required").param == "tool_choice"
    decode(plain, tools=[], tool_choice="auto")
    assert decode(plain, tools=[READ], tool_choice="none").tools.choice == "none"


def test_names_that_the_model_could_not_tell_apart() -> None:
    def space(name: str, tool: str) -> dict[str, Any]:
        return {"type": "namespace", "name": name, "tools": [{**READ, "name": tool}]}

    tools = decode(tools=[space("fs", "read"), space("db", "read")]).tools
    check_tools(tools)
    assert [tool["function"]["name"] for tool in template_tools(tools) or []] == ["fs__read", "db__read"]
    for pair in ([space("a", "b__c"), space("a__b", "c")], [space("fs", "read"), {**READ, "name": "fs__read"}]):
        with pytest.raises(RequestError) as caught:
            check_tools(decode(tools=pair).tools)
        assert caught.value.param == "tools"


def test_relaxed_servers_take_strict_tools() -> None:
    relaxed = make_model(output=OutputSyntax(tools="hermes"), strict_tools="relax")
    assert decode(relaxed, tools=[{**READ, "strict": True}]).tools.offered[0].name == "read"
    for strict in (False, None):
        decode(tools=[{**READ, "strict": strict, "defer_loading": True, "output_schema": {}}])


def test_the_neutral_request() -> None:
    """Everything that generation needs; over the server's limit, the client's own name of the field is said."""
    sampling = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.1}
    penalties = {"presence_penalty": 0.2, "frequency_penalty": 0.3}
    body = {"input": "hi", "max_output_tokens": 9, "stop": "x", "ignore_eos": True, **sampling, **penalties}
    generation = ENDPOINT.decode(json.dumps(body).encode(), MODEL).generation
    assert generation.sampling == SamplingRequest(**sampling, **penalties)  # type: ignore[arg-type]
    assert (generation.max_tokens, generation.stop, generation.ignore_eos) == (9, ("x",), True)
    assert generation.n == 1 and generation.prompt_field == "input"
    with pytest.raises(RequestError) as caught:
        make_model(max_tokens_cap=8).resolve_limit(generation, 3)
    assert caught.value.param == "max_output_tokens"
    assert refused(stop=["x"], stop_token_ids=[1]).param == "stop_token_ids"
    assert refused(make_model(has_template=False)).param == "input"


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({str(i): "" for i in range(17)}, "metadata"),
        ({"n" * 65: ""}, f"metadata.{'n' * 65}"),
        ({"a": "v" * 513}, "metadata.a"),
        ({"a": 1}, "metadata[...]"),
        ({"a": {}}, "metadata[...]"),
        ([], "metadata"),
    ],
)
def test_metadata_has_the_bounds_that_openai_documents(metadata: Any, param: str) -> None:
    assert refused(metadata=metadata).param == param
    assert not Draft202012Validator(SCHEMA["properties"]["metadata"]).is_valid(metadata)


def test_metadata_within_its_bounds() -> None:
    most = {f"{i:064}": "é" * 512 for i in range(16)}
    for metadata in (most, {}, None):
        decode(metadata=metadata)
        assert Draft202012Validator(SCHEMA["properties"]["metadata"]).is_valid(metadata)
