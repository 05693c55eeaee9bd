"""A server whose tokens have known probabilities, and the two ways of asking it for them: whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from ctypes import c_float
from typing import Any

from tests.support.live_server import VOCABULARY, LiveServer, events, reply

CHAT, RAW, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ROUTES = (CHAT, RAW, RESPONSES)
FULL = {"max_top_logprobs": 20, "explicit_ids": 128, "scores_prompts": True}
HI = [{"role": "user", "content": "hi"}]
INCLUDE = ["message.output_text.logprobs"]
TEXT = "Hé 😊!"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "logprobs": True},
    RAW: {"prompt": "ab", "logprobs": 0},
    RESPONSES: {"input": "hi", "include": INCLUDE},
}
MINIMAL = {CHAT: {"messages": HI}, RAW: {"prompt": "ab"}, RESPONSES: {"input": "hi"}}


def logits(ids: tuple[int, ...]) -> list[float]:
    """A distribution with ties and a token that cannot come, which depends on the last token."""
    row = [float((token * 7 + ids[-1]) % 11) for token in range(VOCABULARY)]
    row[200] = -math.inf
    return row


def wanted(ids: Sequence[int]) -> list[float]:
    """The log probabilities of what follows a sequence, by definition."""
    row = logits(tuple(ids))
    total = math.log(math.fsum(math.exp(value) for value in row))
    return [c_float(value - total).value for value in row]


def likeliest(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]


def live(text: str | bytes | list[int] = TEXT, **options: Any) -> LiveServer:
    tokens = text if isinstance(text, list) else reply(text)
    model = FULL | options.pop("model", {})
    replay = {"logits": logits, "max_rows": 8} | options.pop("replay", {})
    return LiveServer(script=lambda prompt, choice: tokens, model=model, replay=replay, **options)


def ask(server: LiveServer, path: str, **fields: Any) -> Any:
    status, answer = server.post(path, ASK[path] | fields)
    assert status == 200, answer
    return answer


def stream(server: LiveServer, path: str, **fields: Any) -> list[Any]:
    status, _, data = server.request("POST", path, ASK[path] | fields | {"stream": True})
    assert status == 200, data
    if path != RESPONSES:
        found = events(data)
        assert found.pop() == "[DONE]"
        return found
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]


def entries(server: LiveServer, path: str, **fields: Any) -> list[list[Any]]:
    """Asks whole and streamed, checks that the entries of each choice are the same, and returns them."""
    whole, chunks = ask(server, path, **fields), stream(server, path, **fields)
    if path == RESPONSES:
        parts = [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
        found = [entry for part in parts for entry in part["logprobs"]]
        deltas = [chunk for chunk in chunks if chunk["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == found
        done = [chunk for chunk in chunks if chunk["type"] == "response.output_text.done"]
        assert [entry for chunk in done for entry in chunk["logprobs"]] == found
        final = [part for item in chunks[-1]["response"]["output"] for part in item.get("content", [])]
        assert [entry for part in final for entry in part.get("logprobs", [])] == found
        return [found]
    result = []
    for choice in whole["choices"]:
        shown = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        rated = [one["logprobs"] for one in shown if one["logprobs"] is not None]
        if path == CHAT:
            assert [entry for one in rated for entry in one["content"]] == choice["logprobs"]["content"]
            result.append(choice["logprobs"]["content"])
        else:
            joined = {name: [item for one in rated for item in one[name]] for name in choice["logprobs"]}
            assert joined == choice["logprobs"]
            assert "".join(one["text"] for one in shown) == choice["text"]
            result.append([joined])
    return result


def refused(server: LiveServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    version = {"anthropic-version": "2023-06-01"} if path == MESSAGES else {}
    minimal = {"messages": HI, "max_tokens": 5} if path == MESSAGES else MINIMAL[path]
    status, answer = server.post(path, minimal | fields, **version)
    assert status == 400, (fields, answer)
    return answer["error"]
