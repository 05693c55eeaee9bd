"""What an export may be asked for, and the bounds of every option."""

from __future__ import annotations

from dataclasses import dataclass

from flare.errors import InputError
from ignition.weights import OPTIONS as WEIGHT_OPTIONS

ISAS = ("x86-64-v4", "x86-64-v3", "generic")
TARGETS = ("cpu",)
SCORED_ROWS = 64
"""Tokens of prompts that one step scores, where it has as many: each takes a row of logits, beside one for each slot."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chooses; tokens, slots and levels as in `Limits`. None stands for the model's own value."""

    weights: str = "auto"
    max_context: int | None = None
    slots: int = 32
    page_tokens: int = 16
    max_step_tokens: int = 512
    isas: tuple[str, ...] = ISAS
    sampling_ranges: str | None = None
    prompt_logprobs: bool = False
    target: str = "cpu"

    @property
    def max_rows(self) -> int:
        """Rows of logits of one step: one for each slot, and those of scored prompts, which so make nobody wait."""
        return min(self.slots + SCORED_ROWS, self.max_step_tokens) if self.prompt_logprobs else self.slots

    def check(self) -> None:
        """Raises InputError naming the first option that is out of its bounds."""
        if self.target not in TARGETS:
            raise InputError(f"--target is {self.target!r}, this version exports for: {', '.join(TARGETS)}")
        if self.weights not in WEIGHT_OPTIONS:
            raise InputError(f"--weights is {self.weights!r}, must be one of {', '.join(WEIGHT_OPTIONS)}")
        if self.sampling_ranges not in (None, "author", "open"):
            raise InputError(f"--sampling-ranges is {self.sampling_ranges!r}, must be author or open")
        for name, value, low, high in (
            ("--slots", self.slots, 1, 1024),
            ("--page-tokens", self.page_tokens, 16, 1024),
            ("--max-step-tokens", self.max_step_tokens, 1, 65536),
            ("--max-context", self.max_context or 1, 1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise InputError(f"{name} is {value}, must be {low} to {high}")
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"--max-context is {self.max_context}, must be positive")
        if self.page_tokens % 16:
            raise InputError(f"--page-tokens is {self.page_tokens}, must be a multiple of 16")
        if not self.isas or set(self.isas) - set(ISAS) or len(set(self.isas)) != len(self.isas):
            raise InputError(f"--isa is {','.join(self.isas)!r}, must be levels of {', '.join(ISAS)}, each once")
        if self.max_step_tokens < self.slots:
            raise InputError(
                f"--max-step-tokens is {self.max_step_tokens}, must be at least --slots, which is {self.slots}"
            )
