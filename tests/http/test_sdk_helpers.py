"""What docs/clients.md says the SDKs make of answers that their helpers do not expect."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=lambda prompt, choice: [97] * 400) as server:
        yield server


def test_anthropic_s_models_are_openai_s(server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="local")
    for model in (client.models.retrieve("org/tiny"), client.models.list().data[0]):
        assert model.id == "org/tiny" and model.model_extra is not None
        assert model.model_extra["max_model_len"] == 512
        for absent in ("type", "display_name", "created_at", "max_input_tokens", "max_tokens"):
            assert getattr(model, absent) is None
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-any")
    assert client.messages.create(model="claude-any", max_tokens=2, messages=[{"role": "user", "content": "x"}]).content


def test_openai_s_helpers_on_an_answer_that_a_limit_cut(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="local")
    with client.responses.stream(model="local", input="x", max_output_tokens=5) as stream:
        last = list(stream)[-1]
        assert last.type == "response.incomplete" and last.response.output_text == "aaaaa"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(RuntimeError, match=r"Didn't receive a `response\.completed` event"):
            stream.get_final_response()
    events = list(client.responses.create(model="local", input="x", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"
    messages = [{"role": "user", "content": "x"}]
    with client.chat.completions.stream(model="local", messages=messages, max_tokens=5) as chat:
        assert "".join(event.delta for event in chat if event.type == "content.delta") == "aaaaa"
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            chat.get_final_completion()
    assert caught.value.completion.choices[0].message.content == "aaaaa"
