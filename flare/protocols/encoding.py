"""What the answers of Chat Completions and Completions have in common: usage, context, timings, stream chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flare.conversation import Event, Failed, Finished, Text
from flare.errors import RequestError
from flare.protocols.endpoint import Response, encode_json
from flare.served import ServedModel

FINISH_REASONS: Mapping[str, str] = {
    "stop_token": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "stop",
}

DONE = b"data: [DONE]\n\n"


def frame(value: Any) -> bytes:
    """Returns one SSE data frame."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_object(error: RequestError) -> dict[str, Any]:
    """Returns the error envelope."""
    body = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": body | error.extra}


def usage_object(prompt: int, cached: int, completion: int, *, reasoning: int | None) -> dict[str, Any]:
    """Returns `usage`. Cached tokens are part of the prompt's; `reasoning` is None for raw text, which has none."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def total_usage(ends: Sequence[Finished], n: int, *, reasoning: int | None) -> dict[str, Any]:
    """Returns the usage of a whole answer: each prompt counts once, through its first choice."""
    firsts = ends[::n]
    prompt = sum(end.prompt_tokens for end in firsts)
    cached = sum(end.cached_tokens for end in firsts)
    return usage_object(prompt, cached, sum(end.completion_tokens for end in ends), reasoning=reasoning)


def context_object(ends: Sequence[Finished], model: ServedModel) -> dict[str, int]:
    """Returns `flare_context` of the choice that used the most of the context."""
    return model.context(max(end.prompt_tokens + end.completion_tokens for end in ends))


def timings_object(ends: Sequence[Finished]) -> dict[str, Any]:
    """Returns `timings`, in milliseconds and tokens per second; of several choices the slowest one's times.

    `prompt_n` counts prompt tokens that were computed, not those taken from a cache. A rate is null where there is
    nothing to divide: the first token of a choice belongs to the prompt's time.
    """
    prompt_n = sum(end.prompt_tokens - end.cached_tokens for end in ends)
    predicted_n = sum(end.completion_tokens for end in ends)
    prompt = max(end.timings.prompt for end in ends)
    predicted = max(end.timings.predicted for end in ends)
    return {
        "queued_ms": _ms(max(end.timings.queued for end in ends)),
        "prompt_n": prompt_n,
        "prompt_ms": _ms(prompt),
        "prompt_per_second": round(prompt_n / prompt, 2) if prompt > 0 else None,
        "first_token_ms": _ms(max(end.timings.first_token for end in ends)),
        "predicted_n": predicted_n,
        "predicted_ms": _ms(predicted),
        "predicted_per_second": round((predicted_n - len(ends)) / predicted, 2)
        if predicted > 0 and predicted_n > len(ends)
        else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class ChunkEncoder:
    """Events to the chunks of a Chat Completions or Completions stream.

    What does not change between the chunks of a choice is encoded once; a token costs one escaped string and two joins.
    `role_delta` and `no_delta` are the members of a choice without text (None: there is no such chunk), `text_member`
    is the JSON around the text.
    """

    def __init__(
        self,
        response: Response,
        object_name: str,
        *,
        text_member: tuple[bytes, bytes],
        no_delta: Mapping[str, Any],
        role_delta: Mapping[str, Any] | None,
        reasoning: int | None,
    ) -> None:
        decoded = response.decoded
        self.response = response
        self.reasoning = reasoning
        self.include_usage = decoded.include_usage
        self.continuous = decoded.include_usage and decoded.continuous_usage
        self.no_delta = no_delta
        self.role_delta = role_delta
        self.n = decoded.generation.n
        choices = self.n * len(decoded.generation.prompts)
        self.ends: list[Finished | None] = [None] * choices
        self.begun = [False] * choices
        self.open = choices
        self.ended = False
        self.counted = 0
        self.cached = [0] * len(decoded.generation.prompts)
        self.envelope: dict[str, Any] = {
            "id": response.id,
            "object": object_name,
            "created": response.created,
            "model": response.model.id,
            "system_fingerprint": response.model.fingerprint,
        }
        before = b"data: " + encode_json(self.envelope)[:-1] + b',"choices":[{"index":'
        self.heads = [b"%b%d,%b" % (before, index, text_member[0]) for index in range(choices)]
        self.tail = text_member[1] + b',"logprobs":null,"finish_reason":null}]'
        self.tail += b"" if self.continuous else b',"usage":null}\n\n' if self.include_usage else b"}\n\n"

    def encode(self, event: Event) -> bytes:
        """Returns the frames of one event; empty when it shows nothing."""
        if type(event) is Text:
            index = event.choice
            self.counted += event.tokens
            self._cached(index, event.cached_tokens)
            if self.begun[index]:
                return self._text(index, event.text) if event.text else b""
            return self._begin(index) + (self._text(index, event.text) if event.text else b"")
        if type(event) is Finished:
            return self._finish(event)
        assert type(event) is Failed
        self.ended = True
        return frame(error_object(event.error))

    def _begin(self, index: int) -> bytes:
        self.begun[index] = True
        return (
            b"" if self.role_delta is None else self._chunk({"index": index, **self.role_delta, "finish_reason": None})
        )

    def _text(self, index: int, text: str) -> bytes:
        if self.continuous:
            usage = b',"usage":' + encode_json(self._usage_so_far()) + b"}\n\n"
            return self.heads[index] + encode_json(text) + self.tail + usage
        return self.heads[index] + encode_json(text) + self.tail

    def _finish(self, event: Finished) -> bytes:
        index = event.choice
        self.ends[index] = event
        self.counted += event.tokens
        self._cached(index, event.cached_tokens)
        self.open -= 1
        frames = b"" if self.begun[index] else self._begin(index)
        if event.text:
            frames += self._text(index, event.text)
        model = self.response.model
        choice = {
            "index": index,
            **self.no_delta,
            "logprobs": None,
            "finish_reason": FINISH_REASONS[event.cause],
            "stop_reason": event.cause,
        }
        more = {"flare_context": context_object([event], model), "timings": timings_object([event])}
        frames += self._chunk(choice, more)
        if self.open:
            return frames
        self.ended = True
        if self.include_usage:
            ends = [end for end in self.ends if end is not None]
            frames += frame(
                {**self.envelope, "choices": [], "usage": total_usage(ends, self.n, reasoning=self.reasoning)}
            )
        return frames + DONE

    def _chunk(self, choice: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        chunk = {**self.envelope, "choices": [choice], **(more or {})}
        if self.include_usage:
            chunk["usage"] = self._usage_so_far() if self.continuous else None
        return frame(chunk)

    def _usage_so_far(self) -> dict[str, Any]:
        return usage_object(self.response.prompt_tokens, sum(self.cached), self.counted, reasoning=self.reasoning)

    def _cached(self, index: int, tokens: int) -> None:
        """Keeps what the first choice of a prompt took from a cache."""
        if index % self.n == 0:
            self.cached[index // self.n] = tokens
