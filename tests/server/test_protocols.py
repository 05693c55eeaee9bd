"""What holds for every protocol, through the SDKs, strictly validated: `flare serve` over a real core says the same through
each of them, whole and streamed, sync and async; and each kind of refusal becomes the exception that the SDK has for it.

What one protocol alone has is in test_chat_sdk.py, test_responses_sdk.py and test_messages_sdk.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.server.process import IDLE_S, Process, scripted, served

ASKED: Any = [{"role": "user", "content": "what is the time?"}]
LIMIT = 24
KEY = "sk-right"
BODY_LIMIT = 1 << 16


def openai_options(server: Process, **more: Any) -> dict[str, Any]:
    options = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0, "_strict_response_validation": True}
    return options | more


def anthropic_options(server: Process, **more: Any) -> dict[str, Any]:
    return openai_options(server) | {"base_url": server.url} | more


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, tiny_core: Path) -> Iterator[Process]:
    with served(tmp_path_factory.mktemp("core"), tiny_core) as up:
        yield up


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A scripted server with a key, that takes one request at a time and small bodies."""
    settings = {"api_key": KEY, "max_requests": 1, "max_body_bytes": BODY_LIMIT}
    with scripted(tmp_path_factory.mktemp("small"), settings=settings) as up:
        yield up


class Said(NamedTuple):
    """An answer in neutral form; `why` is the protocol's own word for its end."""

    text: str
    tokens: tuple[int, int]
    why: str | None


def of_chat(answer: Any) -> Said:
    choice, usage = answer.choices[0], answer.usage
    return Said(choice.message.content, (usage.prompt_tokens, usage.completion_tokens), choice.finish_reason)


def of_response(answer: Any) -> Said:
    details = answer.incomplete_details
    usage = answer.usage
    return Said(answer.output_text, (usage.input_tokens, usage.output_tokens), details.reason if details else None)


def of_message(answer: Any) -> Said:
    text = "".join(block.text for block in answer.content)
    return Said(text, (answer.usage.input_tokens, answer.usage.output_tokens), answer.stop_reason)


async def chat(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    """Whole, as raw chunks, and as the SDK puts a stream together."""
    whole = await client.chat.completions.create(**asked)
    raw = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in raw]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    usage = chunks[-1].usage
    assert usage is not None
    streamed = Said(text, (usage.prompt_tokens, usage.completion_tokens), choices[-1].finish_reason)
    options: Any = {"stream_options": {"include_usage": True}}
    # The SDK's helper makes an exception of an answer that a limit cut; it holds the completion.
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        async with client.chat.completions.stream(**asked, **options) as stream:
            await stream.get_final_completion()
    return [of_chat(whole), streamed, of_chat(cut.value.completion)]


