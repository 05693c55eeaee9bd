"""The OpenAI SDK with strict response validation, against the real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.live_server import LiveServer, reply

TEXT = "Hi 😊 there"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=lambda prompt, choice: reply(TEXT), settings={"api_key": "sk-right"}) as live:
        yield live
        live.idle()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="sk-right", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=MESSAGES, temperature=0, seed=1, user="u")
    (choice,) = answer.choices
    assert choice.message.content == TEXT and choice.finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.model_extra and answer.model_extra["flare_context"]["tokens_remaining"] > 0
    assert answer._request_id == answer.id


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1


def test_the_sdks_accumulated_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="any", messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="x", max_tokens=4, best_of=1, n=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:3] + "�", "length")


def test_streamed_completions(server: LiveServer) -> None:
    """Not strictly validated: the SDK's type of a choice has no null finish reason, which every chunk but the last has,
    here as with the API that the SDK is made for."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-right", max_retries=0) as client:
        chunks = list(client.completions.create(model="any", prompt=["x", "y"], stream=True))
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == TEXT
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_a_continued_message() -> None:
    """The prompt ends within the message, so that the answer is the rest of it."""
    prompts: list[bytes] = []

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        prompts.append(bytes(token for token in prompt if token < 256))
        return reply(" day")

    messages = [*MESSAGES, {"role": "assistant", "content": "Good"}]
    with (
        LiveServer(script=script, model={"continuation": "<|im_end|>\n"}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=1, extra_body=extra)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" ", "length")
        assert prompts[-1] == b"user\nhello\nassistant\nGood"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="any", messages=MESSAGES, extra_body=extra)
        assert refused.value.param == "continue_final_message"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model  # sent as org%2Ftiny
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=MESSAGES, logprobs=True)
    assert (refused.value.param, refused.value.code) == ("logprobs", "unsupported_parameter")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    server.replay.fail_next_step(ValueError("secret detail of /a/path"))
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="any", messages=MESSAGES)
    assert "secret" not in str(failed.value)
    server.replay.fail_next_step(ValueError("secret detail of /a/path"))
    with pytest.raises(openai.APIError) as broken:
        list(client.chat.completions.create(model="any", messages=MESSAGES, stream=True))
    assert "secret" not in str(broken.value)
