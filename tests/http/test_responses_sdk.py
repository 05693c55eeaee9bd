"""Responses through OpenAI's own SDK, with strict validation of everything that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.live_server import LiveServer
from tests.support.scripted_server import make_runtime

CALL = '<tool_call>\n{"name": "$TOOL", "arguments": {"path": "a.py"}}\n</tool_call>'
REPLIES = ["<think>Look first.</think>I look.\n" + CALL, "It says one."]
READ = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    runtime = make_runtime(REPLIES, "<think>Hm.</think>Fine.", endless=False, context=1 << 16, slots=4)
    with LiveServer(runtime=runtime) as live:
        yield live
        live.idle()


@pytest.fixture
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True)


def test_text_and_usage(client: OpenAI) -> None:
    answer = client.responses.create(model="m", input="hi", instructions="be brief", metadata={"a": "b"})
    assert answer.output_text == "Fine." and answer.status == "completed" and answer.metadata == {"a": "b"}
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    usage: Any = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 3


def test_a_conversation_with_a_tool(client: OpenAI) -> None:
    """The client sends back what it got, and the tool's result."""
    history: list[Any] = [{"role": "user", "content": "What does a.py say?"}]
    tools: Any = [READ]
    first = client.responses.create(model="m", input=history, tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call: Any = first.output[-1]
    assert call.name == "read" and json.loads(call.arguments) == {"path": "a.py"}
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "print(1)"})
    second = client.responses.create(model="m", input=history, tools=tools)
    assert second.output_text == "It says one."


def test_a_stream_says_what_the_buffered_answer_says(client: OpenAI) -> None:
    arguments: Any = {"model": "m", "input": "hi", "tools": [READ]}
    buffered = client.responses.create(**arguments)
    with client.responses.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    def said(answer: Any) -> list[Any]:
        ids = {"id", "call_id"}
        return [item.model_dump(exclude=ids | {"parsed_arguments", "content"}) for item in answer.output]

    assert said(streamed) == said(buffered)
    assert streamed.output_text == buffered.output_text
    assert buffered.output_text.strip() == "I look."


def test_a_limit_makes_it_incomplete(client: OpenAI) -> None:
    answer: Any = client.responses.create(model="m", input="hi", max_output_tokens=12)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12 and answer.stop_reason == "max_tokens"


def test_custom_tools_and_namespaces(client: OpenAI, server: LiveServer) -> None:
    """The scripted call has no `input`, which a custom tool cannot take: the answer fails, before anything is emitted."""
    custom: Any = [{"type": "custom", "name": "patch"}]
    status, body = server.post("/v1/responses", {"input": "hi", "tools": custom})
    assert status == 500 and body["error"]["code"] == "invalid_output"
    space: Any = [{"type": "namespace", "name": "files", "description": "d", "tools": [READ]}]
    status, body = server.post("/v1/responses", {"input": "hi", "tools": space})
    call = body["output"][-1]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read", "files")


def test_what_is_kept_nowhere_is_refused(client: OpenAI) -> None:
    for field, value in (("store", True), ("previous_response_id", "resp_1"), ("background", True)):
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="m", input="hi", **{field: value})  # type: ignore[call-overload]
        assert caught.value.param == field
