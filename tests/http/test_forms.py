"""Answers of a form, over HTTP: reasoning stays free, the answer keeps the form, a call may come instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest

from flare.prompting import ANSWER_IN_JSON, ANSWER_IN_SCHEMA
from flare.thinking import NO_THINKING
from tests.support.live_server import LiveServer, events
from tests.support.scripted_server import make_runtime, spoken

CHAT, RAW, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
NATIVE = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}


@contextmanager
def serving(reply: str, prompts: Any = None, **model: Any) -> Iterator[LiveServer]:
    model = {"thinking": NO_THINKING} | model
    runtime = make_runtime([], reply, endless=False, context=4096, slots=4, prompts=prompts, **model)
    with LiveServer(runtime=runtime) as live:
        yield live
        live.idle()


def chat(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """Asks buffered and streamed, checks that both say the same, and returns the choice."""
    body = {"messages": HI, "temperature": 0, **fields}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    _, _, data = server.request("POST", CHAT, body | {"stream": True})
    deltas = [c["choices"][0] for c in events(data) if c != "[DONE]" and c["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(d["delta"].get(name) or "" for d in deltas) == (choice["message"].get(name) or "")
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    return choice


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_form_begins_behind_reasoning(tools: list[Any]) -> None:
    """The form neither forces JSON into the reasoning nor is it left out, with tools or without."""
    reply = '17-6 is {11}</think>\n\n{"answer": "see </think> and <tool_call>"}'
    with serving(reply, opens_reasoning=True) as server:
        choice = chat(server, response_format=NATIVE, tools=tools)
    assert choice["message"]["reasoning_content"] == "17-6 is {11}"
    assert json.loads(choice["message"]["content"]) == {"answer": "see </think> and <tool_call>"}
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("opens", [False, True])
def test_a_call_may_come_instead(opens: bool) -> None:
    with serving(("so</think>\n" if opens else "") + CALL, opens_reasoning=opens) as server:
        choice = chat(server, response_format=NATIVE, tools=[TOOL])
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x":1}'} and choice["finish_reason"] == "tool_calls"


def test_a_model_that_would_say_something_else_cannot() -> None:
    with serving("Fine, here it is: ```json", output={"tools": "hermes"}) as server:
        for body, of in (
            ({"response_format": NATIVE}, SCHEMA),
            ({"response_format": {"type": "json_object"}}, {"type": "object"}),
            ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ):
            content = chat(server, **body)["message"]["content"]
            jsonschema.validate(json.loads(content), of)
        assert chat(server, structured_outputs={"choice": ["yes", "no"]})["message"]["content"] in ("yes", "no")
        assert chat(server, grammar='start: "go " /[0-9]{3}/')["message"]["content"] == "go 000"


@pytest.mark.parametrize("stream", [False, True])
def test_every_endpoint(stream: bool) -> None:
    flat = {"type": "json_schema", "name": "r", "schema": SCHEMA}
    with serving('{"answer": "yes"}') as server:
        for path, body in (
            (RAW, {"prompt": "hi", "response_format": NATIVE}),
            (RESPONSES, {"input": "hi", "text": {"format": flat}}),
            (MESSAGES, {"messages": HI, "max_tokens": 500, "output_config": {"format": flat}}),
        ):
            headers = {"anthropic-version": "2023-06-01"}
            status, _, data = server.request("POST", path, {**body, "temperature": 0, "stream": stream}, headers)
            assert status == 200, data
            assert b'answer\\": \\"yes\\"}' in data or stream, data
            if path == RESPONSES and not stream:
                assert json.loads(data)["text"]["format"] == flat


def test_a_raw_prompt_has_no_reasoning() -> None:
    with serving("<think>so</think>") as server:
        status, answer = server.post(RAW, {"prompt": "hi", "temperature": 0, "response_format": NATIVE, "n": 2})
    assert status == 200
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_a_limit_cuts_the_answer_and_says_so() -> None:
    """A model that only wants white space and digits ends at its limit."""
    with serving('{"answer": "' + " " * 3000) as server:
        choice = chat(server, response_format=NATIVE, max_tokens=64)
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith('{"answer": "   ')


def test_the_model_is_told(tmp_path: Any) -> None:
    prompts = tmp_path / "prompts"
    with serving("{}", prompts=prompts) as server:
        for fields in (
            {"response_format": NATIVE},
            {"response_format": {"type": "json_object"}, "messages": [{"role": "system", "content": "Be kind."}, *HI]},
            {"grammar": 'start: "a"'},
        ):
            status, answer = server.post(CHAT, {"messages": HI, **fields})
            assert status == 200, answer
    told = [json.loads(line) for line in prompts.read_text().splitlines()]
    schema = json.dumps(SCHEMA, separators=(",", ":"))
    assert f"\0system\n{ANSWER_IN_SCHEMA}{schema}\0" in told[0]
    assert f"\0system\nBe kind.\n\n{ANSWER_IN_JSON}\0" in told[1]
    assert "system" not in told[2]
    assert spoken([0]) == "\0"


def test_what_cannot_be_compiled_is_refused_before_anything_runs() -> None:
    schema = {"oneOf": [{"type": "string"}, {"maxLength": 3}]}
    with serving("{}") as server:
        for path, body in (
            (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
            (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": schema}}}),
            (CHAT, {"messages": HI, "grammar": "start: ("}),
        ):
            status, answer = server.post(path, body)
            assert status == 400 and answer["error"]["param"] in (
                "response_format.json_schema.schema",
                "text.format.schema",
                "grammar",
            )


def test_a_grammar_that_becomes_too_much_ends_its_own_answer_only() -> None:
    with serving("a" * 2000) as server:
        status, answer = server.post(CHAT, {"messages": HI, "temperature": 0, "grammar": 'start: start start | "a"'})
        assert status == 500 and "became too complex" in answer["error"]["message"]
        status, _ = server.post(CHAT, {"messages": HI, "max_tokens": 3})
        assert status == 200


def test_frames_that_are_no_tokens() -> None:
    output = {"tools": "kimi_xtml", "reasoning": ["a", "b"]}
    with serving("{}", output=output) as server:
        status, answer = server.post(CHAT, {"messages": HI, "response_format": {"type": "json_object"}})
    assert status == 400 and answer["error"]["param"] == "response_format"


def test_a_reply_in_frames() -> None:
    names = ["<|open|>", "<|close|>", "<|sep|>"]
    output = {"tools": "kimi_xtml", "reasoning": ["a", "b"], "spelled": [259, 260, 261]}
    o, c, s = ({"tok": name} for name in names)
    reply: Any = ["so {", c, "think", s, o, "response", s, '{"answer": "<|close|>"}']
    with serving(reply, special=names, output=output, opens_reasoning=True) as server:
        choice = chat(server, response_format=NATIVE)
    assert choice["message"]["reasoning_content"] == "so {"
    assert json.loads(choice["message"]["content"]) == {"answer": "<|close|>"}


def test_deepseek_answers_at_once_where_nothing_opens_reasoning() -> None:
    output = {"tools": "deepseek_dsml", "reasoning": ["<think>", "</think>"]}
    with serving('<think>so it is</think>\n{"answer": "yes"}', output=output) as server:
        choice = chat(server, response_format=NATIVE)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_an_answer_of_a_grammar_is_verbatim_from_its_first_character() -> None:
    for reply in (' <tool_call>{"name": "f"}', "\n<think>so"):
        with serving(reply, output={"tools": "hermes", "reasoning": ["<think>", "</think>"]}) as server:
            choice = chat(server, structured_outputs={"regex": "(?s).*"}, tools=[TOOL])
        assert choice["message"]["content"] == reply


def test_a_budget_of_reasoning_closes_it_under_a_form() -> None:
    output = {"reasoning": ["<think>", "</think>"], "close_token": 259, "spelled": [259]}
    reply: Any = ["so it goes on " * 20]
    with serving(reply, special=["</think>"], output=output, opens_reasoning=True) as server:
        choice = chat(server, response_format=NATIVE, thinking_token_budget=10)
    assert choice["message"]["reasoning_content"] == "so it goes"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
