"""What other servers were reported to get wrong, asked of this one through every protocol, whole and streamed.

Each test is about a kind of fault; those that belong to one protocol, to bodies or to connections have their tests there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.server.process import Process, scripted
from tests.support.scripted_server import THINKING

CHAT, RAW, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TALKS = (CHAT, MESSAGES, RESPONSES)
VERSION = {"anthropic-version": "2023-06-01"}
SCHEMA = {"type": "object", "properties": {"v": {"type": "string"}}}


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"v": "1"}}}}\n</tool_call>'


REPLIES: dict[str, str | None] = {
    "WEIGH": "First I weigh both options,",
    "CLOSE": "hm</think>So it is.",
    "PROSE": f"hm</think>Sure! {call('a')}",
    "OTHER": f"hm</think>{call('b')}",
    "FIVE": "</think>abcd",
    "TWICE": f"hm</think>{call('a')}\n{call('a')}",
    "What does <think> mean? Also </think>.": "It opens a scratch area.",
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A model whose prompts end within its reasoning."""
    levels: list[Any] = THINKING["levels"]  # type: ignore[assignment]
    opened = THINKING | {"levels": [level | {"opens_reasoning": True} for level in levels]}
    with scripted(tmp_path_factory.mktemp("thinking"), REPLIES, context=4096, model={"thinking": opened}) as up:
        yield up


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with scripted(tmp_path_factory.mktemp("plain"), REPLIES, context=4096) as up:
        yield up


class Answer(NamedTuple):
    """An answer in neutral form. `why` is the protocol's word for its end."""

    text: str
    reasoning: str
    calls: list[str]
    why: str
    tokens: int


def tools(path: str, *names: str) -> list[dict[str, Any]]:
    if path == MESSAGES:
        return [{"name": name, "input_schema": SCHEMA} for name in names]
    functions = [{"name": name, "parameters": SCHEMA} for name in names]
    if path == RESPONSES:
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


def named(path: str, name: str) -> dict[str, Any]:
    """The choice of one tool."""
    if path == MESSAGES:
        return {"type": "tool", "name": name}
    return {"type": "function", "function": {"name": name}} if path == CHAT else {"type": "function", "name": name}


def body(path: str, words: str, limit: int = 1000, **more: Any) -> dict[str, Any]:
    turn = [{"role": "user", "content": words}]
    if path == RESPONSES:
        return {"input": turn, "max_output_tokens": limit, **more}
    return {"messages": turn, "max_tokens": limit, **more}


