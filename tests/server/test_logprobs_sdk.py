"""Log probabilities through the OpenAI SDK, strictly validated, against a server process: whole and streamed alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.server.process import Process, scripted
from tests.support.live_server import VOCABULARY

PARIS = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
REPLIES: dict[str, str | None] = {"think": f"<think>Hm 😊.</think>Fine.\n{PARIS}", "say": "It is 1 °C."}
RATED = {"max_top_logprobs": 20, "explicit_ids": 128, "scores_prompts": True}
TOOL: Any = {"type": "function", "function": {"name": "weather"}}
HI: Any = [{"role": "user", "content": "think"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with scripted(tmp_path_factory.mktemp("rated"), REPLIES, plain="Well.", context=2048, model=RATED) as up:
        yield up


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True) as made:
        yield made


def said(entries: Any) -> str:
    return bytes(byte for entry in entries for byte in entry.bytes).decode()


def test_chat(client: OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        assert choice.logprobs and choice.logprobs.content
        found = choice.logprobs.content
        assert said(found) == REPLIES["think"]
        assert {len(entry.top_logprobs) for entry in found} == {2} and {entry.logprob for entry in found} == {
            found[0].top_logprobs[0].logprob
        }
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        streamed = [entry for one in own if one.logprobs for entry in one.logprobs.content or []]
        assert streamed == found


def test_the_sdks_own_collector_of_a_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=HI, logprobs=True, top_logprobs=1) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].logprobs and said(answer.choices[0].logprobs.content) == REPLIES["think"]


def test_completions(client: OpenAI) -> None:
    asked: Any = {"model": "m", "prompt": "ab", "logprobs": 1, "max_tokens": 3}
    found = client.completions.create(**asked).choices[0].logprobs
    assert found and found.tokens == ["W", "e", "l"] and found.text_offset == [0, 1, 2]
    assert found.top_logprobs and [len(top) for top in found.top_logprobs] == [2, 2, 2]
    # A strict SDK refuses every chunk of a completion but the last: its types want a finish_reason.
    with OpenAI(base_url=client.base_url, api_key="x", max_retries=0) as lenient:
        chunks = [c.choices[0].logprobs for c in lenient.completions.create(**asked, stream=True)]
    assert [token for one in chunks if one for token in one.tokens or []] == found.tokens


def test_responses(client: OpenAI) -> None:
    asked: Any = {"model": "m", "input": "think", "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = client.responses.create(**asked)
    (part,) = [part for item in whole.output if item.type == "message" for part in item.content]
    assert part.type == "output_text" and part.text.startswith("Fine.")
    assert said(part.logprobs) == part.text and whole.top_logprobs == 3
    assert part.logprobs and {len(entry.top_logprobs) for entry in part.logprobs} == {3}
    events = list(client.responses.create(**asked, stream=True))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [(entry.token, entry.logprob) for entry in deltas] == [(e.token, e.logprob) for e in part.logprobs]
    with client.responses.stream(**asked) as stream:
        (final,) = [
            part for item in stream.get_final_response().output if item.type == "message" for part in item.content
        ]
    assert final.type == "output_text" and final.logprobs == part.logprobs


def test_scores_of_prompts(client: OpenAI) -> None:
    extra: Any = {"prompt_logprobs": 1, "return_token_ids": True}
    chat: Any = client.chat.completions.create(model="m", messages=HI, extra_body=extra)
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids) and chat.prompt_logprobs[0] is None
    assert set(chat.prompt_logprobs[1][str(chat.prompt_token_ids[1])]) == {"logprob", "rank", "decoded_token"}
    whole: Any = client.completions.create(model="m", prompt=[[1, 2], [3]], max_tokens=0, extra_body=extra)
    assert [len(choice.prompt_logprobs) for choice in whole.choices] == [2, 1]
    # The SDK's types have no place for the nulls of an echoed prompt's first token.
    raw = client.completions.with_raw_response.create(model="m", prompt="ab", echo=True, logprobs=1, max_tokens=0)
    assert '"token_logprobs":[null,' in raw.text


def test_refusals(client: OpenAI) -> None:
    for fields, param in (
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "extra_body": {"logprob_token_ids": [VOCABULARY]}}, "logprob_token_ids[0]"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=HI, **fields)  # type: ignore[call-overload]
        assert caught.value.param == param
