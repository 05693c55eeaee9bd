"""What the answers of Chat Completions and Completions have in common: usage, context, timings, calls, observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flare.conversation import Finished, ToolCall
from flare.errors import RequestError
from flare.fallbacks import Fallback
from flare.protocols.endpoint import Outcome, Response
from flare.protocols.logprob_encoding import prompt_list
from flare.served import ServedModel

FINISH_REASONS: Mapping[str, str] = {
    "stop_token": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "stop",
}


class Observations(msgspec.Struct, frozen=True):
    """What an answer shows of its tokens: their ids, with those of the prompt, and when they came; and of the prompt's how
    likely they were, with so many alternatives."""

    ids: bool = False
    times: bool = False
    prompt_logprobs: int | None = None

    def __bool__(self) -> bool:
        """Whether tokens are observed as they come."""
        return self.ids or self.times

    def members(self, ids: Sequence[int], times: Sequence[float], arrived_at: float) -> dict[str, Any]:
        """Returns the members of a choice. `times`, one a token, are in seconds on the clock of `arrived_at`."""
        members: dict[str, Any] = {}
        if self.ids:
            members["token_ids"] = ids
        if self.times:
            members["token_timestamps"] = [_ms(at - arrived_at) for at in times]
        return members


def finish_reason(end: Finished) -> str:
    """Returns why a choice ended: a limit goes before completed calls, which go before everything else."""
    return "tool_calls" if end.called else FINISH_REASONS[end.cause]


def call_object(call: ToolCall) -> dict[str, Any]:
    """Returns a call of a function as a message shows it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


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


def total_usage(ends: Sequence[Finished], n: int, *, chat: bool) -> dict[str, Any]:
    """Returns the usage of a whole answer: each prompt counts once, through its first choice.

    `chat`: reasoning is counted too.
    """
    firsts = ends[::n]
    prompt = sum(end.prompt_tokens for end in firsts)
    cached = sum(end.cached_tokens for end in firsts)
    reasoning = sum(end.reasoning_tokens for end in ends) if chat else None
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


def ending_members(ends: Sequence[Finished], model: ServedModel) -> dict[str, Any]:
    """Returns what is ours at the end of an answer, or of its choice: context and timings, and warnings where there are any."""
    fallbacks = (fallback for end in ends for fallback in end.fallbacks)
    return {
        "flare_context": context_object(ends, model),
        "timings": timings_object(ends),
        **warnings_member(fallbacks),
    }


def warnings_member(fallbacks: Iterable[Fallback]) -> dict[str, Any]:
    """Returns `flare_warnings`, one for each cause with its latest count, or nothing where there is no cause."""
    counts: dict[str, int] = {}
    for cause, count in fallbacks:
        counts[cause] = max(count, counts.get(cause, 0))
    found = [{"type": "cpu_fallback", "cause": cause, "count": count} for cause, count in counts.items()]
    return {"flare_warnings": found} if found else {}


def prompt_member(response: Response, outcome: Outcome) -> dict[str, Any]:
    """Returns `prompt_logprobs` of a choice's prompt, where it is asked for."""
    count = response.decoded.details.prompt_logprobs
    return {} if count is None else {"prompt_logprobs": prompt_list(response.spelling, outcome.scores, count)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
