"""What model authors recommend to sample with, by the name of the recipe.

A recipe takes its row as `Recipe.sampling`. Values are those of the models' cards; ranges span the least and the greatest
value of a card's presets, and DeepSeek V4.1's repetition penalty is bounded by measured use. A field without a range
is fixed at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flare.core.sampling import NEUTRAL

OFF = -1
"""top_k without a filter, as these recipes store it."""


@dataclass(frozen=True, slots=True)
class AuthorSampling:
    """What a model's author recommends: defaults of sampling fields, and inclusive ranges of those that may vary."""

    defaults: Mapping[str, float | int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def author(
    ranges: Mapping[str, tuple[float, float]] | None = None, *, top_p: float, top_k: int = OFF
) -> AuthorSampling:
    """Returns settings that decide every field: temperature 1, and off whatever filter or penalty is not named."""
    return AuthorSampling({**NEUTRAL, "top_p": top_p, "top_k": top_k}, ranges or {})


_QWEN = {"temperature": (0.7, 1.0), "top_p": (0.8, 0.95), "presence_penalty": (0.0, 2.0)}

AUTHORS = {
    "qwen38": author(_QWEN, top_p=0.95, top_k=20),
    "qwen38_dense": author(_QWEN, top_p=0.95, top_k=20),
    "glm53": author({"temperature": (0.95, 1.0), "top_p": (0.95, 1.0)}, top_p=0.95),
    "deepseek4": author(top_p=0.95),
    "deepseek41": author({"repetition_penalty": (1.0, 1.1)}, top_p=1.0),
    "mimo_v2": author(top_p=0.95),
    "kimi3": author({"top_p": (0.95, 1.0)}, top_p=1.0),
    "step5": author(top_p=0.95),
    "nemotron_h": author(top_p=0.95),
    "kimi31": author(top_p=0.95),
    "minimax_m3": author(top_p=0.95),
    "muse_spark": author(top_p=1.0),
    "gemma4": author(top_p=0.95, top_k=64),
}
