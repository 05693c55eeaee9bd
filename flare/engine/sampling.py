"""How a request draws its tokens, and how that is written for the replay's sampler."""

from __future__ import annotations

from array import array
from ctypes import c_int32, sizeof
from ctypes import memmove as copy_bytes
from dataclasses import dataclass, replace
from typing import Any

from flare.core.sampling import VALID
from flare.errors import RequestError

SEEDS = 2**63
"""How many seeds requests may send."""

_RANGES = VALID | {"seed": (0, 2**64 - 1)}
"""Inclusive: within them the sampler's f32 arithmetic stays finite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Order: penalties, temperature, top-k, top-p, min-p, draw.

    temperature 0 or less is greedy, ties to the lowest id. Off: top_k 0 or -1, top_p 1, min_p 0, repetition_penalty 1,
    presence_penalty and frequency_penalty 0. Raises RequestError with `param` for a value outside its range, so that
    no request can make a step that others share fail.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails too
                raise RequestError(f"{name} is {value}, it must be from {low} to {high}", param=name)

    def advanced(self, index: int) -> SamplingParams:
        """Returns what choice `index` of a request draws with: the first choice of one whose seed is so much greater does too.
        Seeds go on at 0 behind the greatest that a request may send."""
        return replace(self, seed=(self.seed + index) % SEEDS) if index else self

    @property
    def penalised(self) -> bool:
        """Whether a draw needs the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def write(self, row: Any, choice: int, prompt_len: int) -> None:
        """Fills what stays the same for all of a request's draws in a SampleParams structure. With every draw change
        `position`, the index of the drawn token in prompt and reply together, and `history_len`, the same number:
        how many tokens there are before it. `history` points at them only if they are read."""
        row.temperature = self.temperature
        row.top_k = self.top_k
        row.top_p = self.top_p
        row.min_p = self.min_p
        row.repetition = self.repetition_penalty
        row.presence = self.presence_penalty
        row.frequency = self.frequency_penalty
        row.seed = self.seed
        row.choice = choice
        row.prompt_len = prompt_len


class History:
    """A request's tokens as an int32 array that native code can read; grows by doubling."""

    __slots__ = ("array", "length")

    def __init__(self, tokens: array[int]) -> None:
        """`tokens` are copied, in no time to speak of."""
        self.array = (c_int32 * max(64, 2 * len(tokens)))()
        self.length = len(tokens)
        copy_bytes(self.array, tokens.buffer_info()[0], tokens.itemsize * self.length)

    def append(self, token: int) -> None:
        """`array` may be another object afterwards."""
        if self.length == len(self.array):
            larger = (c_int32 * (2 * self.length))()
            copy_bytes(larger, self.array, sizeof(self.array))
            self.array = larger
        self.array[self.length] = token
        self.length += 1
