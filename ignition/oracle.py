"""The prompts of the oracle, and the reference's answers to them from its logits; `flare/core/oracle.py` says what becomes
of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flare.core.oracle import TOP, Deviation, Positions

GREEDY_TOKENS = 16
PROMPT_TOKENS = 48
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities [positions, vocabulary] in float64 of logits in any float type; NaN where logits are not finite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide -= wide.max(axis=-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def summarise(logits: np.ndarray, tokens: Sequence[int]) -> Positions:
    """The reference's results from its logits [positions, vocabulary] after each of `tokens`, as a core reports them: log
    probabilities as f32, equal ones by id, ranks by how many are greater. They are stored to six digits after the point."""
    reported = log_softmax(logits).astype(np.float32)
    order = np.argsort(-reported, axis=-1, kind="stable")[:, : min(TOP, reported.shape[1])]
    values = np.take_along_axis(reported, order, axis=-1)
    following = np.asarray(tokens[1:], dtype=np.int64)
    scores = reported[np.arange(len(following)), following]
    ranks = 1 + (reported[: len(following)] > scores[:, None]).sum(axis=-1)
    return Positions(
        ids=order.tolist(),
        logprobs=[[round(v, 6) for v in row] for row in values.tolist()],
        scores=[round(v, 6) for v in scores.tolist()],
        ranks=ranks.tolist(),
    )


def deviation(reference: np.ndarray, found: np.ndarray) -> Deviation:
    """Compares logits [positions, vocabulary] of two sources over the same tokens."""
    wanted, got = log_softmax(reference), log_softmax(found)
    divergence = (np.exp(wanted) * (wanted - got)).sum(axis=-1)
    best = wanted.argmax(axis=-1)
    top = np.argsort(-wanted, axis=-1, kind="stable")[:, :TOP]
    errors = np.abs(np.take_along_axis(wanted, top, -1) - np.take_along_axis(got, top, -1))
    chosen = got.argmax(axis=-1)
    rows = np.arange(len(best))
    margins = wanted[rows, best] - wanted[rows, chosen]
    return Deviation(
        mean_kl=float(divergence.mean()),
        max_logprob_error=float(errors.max()),
        top1_agreement=float((best == chosen).mean()),
        worst_margin=float(margins.max()),
    )
