"""Log probabilities of a row against f64, and draws against their definition in Python's doubles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flare.replay.cpu_interface import RowLogprobs, SampleParams
from tests.support.reference_sampler import reference_sample

UNIT = 1e-6
"""What a value v may be off by, times 1 + |v|: its own rounding to f32, and that of the terms of the sum."""


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Natural log probabilities [V] f64 of a row of finite or -inf logits."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    with np.errstate(divide="ignore"):
        return wide - math.log(float(np.exp(wide).sum()))


def logprob_excess(
    logits: np.ndarray, token: int, row: RowLogprobs, alternatives: int, explicit: Sequence[int]
) -> float:
    """The largest error of a row's log probabilities by what it may be; inf where a count, rank or order is wrong."""
    truth = log_probabilities(logits)
    count = min(alternatives, len(truth))
    if row.count != count:
        return math.inf
    pairs = [(row.chosen, truth[token]), *zip(row.values[:count], truth[row.ids[:count]], strict=True)]
    pairs += zip(row.explicit[: len(explicit)], truth[list(explicit)], strict=True)
    pairs += zip(row.values[:count], np.sort(truth)[::-1][:count], strict=True)  # so that none is left out
    worst = max(0.0 if found == exact else abs(found - exact) / (UNIT * (1 + abs(exact))) for found, exact in pairs)
    order = [(-value, id) for value, id in zip(row.values[:count], row.ids[:count], strict=True)]
    slack = 2 * UNIT * (1 + abs(truth[token]))
    least, most = (1 + int((truth > truth[token] + off).sum()) for off in (slack, -slack))
    return worst if order == sorted(set(order)) and least <= row.rank <= most else math.inf


def wanted_token(
    logits: np.ndarray, params: SampleParams, history: Sequence[int], allowed: Sequence[int] | None
) -> int:
    """The token that the definition draws of a row of logits."""
    if allowed is not None:
        logits = np.where(np.isin(np.arange(len(logits)), allowed), logits, np.float32(-np.inf))
    return reference_sample(logits.tolist(), params, history)