def events(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def of_chat(choice: dict[str, Any], message: dict[str, Any], usage: dict[str, Any]) -> Answer:
    names = [one["function"]["name"] for one in message.get("tool_calls") or []]
    text, thought = message.get("content") or "", message.get("reasoning_content") or ""
    return Answer(text, thought, names, choice["finish_reason"], usage["completion_tokens"])


def of_message(blocks: list[dict[str, Any]], why: str, usage: dict[str, Any]) -> Answer:
    parts = {kind: "".join(block.get(kind, "") for block in blocks) for kind in ("text", "thinking")}
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    return Answer(parts["text"], parts["thinking"], names, why, usage["output_tokens"])


def of_response(response: dict[str, Any]) -> Answer:
    texts = {"message": "", "reasoning": ""}
    for item in response["output"]:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    names = [item["name"] for item in response["output"] if item["type"] == "function_call"]
    why = (response["incomplete_details"] or {}).get("reason", response["status"])
    return Answer(texts["message"], texts["reasoning"], names, why, response["usage"]["output_tokens"])


def whole(path: str, answer: dict[str, Any]) -> Answer:
    if path == CHAT:
        (choice,) = answer["choices"]
        return of_chat(choice, choice["message"], answer["usage"])
    if path == RESPONSES:
        return of_response(answer)
    return of_message(answer["content"], answer["stop_reason"], answer["usage"])


def put_together(path: str, found: list[Any]) -> Answer:
    """The answer of a stream's events."""
    if path == RESPONSES:
        return of_response(found[-1]["response"])
    if path == MESSAGES:
        blocks = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        for event in found:
            if event["type"] == "content_block_delta":
                for kind in ("text", "thinking"):
                    blocks[event["index"]][kind] = blocks[event["index"]].get(kind, "") + event["delta"].get(kind, "")
        (end,) = [event for event in found if event["type"] == "message_delta"]
        return of_message(blocks, end["delta"]["stop_reason"], end["usage"])
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in found:
        for choice in chunk["choices"]:
            for name in message:
                message[name] += choice["delta"].get(name) or type(message[name])()
    ends = [choice for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    return of_chat(ends[-1], message, found[-1]["usage"])


def ask(server: Process, path: str, asked: dict[str, Any]) -> Answer:
    """The answer, which is the same whole and streamed."""
    status, _, data = server.request("POST", path, asked, VERSION)
    assert status == 200, data
    answer = whole(path, json.loads(data))
    streamed = {"stream": True} | ({"stream_options": {"include_usage": True}} if path == CHAT else {})
    status, _, data = server.request("POST", path, asked | streamed, VERSION)
    assert status == 200 and put_together(path, events(data)) == answer, data
    return answer


def ends_in_failure(path: str, data: bytes) -> bool:
    """Whether the last event of a stream tells a failure, with no word of success before or behind it."""
    *before, last = events(data)
    kinds = {event.get("type") for event in before}
    if b"[DONE]" in data or kinds & {"message_stop", "message_delta", "response.completed", "response.incomplete"}:
        return False
    if path == CHAT:
        return "error" in last and not any(choice["finish_reason"] for event in before for choice in event["choices"])
    return last["type"] == ("error" if path == MESSAGES else "response.failed")


LIMIT_REACHED = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
ENDED = {CHAT: "stop", MESSAGES: "end_turn", RESPONSES: "completed"}


@pytest.mark.parametrize("path", TALKS)
def test_thinking_that_the_prompt_begins_and_a_limit_cuts_is_no_answer(thinking: Process, path: str) -> None:
    text = "First I weigh both options,"
    answer = ask(thinking, path, body(path, "WEIGH", len(text)))
    assert answer == Answer("", text, [], LIMIT_REACHED[path], len(text))
    answer = ask(thinking, path, body(path, "CLOSE"))
    assert answer == Answer("So it is.", "hm", [], ENDED[path], len("hm</think>So it is.") + 1)


@pytest.mark.parametrize("path", TALKS)
def test_delimiters_in_a_question_change_nothing(server: Process, path: str) -> None:
    words = "What does <think> mean? Also </think>."
    answer = ask(server, path, body(path, words))
    assert answer == Answer("It opens a scratch area.", "", [], ENDED[path], len("It opens a scratch area.") + 1)


@pytest.mark.parametrize("path", TALKS)
def test_a_named_tool_is_the_only_one_shown_and_the_only_one_called(thinking: Process, path: str) -> None:
    asked = {"tools": tools(path, "a", "b"), "tool_choice": named(path, "a")}
    answer = ask(thinking, path, body(path, "PROSE", **asked))
    assert (answer.text, answer.calls, answer.tokens) == ("", ["a"], len((REPLIES["PROSE"] or "").encode()) + 1)
    shown = thinking.prompts()[-1].partition("tools\n")[2].partition("\0")[0]
    assert [tool["function"]["name"] for tool in json.loads(shown)] == ["a"]
    for words in ("OTHER", "CLOSE"):
        status, _, data = thinking.request("POST", path, body(path, words, **asked), VERSION)
        assert status == 500 and call("b") not in data.decode()
        status, _, data = thinking.request("POST", path, body(path, words, stream=True, **asked), VERSION)
        assert status == 200 and ends_in_failure(path, data), data
        # A response shows the tools that were offered.
        told = [line for line in data.splitlines() if b'"object":"response"' not in line]
        assert not any(b'"name":"b"' in line for line in told)


@pytest.mark.parametrize("path", TALKS)
def test_a_limit_within_the_calls_that_were_required(thinking: Process, path: str) -> None:
    """One complete call is enough and the limit is told as the reason; none at all is a failure."""
    required: Any = {"type": "any"} if path == MESSAGES else "required"
    asked = {"tools": tools(path, "a"), "tool_choice": required}
    first = f"hm</think>{call('a')}"
    for limit in (len(first), len(first) + 20):
        answer = ask(thinking, path, body(path, "TWICE", limit, **asked))
        assert (answer.calls, answer.why, answer.tokens) == (["a"], LIMIT_REACHED[path], limit)
    for limit in (1, len("hm</think>"), len(first) - 20):
        status, _, data = thinking.request("POST", path, body(path, "TWICE", limit, **asked), VERSION)
        assert status == 500, (limit, data)
        status, _, data = thinking.request("POST", path, body(path, "TWICE", limit, stream=True, **asked), VERSION)
        assert status == 200 and ends_in_failure(path, data), data


@pytest.mark.parametrize("path", [CHAT, RAW])
def test_running_usage_is_sent_when_it_is_asked_for_and_counts_a_prompt_once(server: Process, path: str) -> None:
    start = {"prompt": "x FIVE"} if path == RAW else {"messages": [{"role": "user", "content": "FIVE"}]}
    both = {"include_usage": True, "continuous_usage_stats": True}
    answer = json.loads(server.request("POST", path, start | {"n": 2})[2])

    def streamed(options: dict[str, bool]) -> list[Any]:
        status, _, data = server.request("POST", path, start | {"n": 2, "stream": True, "stream_options": options})
        assert status == 200 and data.endswith(b"data: [DONE]\n\n")
        return events(data)

    running = [chunk["usage"] for chunk in streamed(both)]
    totals = [usage["completion_tokens"] for usage in running]
    assert all(usage["prompt_tokens"] == answer["usage"]["prompt_tokens"] for usage in running)
    assert totals == sorted(totals) and totals[-1] == answer["usage"]["completion_tokens"]
    assert not any("usage" in chunk for chunk in streamed({"continuous_usage_stats": True}))
    *before, last = streamed({"include_usage": True})
    assert last["usage"] == answer["usage"] and last["choices"] == []
    assert not any(chunk.get("usage") for chunk in before)


@pytest.mark.parametrize("half", [r"\ud83d", r"\udcf0", r"\ude00\ud83d"])
def test_half_a_character_within_the_arguments_of_an_earlier_call(server: Process, half: str) -> None:
    """The body is sound; the text of the arguments, which is JSON once more, is not."""
    arguments = f'{{"v": "{half}"}}'
    function = {"name": "a", "arguments": arguments}
    chat = [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]
    items = [{"type": "function_call", "call_id": "c", **function}]
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    for path, asked in ((CHAT, {"messages": [*chat, result]}), (RESPONSES, {"input": [*items, output]})):
        for stream in (False, True):
            sent = asked | {"tools": tools(path, "a"), "stream": stream}
            status, headers, data = server.request("POST", path, sent)
            assert status == 400 and headers["content-type"] == "application/json", data
            assert "arguments" in json.loads(data)["error"]["message"]


def test_system_text_among_the_messages(server: Process) -> None:
    """It reaches the model wherever it stands, empty text is nothing, and marks for caches change nothing."""
    mark = {"cache_control": {"type": "ephemeral"}}

    def asked(**marked: Any) -> dict[str, Any]:
        hook = {"role": "system", "content": [{"type": "text", "text": "Hook says 7.", **marked}]}
        turns = [{"role": "user", "content": "a"}, hook, {"role": "user", "content": "b"}]
        return {"system": [{"type": "text", "text": "Top.", **marked}], "messages": turns, "max_tokens": 20}

    usages = []
    for sent in (asked(), asked(**mark)):
        status, _, data = server.request("POST", MESSAGES, sent, VERSION)
        assert status == 200, data
        usage = json.loads(data)["usage"]
        usages.append(usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])
    one, other = server.prompts()[-2:]
    assert one == other and one.index("Top.") < one.index("a\0") < one.index("Hook says 7.") < one.index("b\0")
    with_empty = asked()
    with_empty["messages"].append({"role": "system", "content": ""})
    assert server.request("POST", MESSAGES, with_empty, VERSION)[0] == 200
    assert server.prompts()[-1] == one
    del with_empty["max_tokens"]
    counted = json.loads(server.request("POST", f"{MESSAGES}/count_tokens", with_empty, VERSION)[2])["input_tokens"]
    assert usages == [counted, counted]


def test_a_picture_in_the_result_of_a_tool_is_refused_by_a_model_of_text(server: Process) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}

    def asked(*content: Any) -> dict[str, Any]:
        turns = [("user", "x"), ("assistant", [use]), ("user", [result | {"content": list(content)}])]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"max_tokens": 20, "tools": tools(MESSAGES, "shot"), "messages": messages}

    text = {"type": "text", "text": "half page"}
    status, _, data = server.request("POST", MESSAGES, asked(text, picture), VERSION)
    error = json.loads(data)
    assert status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert "messages[2].content[0].content[1]" in error["error"]["message"]
    assert server.request("POST", MESSAGES, asked(text), VERSION)[0] == 200
    assert "<error>" in server.prompts()[-1] and "half page" in server.prompts()[-1]


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        (CHAT, {"messages": []}, 400),
        (MESSAGES, {"messages": [], "max_tokens": 5}, 400),
        (f"{MESSAGES}/count_tokens", {"messages": []}, 400),
        (RESPONSES, {"input": []}, 400),
        (RAW, {"prompt": []}, 400),
        (RAW, {"prompt": [[]]}, 400),
        (RAW, {"prompt": ["a", []]}, 400),
        (RAW, {"prompt": ""}, 200),  # the model has a start token
        (RAW, {"prompt": ["a", ""]}, 200),
        (RESPONSES, {"input": ""}, 200),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 200),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, 200),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, 200),
        (MESSAGES, {"messages": [{"role": "user", "content": []}], "max_tokens": 5}, 200),
        (RESPONSES, {"input": [{"role": "user", "content": []}]}, 200),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400),
        (MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400),
        (RESPONSES, {"input": "x", "max_output_tokens": 0}, 400),
        (RAW, {"prompt": "x", "max_tokens": 0}, 200),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_answer(server: Process, path: str, asked: dict[str, Any], status: int, stream: bool) -> None:
    got, headers, data = server.request("POST", path, asked | ({"stream": True} if stream else {}), VERSION)
    assert got == status, data
    if status == 400:
        assert headers["content-type"] == "application/json"
        assert json.loads(data)["error"]["type"] == "invalid_request_error"
    elif not stream and asked.get("max_tokens") == 0:
        (choice,) = json.loads(data)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert json.loads(data)["usage"]["completion_tokens"] == 0
