"""What an export may be asked for, and the bounds of every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from flare.core.architectures import ABILITIES, Architecture, in_order
from flare.errors import InputError
from ignition.weights import OPTIONS as WEIGHT_OPTIONS

ISAS = ("x86-64-v4", "x86-64-v3", "generic")
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
WITHOUT_FP8 = tuple(architecture for architecture in ARCHITECTURES if not ABILITIES[architecture].fp8)

SCORED_ROWS = 64
"""Tokens of prompts that one step scores, where it has as many: each takes a row of logits, beside one for each slot."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chooses; tokens, slots and levels as in `Limits`. None stands for the model's own value.

    targets: "cpu", and "cuda:" with architectures behind it, separated by commas.
    isas: of what runs on the processor; None stands for all.
    cpu_fallback: ops without a kernel of a target may run on the processor.
    """

    weights: str = "auto"
    max_context: int | None = None
    slots: int = 32
    page_tokens: int = 16
    max_step_tokens: int = 512
    isas: tuple[str, ...] | None = None
    sampling_ranges: str | None = None
    prompt_logprobs: bool = False
    targets: tuple[str, ...] = ("cpu",)
    cpu_fallback: bool = True

    @property
    def cpu(self) -> bool:
        """Whether the core is to run on the processor."""
        return "cpu" in self.targets

    @property
    def levels(self) -> tuple[str, ...]:
        """The instruction set levels to compile for what runs on the processor."""
        return ISAS if self.isas is None else self.isas

    @property
    def architectures(self) -> tuple[Architecture, ...]:
        """The architectures of devices that the core is to run on, in their fixed order."""
        named = {name for target in self.targets for name in _architectures(target)}
        return tuple(in_order(named))

    @property
    def max_rows(self) -> int:
        """Rows of logits of one step: one for each slot, and those of scored prompts, which so make nobody wait."""
        return min(self.slots + SCORED_ROWS, self.max_step_tokens) if self.prompt_logprobs else self.slots

    def check(self) -> None:
        """Raises InputError naming the first option that is out of its bounds."""
        self._check_targets()
        if self.weights not in WEIGHT_OPTIONS:
            raise InputError(f"--weights is {self.weights!r}, must be one of {', '.join(WEIGHT_OPTIONS)}")
        if self.weights == "fp8" and self.cpu:
            other = "leave out --target cpu" if self.architectures else "--target cuda:ARCH"
            raise InputError(f"--weights is 'fp8', which the target cpu has no kernels for; choose q8, or {other}")
        if self.weights == "fp8" and (old := [name for name in self.architectures if name in WITHOUT_FP8]):
            raise InputError(
                f"--weights is 'fp8', which {old[0]} has no instructions for; choose q8, or sm_89 and newer"
            )
        if self.sampling_ranges not in (None, "author", "open"):
            raise InputError(f"--sampling-ranges is {self.sampling_ranges!r}, must be author or open")
        for name, value, low, high in (
            ("--slots", self.slots, 1, 1024),
            ("--max-step-tokens", self.max_step_tokens, 1, 65536),
            ("--max-context", self.max_context or 1, 1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise InputError(f"{name} is {value}, must be {low} to {high}")
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"--max-context is {self.max_context}, must be positive")
        if self.page_tokens % 16 or not 16 <= self.page_tokens <= 1024:
            raise InputError(f"--page-tokens is {self.page_tokens}, must be a multiple of 16, 16 to 1024")
        if not self.levels or set(self.levels) - set(ISAS) or len(set(self.levels)) != len(self.levels):
            raise InputError(f"--isa is {','.join(self.levels)!r}, must be levels of {', '.join(ISAS)}, each once")
        if self.max_step_tokens < self.slots:
            raise InputError(
                f"--max-step-tokens is {self.max_step_tokens}, must be at least --slots, which is {self.slots}"
            )

    def _check_targets(self) -> None:
        if not self.targets:
            raise InputError("--target is empty, must be cpu or cuda:ARCH")
        seen: set[str] = set()
        for target in self.targets:
            names = _architectures(target)
            if target != "cpu" and not names:
                raise InputError(
                    f"--target is {target!r}, must be cpu or cuda:ARCH with ARCH of {', '.join(ARCHITECTURES)}"
                )
            for name in names or [target]:
                if name not in ("cpu", *ARCHITECTURES):
                    meant = f"; is {name}a meant?" if f"{name}a" in ARCHITECTURES else ""
                    raise InputError(
                        f"--target is {target!r}, its architectures must be of {', '.join(ARCHITECTURES)}{meant}"
                    )
                if name in seen:
                    raise InputError(f"--target names {name} twice; name each target once")
                seen.add(name)


def _architectures(target: str) -> list[str]:
    """The architectures that a target names, known or not; none for another target than cuda."""
    kind, colon, names = target.partition(":")
    return [name.strip() for name in names.split(",")] if kind == "cuda" and colon else []
