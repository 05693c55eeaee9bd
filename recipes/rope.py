"""Rotary frequencies as Hugging Face configs ask for them: default, linear, llama3 and yarn.

Both spellings are read: `rope_parameters` (transformers 5) and `rope_scaling` beside `rope_theta` (before). The
frequencies are computed in float32 with transformers' order of operations, so that they agree with it to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recipes.fields import Fields

_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq: radians per position of each pair of a head, float32 values. scale: factor on cos and sin.

    extended: how many positions the scaling itself says that it reaches, 0 if it does not say.
    """

    inv_freq: tuple[float, ...]
    scale: float
    extended: int


def read_rope(config: Fields, head_dim: int, max_positions: int, default_theta: float) -> Rope:
    """Reads the rope fields of a config. Raises InputError for a scaling that is not honoured."""
    values = _parameters(config)
    where = "config.json: " + ("rope_parameters" if config.raw("rope_parameters") else "rope_scaling")
    fields = Fields(values, where)
    outer_theta = config.number("rope_theta", above=1.0, default=default_theta)
    theta = fields.number("rope_theta", above=1.0, default=outer_theta)
    spelled = fields.choice("type", _TYPES, default="default")
    kind = fields.choice("rope_type", _TYPES, default=spelled)
    if "type" in fields and kind != spelled:
        raise fields.refuse("type", f"the same as rope_type, which is {kind}")
    original = config.integer("original_max_position_embeddings", default=None)
    if original is None:
        original = fields.integer("original_max_position_embeddings", default=max_positions)
    else:
        fields.raw("original_max_position_embeddings")

    # base ** (2i / D), as float32: each pair's wavelength in radians.
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scale, extended = 1.0, 0
    if kind == "default":
        inv_freq = 1.0 / periods
        # A factor without a type would say that something is to be scaled, but not how.
        allowed: dict[str, tuple[Any, ...]] = {"factor": (1, 1.0)}
    else:
        allowed = {}
        if kind == "linear":
            inv_freq = 1.0 / periods / fields.number("factor")
        elif kind == "llama3":
            inv_freq = _llama3(fields, 1.0 / periods, original)
        else:
            inv_freq, scale, extended = _yarn(fields, periods, head_dim, theta, max_positions, original)
    fields.finish(
        irrelevant={"finetuned"},
        harmless={"partial_rotary_factor": (1, 1.0), **allowed},
        refused={
            "mrope_section": "no multi-dimensional rope",
            "full_attention": "one set of parameters for all layers",
            "sliding_attention": "one set of parameters for all layers",
        },
    )
    return Rope(tuple(inv_freq.tolist()), scale, extended)


def _parameters(config: Fields) -> Mapping[str, Any]:
    new, old = config.raw("rope_parameters"), config.raw("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise config.refuse(name, "an object or null")
    if new and old and {**new, **old} != dict(new):
        raise config.refuse("rope_scaling", "nothing beside a rope_parameters that says otherwise")
    return new or old or {}


def _llama3(fields: Fields, inv_freq: torch.Tensor, original: int) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between blended."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.refuse("high_freq_factor", f"more than low_freq_factor, which is {low}")
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > original / low, wavelength < original / high
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _yarn(
    fields: Fields, periods: torch.Tensor, head_dim: int, theta: float, max_positions: int, original: int
) -> tuple[torch.Tensor, float, int]:
    """YaRN (Peng et al., 2023): pairs that turn often keep their frequency, those that turn rarely are interpolated."""
    factor = fields.number("factor", default=max_positions / original)
    fast, slow = fields.number("beta_fast", default=32), fields.number("beta_slow", default=1)
    truncate = fields.flag("truncate", True)
    mscale = fields.number("mscale", default=None)
    mscale_all_dim = fields.number("mscale_all_dim", default=None)
    scale = fields.number("attention_factor", default=None)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scale is None:
        scale = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1)

    def pair_of(turns: float) -> float:
        """The (fractional) index of the pair that makes so many turns within the original context."""
        return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = pair_of(fast), pair_of(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return inv_freq, float(scale), int(factor * original)