async def response(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    whole = await client.responses.create(**asked)
    events: AsyncIterator[Any] = await client.responses.create(**asked, stream=True)
    found = [event async for event in events]
    streamed = of_response(found[-1].response)
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == streamed.text
    return [of_response(whole), streamed]


async def message(client: anthropic.AsyncAnthropic, **asked: Any) -> list[Said]:
    whole = await client.messages.create(**asked)
    text = ""
    async for event in await client.messages.create(**asked, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
    async with client.messages.stream(**asked) as stream:
        gathered = await stream.get_final_message()
        assert await stream.get_final_text() == text
    return [of_message(whole), of_message(gathered)]


def test_every_protocol_says_the_same_in_every_way(core: Process) -> None:
    """Greedy: one text and one count of tokens, through three protocols, whole and streamed, all at once and one by one."""
    chat_asked: Any = {"model": "m", "messages": ASKED, "temperature": 0, "max_tokens": LIMIT}
    response_asked: Any = {"model": "m", "input": ASKED, "temperature": 0, "max_output_tokens": LIMIT}
    message_asked: Any = {"model": "m", "messages": ASKED, "max_tokens": LIMIT}

    async def all_at_once() -> list[list[Said]]:
        async with (
            openai.AsyncOpenAI(**openai_options(core)) as one,
            anthropic.AsyncAnthropic(**anthropic_options(core)) as other,
        ):
            # The SDK has no temperature any more, the protocol has.
            greedy = message(other, **message_asked, extra_body={"temperature": 0})
            answers = chat(one, **chat_asked), response(one, **response_asked), greedy
            return await asyncio.gather(*answers)

    chats, responses, messages = asyncio.run(all_at_once())
    with openai.OpenAI(**openai_options(core)) as one, anthropic.Anthropic(**anthropic_options(core)) as other:
        chats.append(of_chat(one.chat.completions.create(**chat_asked)))
        responses.append(of_response(one.responses.create(**response_asked)))
        messages.append(of_message(other.messages.create(**message_asked, extra_body={"temperature": 0})))
    text, tokens = chats[0].text, chats[0].tokens
    assert text and tokens[1] == LIMIT
    assert chats == [Said(text, tokens, "length")] * 4
    assert responses == [Said(text, tokens, "max_output_tokens")] * 3
    assert messages == [Said(text, tokens, "max_tokens")] * 3


def test_a_chat_is_a_completion_of_its_own_tokens(core: Process) -> None:
    """The prompt's tokens that a chat shows are the prompt that it was: a raw completion of them goes on in the same way."""
    shown: Any = {"return_token_ids": True}
    with openai.OpenAI(**openai_options(core)) as client:
        chat = client.chat.completions.create(
            model="m", messages=ASKED, temperature=0, max_tokens=LIMIT, n=2, extra_body=shown
        )
        prompt = (chat.model_extra or {})["prompt_token_ids"]
        raw = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=LIMIT, extra_body=shown)
    (own,) = raw.choices
    for choice in chat.choices:
        assert choice.message.content == own.text
        assert (choice.model_extra or {})["token_ids"] == (own.model_extra or {})["token_ids"]
    assert chat.usage and raw.usage
    assert chat.usage.prompt_tokens == raw.usage.prompt_tokens == len(prompt)
    assert chat.usage.completion_tokens == 2 * raw.usage.completion_tokens


def test_a_seed_gives_the_same_draws_through_async_and_sync_clients(core: Process) -> None:
    asked: Any = {"model": "m", "messages": ASKED, "temperature": 1.5, "seed": 11, "n": 3, "max_tokens": LIMIT}

    async def draw() -> list[str | None]:
        async with openai.AsyncOpenAI(**openai_options(core)) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(3)))
        drawn = [[choice.message.content for choice in answer.choices] for answer in answers]
        assert drawn[0] == drawn[1] == drawn[2]
        return drawn[0]

    with openai.OpenAI(**openai_options(core)) as client:
        alone = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    assert asyncio.run(draw()) == alone
    assert len(set(alone)) == 3


def test_counting_is_what_a_message_and_a_chat_are_charged(core: Process) -> None:
    with openai.OpenAI(**openai_options(core)) as one, anthropic.Anthropic(**anthropic_options(core)) as other:
        counted = other.messages.count_tokens(model="m", messages=ASKED, system="Größe 🙂").input_tokens
        charged = other.messages.create(model="m", messages=ASKED, system="Größe 🙂", max_tokens=1).usage
        told: Any = [{"role": "system", "content": "Größe 🙂"}, *ASKED]
        chat = one.chat.completions.create(model="m", messages=told, max_tokens=1).usage
    assert chat and charged.input_tokens == counted == chat.prompt_tokens


def test_models(core: Process) -> None:
    async def listed() -> list[Any]:
        async with openai.AsyncOpenAI(**openai_options(core)) as client:
            return [model async for model in client.models.list()]

    with openai.OpenAI(**openai_options(core)) as client:
        (model,) = client.models.list().data
        assert asyncio.run(listed()) == [model] == [client.models.retrieve(model.id)]
        assert (model.model_extra or {})["max_model_len"] == 256
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")


