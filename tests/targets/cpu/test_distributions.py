"""What the native sampler draws, against exact distributions: 200,000 draws with every parameter, and every two of them.

The distributions are computed here, in f64 from the definition at the head of `kernels/sampler.h`, by no sampler. Seeds are
fixed, so a test passes always or never; its limit is one that a right sampler passes all but once in 10^5 settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from flare.replay.cpu import CpuReplay
from tests.support.logit_rows import column, open_rows, put_logits, put_params

VOCABULARY, ROWS, CALLS = 64, 20_000, 10

LOGITS = 2.0 * np.sin(7.0 * np.arange(VOCABULARY)) + 0.3 * np.cos(1.3 * np.arange(VOCABULARY))  # -2.3 to 2.2
HISTORY = [3, 13, 9, 20, 41, 7, 7, 7, 9, 30, 52, 16, 16, 63]
PROMPT_LEN = 5
ALLOWED = [token for token in range(VOCABULARY) if token % 3 or token in (9, 30, 63)]

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 21},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.35},
    "repetition": {"repetition": 1.7},
    "presence": {"presence": 0.9},
    "frequency": {"frequency": -0.45},
    "mask": {"allowed": ALLOWED},
}


@pytest.fixture(scope="module")
def replay() -> Iterator[CpuReplay]:
    with open_rows(VOCABULARY, ROWS, threads=2) as opened:
        held = put_logits(opened, 0, LOGITS)
        for row in range(1, ROWS):
            opened.logits(row)[:] = opened.logits(0)
        assert held == pytest.approx(LOGITS.tolist())
        yield opened


def exact(settings: dict[str, Any]) -> np.ndarray:
    """The probability of each token."""
    logits = LOGITS.astype(np.float32).astype(np.float64)
    generated = HISTORY[PROMPT_LEN:]
    for token in range(VOCABULARY):
        if token in HISTORY:
            factor = settings.get("repetition", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = generated.count(token)
        logits[token] -= settings.get("frequency", 0.0) * count + settings.get("presence", 0.0) * (count > 0)
        if token not in settings.get("allowed", range(VOCABULARY)):
            logits[token] = -math.inf
    weights = np.exp((logits - logits.max()) / settings.get("temperature", 1.0))
    order = sorted(range(VOCABULARY), key=lambda token: (-logits[token], token))
    kept = order[: settings.get("top_k", VOCABULARY)]
    mass = np.cumsum(weights[kept])
    reached = mass >= settings.get("top_p", 1.0) * mass[-1] - 1e-12
    kept = kept[: int(np.argmax(reached)) + 1]
    kept = [token for token in kept if weights[token] >= settings.get("min_p", 0.0) and weights[token] > 0]
    probabilities = np.zeros(VOCABULARY)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def draw(replay: CpuReplay, settings: dict[str, Any], vary: str = "position") -> np.ndarray:
    """How often each token came in 200,000 draws that differ in `vary` only."""
    fields = {"seed": 5, "choice": 1, "position": 3, "prompt_len": PROMPT_LEN} | settings
    params = put_params(replay, 0, HISTORY, **fields)
    rows = np.frombuffer(replay.sampling, np.uint8).reshape(ROWS, -1)
    rows[1:] = np.frombuffer(params, np.uint8)  # with the same pointers: row 0 keeps their arrays alive
    varying = column(replay.sampling, vary)
    counts = np.zeros(VOCABULARY, np.int64)
    for call in range(CALLS):
        varying[:] = np.arange(call * ROWS, (call + 1) * ROWS)
        replay.sample(ROWS)
        counts += np.bincount(np.frombuffer(replay.sampled, np.int32), minlength=VOCABULARY)
    return counts


def assert_follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square over the tokens; those expected fewer than 8 times count as one cell."""
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any(), "a token came that cannot"
    rare = (expected > 0) & (expected < 8)
    seen = np.append(counts[expected >= 8], counts[rare].sum())
    wanted = np.append(expected[expected >= 8], expected[rare].sum())
    if wanted[-1] < 8:
        assert seen[-1] < 40
        seen, wanted = seen[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    limit = (
        freedom * (1 - spread + 4.26 * math.sqrt(spread)) ** 3
    )  # Wilson and Hilferty's; 4.26 is the quantile of 1e-5
    assert statistic < limit, (statistic, freedom)


def combined(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in SETTINGS[name].items()}


ALL = [(), *((name,) for name in SETTINGS), *combinations(SETTINGS, 2), tuple(SETTINGS)]


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_200000_draws_follow_the_distribution(replay: CpuReplay, names: tuple[str, ...]) -> None:
    settings = combined(names)
    assert_follows(draw(replay, settings), exact(settings))


def test_both_of_every_pair_matter() -> None:
    """The pairs above test something: neither parameter alone gives what both give. Of min_p and another filter one alone
    decides, since min_p keeps the best tokens too, however many there are; it is min_p here."""
    for pair in combinations(SETTINGS, 2):
        both = exact(combined(pair))
        nested = pair in (("top_k", "min_p"), ("top_p", "min_p"))
        for name in pair[:1] if nested else pair:
            assert np.abs(both - exact(SETTINGS[name])).max() > 0.005, (pair, name)


@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_draws_that_differ_in_one_number_follow_it_too(replay: CpuReplay, vary: str) -> None:
    for settings in ({}, SETTINGS["top_p"]):
        assert_follows(draw(replay, settings, vary), exact(settings))


def test_a_slightly_wrong_distribution_shows(replay: CpuReplay) -> None:
    """The test above is worth something: a temperature that is off by 4 % does not pass."""
    counts = draw(replay, {"temperature": 0.6})
    with pytest.raises(AssertionError):
        assert_follows(counts, exact({"temperature": 0.624}))
