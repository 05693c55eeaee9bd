"""The sampling fields: what each is where nobody sets it, and what values are valid.

The exporter, the check of a core that is loaded, the requests and the draws go by these tables.
"""

from __future__ import annotations

NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Plain sampling from the model's own distribution: the default of what neither the recipe nor its files set."""

WHOLE: dict[str, tuple[int, int]] = {
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "max_new_tokens": (1, 2**63 - 1),
    "max_length": (1, 2**63 - 1),
}
"""Fields with a default that are integers, and their bounds, inclusive."""

VALID: dict[str, tuple[float, float]] = {
    "temperature": (-1e4, 1e4),
    "top_k": WHOLE["top_k"],
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-4, 1e4),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""What can be sampled with, inclusive: a core with open ranges accepts it all. Temperature <= 0 is greedy, top_k 0 and -1
are off."""
