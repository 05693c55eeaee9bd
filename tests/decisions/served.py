"""A server whose model answers questions with probabilities of our choice, and what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, log
from typing import Any

from tests.support.live_server import IM_START, VOCABULARY, LiveServer

Weights = Callable[[str], Mapping[str, float]]
"""The text of a prompt -> the probabilities of labels behind it; what is left of 1 is spread over other tokens."""

FILLER = 0
"""A token that is no label: it has what the labels leave."""


def text_of(tokens: Sequence[int]) -> str:
    """A prompt's text; a control token becomes one character that no message holds."""
    return bytes(token if token < 256 else 0 for token in tokens).decode()


def logits_of(weights: Mapping[str, float]) -> list[float]:
    """The logits of a distribution over the byte tokens."""
    row = [-inf] * VOCABULARY
    for label, weight in weights.items():
        row[ord(label)] = log(weight) if weight else -inf
    rest = 1 - sum(weights.values())
    if rest > 1e-12:
        row[FILLER] = log(rest)
    return row


class Asked:
    """The hook of a scripted replay: it answers by `weights`, and keeps the prompts in order."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.prompts: list[str] = []

    def __call__(self, tokens: tuple[int, ...]) -> list[float]:
        prompt = text_of(tokens)
        if not self.prompts or self.prompts[-1] != prompt:
            self.prompts.append(prompt)
        return logits_of(self.weights(prompt))


def deciding(weights: Weights | Mapping[str, float], **options: Any) -> tuple[LiveServer, Asked]:
    """A server over it, not yet started. `options` are LiveServer's."""
    asked = Asked(weights if callable(weights) else lambda prompt: weights)
    sizes = {"logits": asked, "max_context": 4096, "max_step_tokens": 512, "kv_pages": 2048}
    model = {"explicit_ids": 128, "max_top_logprobs": 20, "context_length": 4096}
    live = LiveServer(
        replay=sizes | dict(options.pop("replay", {})), model=model | dict(options.pop("model", {})), **options
    )
    return live, asked


__all__ = ["IM_START", "Asked", "deciding", "logits_of", "text_of"]
