"""Tools and reasoning through the OpenAI SDK, strictly validated, against the real server: whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from flare.output import OutputSyntax
from tests.support.live_server import EOS, IM_END, IM_START, LiveServer, reply

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


PARIS = call("weather", city="Zürich 😊", days=2)
REPLIES = {
    "both": f"<think>Two calls.</think>I will look.\n{PARIS}\n{call('time')}",
    "calls": PARIS,
    "prose": "I would rather talk.",
    "undeclared": f"{call('remove', p=3)}\n{PARIS}",
    "reason": "<think>First I weigh both options.</think>Done.",
    "quoted": "It opens a scratch area.",
    "cut": f"{PARIS}\n{call('time')[:-20]}",
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


def script(prompt: tuple[int, ...], choice: int) -> Sequence[int]:
    """The reply to the last user's message, which names it; after a tool's result there is an answer."""
    words = section(prompt)
    return reply("It is fine.") if words.startswith("tool\n") else reply(REPLIES[words.removeprefix("user\n")])


def section(prompt: Sequence[int]) -> str:
    """The last message of a prompt with its role; control tokens mark where messages begin and end."""
    start = max(i for i, token in enumerate(prompt[:-11]) if token == IM_START)
    return bytes(prompt[start + 1 : prompt.index(IM_END, start)]).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    syntax = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"))
    with LiveServer(
        script=script,
        template=TEMPLATE,
        model={"output": syntax, "context_length": 2048},
        replay={"max_context": 2048, "kv_pages": 512},
    ) as live:
        yield live
        live.idle()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="sk-any", max_retries=0, _strict_response_validation=True
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
    assert answer.usage and answer.usage.completion_tokens == len(REPLIES["both"].encode()) + 1
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
        assert answer.choices[0].message.content == "It is fine." and answer.choices[0].finish_reason == "stop"


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
    asked = "It is said: " + PARIS
    REPLIES["selected"] = asked
    answer = ask(client, "selected", tools=TOOLS, tool_choice=chosen)
    (choice,) = answer.choices
    assert decoded(choice) == [WEATHER] and choice.message.content is None
    assert answer.usage and answer.usage.completion_tokens == len(asked.encode()) + 1


@pytest.mark.parametrize(
    ("choice", "sees"), [("auto", [True, True]), ("none", [False, False]), ("time", [False, True])]
)
def test_what_the_model_sees_of_the_tools(server: LiveServer, choice: str, sees: list[bool]) -> None:
    prompts: list[str] = []
    seen = server.replay.script

    def watch(prompt: tuple[int, ...], index: int) -> Any:
        prompts.append(bytes(token for token in prompt if token < 256).decode())
        return [*call("time").encode(), EOS]

    server.replay.script = watch
    try:
        wanted: Any = {"type": "function", "function": {"name": choice}} if choice == "time" else choice
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": wanted}
        status, _ = server.post("/v1/chat/completions", body)
    finally:
        server.replay.script = seen
    assert status == 200
    assert ["The weather of a place." in prompts[0], '"time"' in prompts[0]] == sees


def test_a_limit_within_a_call_is_the_reason(client: openai.OpenAI) -> None:
    limit = len(REPLIES["cut"].encode())
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
    REPLIES["What does <think> mean? Also </think>."] = REPLIES["quoted"]
    (choice,) = ask(client, "What does <think> mean? Also </think>.").choices
    assert choice.message.content == "It opens a scratch area." and reasoning(choice) is None


def test_shown_tokens(client: openai.OpenAI, server: LiveServer) -> None:
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
    for path, body in (("/v1/completions", {"prompt": [[65, 66], [67]], "max_tokens": 0}),):
        status, raw = server.post(path, {**body, "return_token_ids": True})
        assert status == 200
        assert [(c["prompt_token_ids"], c["token_ids"]) for c in raw["choices"]] == [([65, 66], []), ([67], [])]