def test_names_with_a_slash(small: Process) -> None:
    """SDKs send the name in the path, its slash quoted."""
    with openai.OpenAI(**openai_options(small)) as client:
        (model,) = client.models.list().data
        assert "/" in model.id and client.models.retrieve(model.id) == model


def test_a_model_without_tools_refuses_them_in_every_protocol(core: Process) -> None:
    function: Any = {"name": "f", "parameters": {"type": "object"}}
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    with openai.OpenAI(**openai_options(core)) as one, anthropic.Anthropic(**anthropic_options(core)) as other:
        with pytest.raises(openai.BadRequestError, match="tools") as refused:
            one.chat.completions.create(model="m", messages=ASKED, tools=[{"type": "function", "function": function}])
        assert refused.value.param == "tools"
        with pytest.raises(openai.BadRequestError, match="tools"):
            one.responses.create(model="m", input=ASKED, tools=[{"type": "function", **function}])
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            other.messages.create(model="m", messages=ASKED, max_tokens=5, tools=[tool])


CALLS: dict[str, Callable[..., Any]] = {
    "chat": lambda one, other, words, **more: one.chat.completions.create(
        model="m", messages=[{"role": "user", "content": words}], **more
    ),
    "completion": lambda one, other, words, **more: one.completions.create(model="m", prompt=words, **more),
    "response": lambda one, other, words, **more: one.responses.create(
        model="m", input=[{"role": "user", "content": words}], **more
    ),
    "message": lambda one, other, words, **more: other.messages.create(
        model="m", messages=[{"role": "user", "content": words}], max_tokens=5, **more
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_refusals_are_the_exceptions_that_the_sdks_have_for_them(small: Process, call: str, stream: bool) -> None:
    """By status, with the text of the server, whole and streamed alike: nothing has begun when they are told."""
    sdk: Any = anthropic if call == "message" else openai
    too_large = anthropic.RequestTooLargeError if sdk is anthropic else openai.APIStatusError
    one, other = openai.OpenAI(**openai_options(small)), anthropic.Anthropic(**anthropic_options(small))
    wrong = one.with_options(api_key="sk-wrong"), other.with_options(api_key="sk-wrong")
    misled = (
        one.with_options(base_url=f"{small.url}/v1/v1"),
        other.with_options(base_url=f"{small.url}/v1"),
    )

    def refused(kind: type[Exception], status: int, clients: tuple[Any, Any], words: str = "x", **more: Any) -> str:
        with pytest.raises(kind) as caught:
            CALLS[call](*clients, words, stream=stream, **more)
        error: Any = caught.value
        assert error.status_code == status
        assert error.response.headers["content-type"] == "application/json"
        told = error.body["error"] if sdk is anthropic else error.body
        assert told["message"] and told["message"].isprintable()
        return str(told["type"])

    both = (one, other)
    with one, other:
        assert refused(sdk.BadRequestError, 400, both, extra_body={"colour": 1}) == "invalid_request_error"
        assert refused(sdk.AuthenticationError, 401, wrong) == "authentication_error"
        refused(sdk.NotFoundError, 404, misled)
        assert refused(too_large, 413, both, "x" * BODY_LIMIT) == "request_too_large"
        refused(sdk.APIStatusError, 415, both, extra_headers={"Content-Encoding": "compress"})
        with held(small):
            assert refused(sdk.RateLimitError, 429, both) == "rate_limit_error"
        small.idle()
        assert CALLS[call](*both, "x").id


class held:
    """Takes the server's one place by a request whose body does not come, and gives it back."""

    def __init__(self, server: Process) -> None:
        self._server = server

    def __enter__(self) -> None:
        host, port = self._server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
        self._socket.sendall(head.encode())
        deadline = time.monotonic() + IDLE_S
        while self._server.status()["admission"]["used"] == 0:
            assert time.monotonic() < deadline, "the request was not admitted"

    def __exit__(self, *_: object) -> None:
        self._socket.close()
