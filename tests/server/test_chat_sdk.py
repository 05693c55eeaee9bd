"""Chat Completions and Completions through the OpenAI SDK, strictly validated, against a server process: whole and
streamed alike, text, reasoning, tools, choices, shown tokens and failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.server.process import Process, scripted
from tests.support.live_server import EOS
from tests.support.scripted_server import FAILURE


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


TEXT = "Hi 😊 there"
PARIS = call("weather", city="Zürich 😊", days=2)
REPLIES: dict[str, str | None] = {
    "both": f"<think>Two calls.</think>I will look.\n{PARIS}\n{call('time')}",
    "calls": PARIS,
    "prose": "I would rather talk.",
    "undeclared": f"{call('remove', p=3)}\n{PARIS}",
    "reason": "<think>First I weigh both options.</think>Done.",
    "cut": f"{PARIS}\n{call('time')[:-20]}",
    "selected": f"It is said: {PARIS}",
    "clock": call("time"),
    "What does <think> mean? Also </think>.": "It opens a scratch area.",
    "broken": None,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("chat")
    model = {"continuation": "<|im_end|>\n"}
    with scripted(folder, REPLIES, plain=TEXT, context=2048, settings={"api_key": "sk-right"}, model=model) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="sk-right", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def ask(client: openai.OpenAI, words: str, **fields: Any) -> ChatCompletion:
    """Asks whole and streamed, checks that the SDK makes the same of both, and returns the whole answer."""
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": words}]} | fields
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        deltas = [one.delta.model_dump(exclude_unset=True) for one in own]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == (choice.message.content or "")
        assert "".join(d.get("reasoning_content", "") for d in deltas) == (reasoning(choice) or "")
        calls = [call for d in deltas for call in d.get("tool_calls", [])]
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == made(choice)
        assert own[-1].finish_reason == choice.finish_reason
    return whole


def size(words: str) -> int:
    """How many tokens a reply has, without the end token."""
    return len((REPLIES[words] or "").encode())


def made(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def decoded(choice: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in made(choice)]


def reasoning(choice: Any) -> str | None:
    return getattr(choice.message, "reasoning_content", None)


WEATHER = ("weather", {"city": "Zürich 😊", "days": 2})


def test_reasoning_text_and_two_calls(client: openai.OpenAI) -> None:
    answer = ask(client, "both", tools=TOOLS)
    (choice,) = answer.choices
    assert decoded(choice) == [WEATHER, ("time", {})]
    assert reasoning(choice) == "Two calls." and (choice.message.content or "").strip() == "I will look."
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls or []}) == 2
    assert answer.usage and answer.usage.completion_tokens == size("both") + 1
    details = answer.usage.completion_tokens_details
    assert details and len("Two calls.") <= (details.reasoning_tokens or 0) < len("<think>Two calls.</think>I")


def test_only_calls_have_no_content(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "calls", tools=TOOLS).choices
    assert choice.message.content is None and decoded(choice) == [WEATHER]


def test_choices_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, "both", tools=TOOLS, n=2)
    assert [decoded(choice) for choice in answer.choices] == [[WEATHER, ("time", {})]] * 2
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 4


def test_the_sdks_own_message_is_the_next_turn(client: openai.OpenAI) -> None:
    """The objects that the SDK makes of an answer, whole or put together from a stream, go back as they are."""
    asked: Any = {"model": "any", "tools": TOOLS}
    user: Any = {"role": "user", "content": "both"}
    whole = client.chat.completions.create(messages=[user], **asked).choices[0].message
    with client.chat.completions.stream(messages=[user], **asked) as stream:
        gathered = stream.get_final_completion().choices[0].message
    with client.chat.completions.stream(messages=[user], **asked) as stream:
        kinds = {event.type for event in stream}
    assert {"tool_calls.function.arguments.done", "content.done"} <= kinds
    for message in (whole, gathered, gathered.model_dump()):
        calls = (message if isinstance(message, dict) else message.model_dump())["tool_calls"]
        results: Any = [{"role": "tool", "tool_call_id": call["id"], "content": "12 °C"} for call in calls]
        answer = client.chat.completions.create(messages=[user, message, *results], **asked)
        assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"


def test_calls_of_undeclared_tools_are_passed_on(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "undeclared", tools=TOOLS).choices
    assert decoded(choice) == [("remove", {"p": 3}), WEATHER] and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("prose", {"tool_choice": "required"}),
        ("prose", {"tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ("calls", {"tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ("both", {"parallel_tool_calls": False}),
    ],
)
def test_what_the_request_did_not_allow_fails(client: openai.OpenAI, words: str, fields: dict[str, Any]) -> None:
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": words}], "tools": TOOLS, **fields}
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(**asked)
    assert failed.value.type == "server_error"
    seen = []
    with pytest.raises(openai.APIError):
        for chunk in client.chat.completions.create(**asked, stream=True):
            seen.append(chunk)
    assert not any(chunk.choices[0].finish_reason for chunk in seen)


def test_a_selected_tool_is_called_and_nothing_is_said(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, "selected", tools=TOOLS, tool_choice=chosen)
    (choice,) = answer.choices
    assert decoded(choice) == [WEATHER] and choice.message.content is None
    assert answer.usage and answer.usage.completion_tokens == size("selected") + 1


@pytest.mark.parametrize(
    ("choice", "sees"), [("auto", [True, True]), ("none", [False, False]), ("time", [False, True])]
)
def test_what_the_model_sees_of_the_tools(
    client: openai.OpenAI, server: Process, choice: str, sees: list[bool]
) -> None:
    wanted: Any = {"type": "function", "function": {"name": choice}} if choice == "time" else choice
    messages: Any = [{"role": "user", "content": "clock"}]
    client.chat.completions.create(model="any", messages=messages, tools=TOOLS, tool_choice=wanted)
    prompt = server.prompts()[-1]
    assert ["The weather of a place." in prompt, '"time"' in prompt] == sees


def test_a_limit_within_a_call_is_the_reason(client: openai.OpenAI) -> None:
    limit = size("cut")
    (choice,) = ask(client, "cut", tools=TOOLS, max_tokens=limit).choices
    assert decoded(choice) == [WEATHER] and choice.finish_reason == "length"


def test_a_limit_within_reasoning(client: openai.OpenAI) -> None:
    limit = len("<think>First I weigh")
    answer = ask(client, "reason", max_tokens=limit)
    (choice,) = answer.choices
    assert reasoning(choice) == "First I weigh" and not choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == limit


def test_stops_do_not_act_within_reasoning(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "reason", stop=["weigh", "ne"]).choices
    assert reasoning(choice) == "First I weigh both options." and choice.message.content == "Do"
    assert choice.finish_reason == "stop"


def test_delimiters_in_a_question_change_nothing(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "What does <think> mean? Also </think>.").choices
    assert choice.message.content == "It opens a scratch area." and reasoning(choice) is None


def test_shown_tokens(client: openai.OpenAI) -> None:
    words = "both"
    asked: Any = {"return_token_ids": True, "return_token_timestamps": True}
    answer = ask(client, words, tools=TOOLS, extra_body=asked)
    ids, times = answer.choices[0].model_extra["token_ids"], answer.choices[0].model_extra["token_timestamps"]
    assert bytes(ids[:-1]).decode() == REPLIES[words] and ids[-1] == EOS
    assert times == sorted(times) and len(times) == len(ids) and times[0] > 0
    extra = answer.model_extra or {}
    assert answer.usage and len(extra["prompt_token_ids"]) == answer.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": words}], tools=TOOLS, stream=True, extra_body=asked
        )
    )
    streamed = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids", [])]
    assert streamed == ids
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == extra["prompt_token_ids"]
    assert chunks[-1].usage == answer.usage and not any(chunk.usage for chunk in chunks[:-1])
    raw = client.completions.create(
        model="any", prompt=[[65, 66], [67]], max_tokens=0, extra_body={"return_token_ids": True}
    )
    shown = [choice.model_extra or {} for choice in raw.choices]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in shown] == [([65, 66], []), ([67], [])]


def test_plain_text_and_what_is_told_beside_it(client: openai.OpenAI) -> None:
    """Every answer says why it ended, how full the context is, and how long it took; a stream says so in its last chunk."""
    answer = ask(client, "hello", temperature=0, seed=1, user="u")
    (choice,) = answer.choices
    assert choice.message.content == TEXT and choice.finish_reason == "stop" and reasoning(choice) is None
    assert (choice.model_extra or {})["stop_reason"] == "stop_token"
    assert answer.usage and answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer._request_id == answer.id
    extra = answer.model_extra or {}
    used = answer.usage.total_tokens
    assert extra["flare_context"] == {"tokens_used": used, "context_length": 2048, "tokens_remaining": 2048 - used}
    messages: Any = [{"role": "user", "content": "hello"}]
    last = list(client.chat.completions.create(model="any", messages=messages, stream=True))[-1]
    told = last.model_extra or {}
    assert told["flare_context"] == extra["flare_context"] and set(told["timings"]) == set(extra["timings"])
    assert all(value is None or value >= 0 for value in [*extra["timings"].values(), *told["timings"].values()])


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="x", max_tokens=4, best_of=1, n=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:3] + "�", "length")
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 4)


def test_streamed_completions(server: Process) -> None:
    """Not strictly validated: the SDK's type of a choice has no null finish reason, which every chunk but the last has,
    here as with the API that the SDK is made for."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-right", max_retries=0) as client:
        chunks = list(client.completions.create(model="any", prompt=["x", "y"], stream=True))
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == TEXT
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_a_continued_message(client: openai.OpenAI, server: Process) -> None:
    """The prompt ends within the message, so that the answer is the rest of it."""
    hello: Any = [{"role": "user", "content": "hello"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*hello, {"role": "assistant", "content": "Good"}]
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=2, extra_body=extra)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT[:2], "length")
    assert server.prompts()[-1] == "\0user\nhello\0\n\0assistant\nGood"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=hello, extra_body=extra)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_model_is_an_exception_that_says_nothing_of_its_cause(
    client: openai.OpenAI, stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": "broken"}]
    with pytest.raises(openai.APIError) as failed:
        list(client.chat.completions.create(model="any", messages=messages, stream=stream))
    assert isinstance(failed.value, openai.InternalServerError) != stream
    assert failed.value.type == "server_error" and FAILURE not in str(failed.value) + str(failed.value.body)
