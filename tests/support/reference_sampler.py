"""The sampler's definition in plain Python doubles, one paragraph a stage: test truth for every faster sampler.

Order: penalties, temperature, top-k, top-p, min-p, draw. Candidates are ordered by descending probability, ties by id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp
from typing import Protocol

from tests.support.philox import uniform


class Draw(Protocol):
    """What a draw depends on besides logits and history; `flare`'s SampleParams structure has these fields."""

    temperature: float
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    top_k: int
    seed: int
    choice: int
    position: int
    prompt_len: int


def reference_sample(logits: Sequence[float], params: Draw, history: Sequence[int]) -> int:
    """The chosen token id. `history` is the prompt and the reply so far; `params.prompt_len` says where the reply
    begins. `history` may be empty when no penalty is active."""
    values = penalised(logits, params, history)
    if params.temperature <= 0:
        return max(range(len(values)), key=lambda token: (values[token], -token))
    candidates, weights = filtered(values, params)
    threshold = uniform(params.seed, params.choice, params.position) * sum(weights)
    running = 0.0
    for token, weight in zip(candidates, weights, strict=True):
        running += weight
        if running > threshold:
            return token
    return candidates[-1]


def penalised(logits: Sequence[float], params: Draw, history: Sequence[int]) -> list[float]:
    """Repetition over prompt and reply (positive logits divided, others multiplied), then presence and frequency
    over the reply."""
    values = list(logits)
    if params.repetition != 1.0:
        for token in set(history):
            value = values[token]
            values[token] = value / params.repetition if value > 0 else value * params.repetition
    if params.presence != 0.0 or params.frequency != 0.0:
        for token, count in Counter(history[params.prompt_len :]).items():
            values[token] -= params.presence + params.frequency * count
    return values


def filtered(values: Sequence[float], params: Draw) -> tuple[list[int], list[float]]:
    """Surviving ids and their unnormalised weights, in the order in which the draw walks them: id order when no filter
    is on, else descending."""
    top = max(values)
    weights = [exp((value - top) / params.temperature) for value in values]
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return list(range(len(values))), weights
    candidates = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.top_k > 0:
        candidates = candidates[: params.top_k]
    if params.top_p < 1.0:
        # The shortest head that holds top_p of what top-k left; never empty.
        wanted = params.top_p * sum(weights[token] for token in candidates)
        running, kept = 0.0, 0
        for token in candidates:
            running += weights[token]
            kept += 1
            if running >= wanted:
                break
        candidates = candidates[:kept]
    if params.min_p > 0.0:
        # The likeliest candidate has weight 1, so the limit relative to it is min_p itself.
        candidates = [token for token in candidates if weights[token] >= params.min_p]
    return candidates, [weights[token] for token in candidates]
