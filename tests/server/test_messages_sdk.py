"""Messages through the Anthropic SDK, strictly validated, against a server process: whole and streamed alike, tools,
thinking, counts and failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.process import Process, scripted
from tests.support.scripted_server import FAILURE

HI = [{"role": "user", "content": "SAY hi"}]
ANSWER = "Hi 😊 there END and more"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "/a", "lines": [1, 2.50]}}\n</tool_call>'
REPLIES: dict[str, str | None] = {
    "SAY hi": ANSWER,
    "USE read": f"<think>A file.</think>Let me look.\n{CALL}",
    "USE other": '<tool_call>\n{"name": "remove", "arguments": {"n": 3}}\n</tool_call>' + CALL,
    "CUT": f'{CALL}\n<tool_call>\n{{"name": "write", "arguments": {{"path": "/b',
    "TALK": "I would rather talk.",
    "THINK": "<think>plan</think>done",
    "BREAK": None,
}
TOOLS: list[Any] = [
    {
        "name": "read",
        "description": "Reads a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
CONTEXT = 2048


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("messages")
    model = {"continuation": "<|im_end|>\n"}
    with scripted(folder, REPLIES, context=CONTEXT, settings={"api_key": "sk-right"}, model=model) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="sk-right", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def both(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """The message of a request, which is the same buffered and as the SDK adds up its stream."""
    asked: dict[str, Any] = {"model": "any", "max_tokens": 400, "messages": HI} | fields
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        added_up = stream.get_final_message()
    assert events[-1].type == "message_stop"
    plain = message.model_dump(exclude={"id": True, "timings": True})
    streamed = added_up.model_dump(exclude={"id": True, "timings": True, "flare_context": True})
    without_context = {name: value for name, value in plain.items() if name != "flare_context"}
    for shown in (without_context, streamed):
        for block in shown["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    assert streamed == without_context
    return message


def test_a_message(client: anthropic.Anthropic) -> None:
    message = both(client, system="Be brief.", metadata={"user_id": "u"})
    (block,) = message.content
    assert block.type == "text" and block.text == ANSWER
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "org/tiny")
    assert message.usage.output_tokens == len(ANSWER.encode()) + 1
    assert message.model_extra and message.model_extra["flare_context"]["context_length"] == CONTEXT
    assert message._request_id == message.id


def test_a_limit_and_stop_sequences(client: anthropic.Anthropic) -> None:
    cut = both(client, max_tokens=2)
    assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("Hi", "max_tokens", 2)  # type: ignore[union-attr]
    stopped = both(client, stop_sequences=["never", "END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text == "Hi 😊 there "  # type: ignore[union-attr]


def test_thinking_and_its_marker(client: anthropic.Anthropic, server: Process) -> None:
    asked: Any = [{"role": "user", "content": "THINK"}]
    message = both(client, messages=asked, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, answer = message.content
    assert thinking.type == "thinking" and thinking.thinking == "plan"
    assert answer.type == "text" and answer.text == "done"
    assert message.usage.output_tokens_details and 0 < message.usage.output_tokens_details.thinking_tokens < 20
    turns = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": "SAY hi"}]
    client.messages.create(model="any", max_tokens=5, messages=turns)
    assert "<think>plan</think>done" in server.prompts()[-1]
    altered = thinking.model_copy(update={"thinking": "another plan"})
    turns[1] = {"role": "assistant", "content": [altered, answer]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\].signature"):
        client.messages.create(model="any", max_tokens=5, messages=turns)


def test_a_call_and_its_result(client: anthropic.Anthropic, server: Process) -> None:
    asked: Any = [{"role": "user", "content": "USE read"}]
    message = both(client, messages=asked, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    used = message.content[-1]
    assert used.type == "tool_use" and used.name == "read" and used.input == {"path": "/a", "lines": [1, 2.5]}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "not there", "is_error": True}
    answer = {"role": "user", "content": [result, {"type": "text", "text": "SAY hi"}]}
    for content in (message.content, [block.to_dict() for block in message.content], message.model_dump()["content"]):
        turns = [*asked, {"role": "assistant", "content": content}, answer]
        client.messages.create(model="any", max_tokens=5, messages=turns, tools=TOOLS)
    assert len(set(server.prompts()[-3:])) == 1, "SDKs send a message back in three forms, which are one prompt"
    history = server.prompts()[-1]
    assert "<think>A file.</think>Let me look." in history and '"arguments": {"lines"' in history.replace(
        '"path": "/a", ', ""
    )
    assert history.index("not there") < history.index("SAY hi")


def test_undeclared_and_unfinished_calls(client: anthropic.Anthropic) -> None:
    other = both(client, messages=[{"role": "user", "content": "USE other"}], tools=TOOLS)
    assert [block.name for block in other.content if block.type == "tool_use"] == ["remove", "read"]
    assert other.stop_reason == "tool_use"
    limit = len((REPLIES["CUT"] or "").encode())
    cut = both(client, messages=[{"role": "user", "content": "CUT"}], tools=TOOLS, max_tokens=limit)
    assert [block.name for block in cut.content if block.type == "tool_use"] == ["read"]
    assert cut.stop_reason == "max_tokens"


def test_a_call_that_was_required_and_did_not_come(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "TALK"}],
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
    }
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(**asked)
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    kinds = []
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        for event in client.messages.create(**asked, stream=True):
            kinds.append(event.type)
    assert kinds and "message_stop" not in kinds and "message_delta" not in kinds


def test_a_continued_message(client: anthropic.Anthropic, server: Process) -> None:
    message = both(client, messages=[*HI, {"role": "assistant", "content": "Well, "}])
    assert message.content[0].text == ANSWER  # type: ignore[union-attr]
    assert server.prompts()[-1].endswith("\0assistant\nWell, ")


def test_what_betas_send(client: anthropic.Anthropic, server: Process) -> None:
    message = client.beta.messages.create(
        model="any",
        max_tokens=400,
        messages=[*HI, {"role": "system", "content": "<total_tokens>9 tokens left</total_tokens>"}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        betas=["context-management-2025-06-27"],
    )
    assert message.content[0].text == ANSWER  # type: ignore[union-attr]
    assert "<system>\n<total_tokens>9 tokens left</total_tokens>\n</system>" in server.prompts()[-1]


def test_counting(client: anthropic.Anthropic, server: Process) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": HI, "system": "Be brief.", "tools": TOOLS}
    counted = client.messages.count_tokens(**asked).input_tokens
    message = client.messages.create(**asked, max_tokens=5)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted == len(server.prompts()[-1].encode())
    long: Any = [{"role": "user", "content": "x" * (2 * CONTEXT)}]
    assert client.messages.count_tokens(model="any", messages=long).input_tokens > 2 * CONTEXT
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.count_tokens(model="any", messages=[])


def test_overflow_in_the_words_that_clients_parse(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * CONTEXT}]
    counted = client.messages.count_tokens(model="any", messages=long).input_tokens
    with pytest.raises(
        anthropic.BadRequestError, match=f"prompt is too long: {counted} tokens > {CONTEXT - 1} maximum"
    ):
        client.messages.create(model="any", max_tokens=5, messages=long)
    counted = client.messages.count_tokens(model="any", messages=HI).input_tokens
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="any", max_tokens=20_000, messages=HI, stream=stream)
        words = f"input length and `max_tokens` exceed context limit: {counted} + 20000 > {CONTEXT}"
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert words in refused.value.body["error"]["message"]  # type: ignore[index]


def test_a_context_that_is_almost_full_bounds_the_answer(client: anthropic.Anthropic) -> None:
    empty = client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "SAY hi"}]).input_tokens
    filled: Any = [{"role": "user", "content": "x" * (CONTEXT - 12 - empty) + "SAY hi"}]
    message = both(client, messages=filled, max_tokens=20_000)
    assert (message.usage.output_tokens, message.stop_reason) == (12, "max_tokens")


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(model="any", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="safeguards"):
        client.messages.create(model="any", max_tokens=5, messages=HI, extra_body={"safeguards": [{}]})
    hosted: Any = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type"):
        client.messages.create(model="any", max_tokens=5, messages=HI, tools=hosted)
    for stream in (False, True):
        asked: Any = [{"role": "user", "content": "BREAK"}]
        with pytest.raises(anthropic.APIStatusError) as failed:
            answer = client.messages.create(model="any", max_tokens=5, messages=asked, stream=stream)
            list(answer)  # a failure before the first token is the only event
        assert FAILURE not in str(failed.value) and "api_error" in str(failed.value)
        assert (failed.value.request_id or "").startswith("msg_")


def test_the_bytes_of_a_stream(server: Process) -> None:
    """Each frame has its event line, nothing comes before message_start, and no sentinel follows message_stop."""
    body = {"max_tokens": 400, "messages": HI, "stream": True}
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "sk-right"}
    status, sent, data = server.request("POST", "/v1/messages?beta=true", body, headers)
    assert status == 200 and sent["content-type"].startswith("text/event-stream") and sent["x-request-id"][:4] == "msg_"
    frames = data.split(b"\n\n")
    assert frames.pop() == b"" and frames[0].startswith(b"event: message_start\ndata: ")
    assert frames[-1] == b'event: message_stop\ndata: {"type":"message_stop"}'
    for frame in frames:
        name, value = frame.split(b"\n")
        assert json.loads(value.removeprefix(b"data: "))["type"] == name.removeprefix(b"event: ").decode()
