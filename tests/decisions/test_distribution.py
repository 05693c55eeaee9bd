"""The arithmetic of decisions: values from the protocol's published examples, and what holds for every distribution."""

from __future__ import annotations

import random
from math import exp, fsum, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.decisions.distribution import choice_confidence, read_distribution, score_confidence
from flare.errors import RequestError

LOGPROBS = st.lists(st.floats(-80, 0) | st.just(-inf), min_size=1, max_size=128).filter(lambda v: max(v) > -inf)


@pytest.mark.parametrize(
    ("probabilities", "choice", "score"),
    [
        ([0.8, 0.1, 0.1], 0.70, 0.55),
        ([0.1, 0.1, 0.8], 0.70, 0.55),
        ([1.0], 1.0, 1.0),
        ([0.25], 1.0, 1.0),  # a lone option is certain, whatever rounding left of its probability
        ([0.9, 0.1], 0.8, 0.8),
        ([0.3, 0.7], 0.4, 0.4),
        ([0.5, 0.5], 0.0, 0.0),
        ([0.25] * 4, 0.0, 0.0),  # the distance is from the first of equal ones: clipped at 0
        ([0.5, 0.0, 0.5], 0.25, 0.0),
        ([0.0, 1.0, 0.0], 1.0, 1.0),
        ([0.4, 0.4, 0.2], 0.1, 1 - (0.4 + 0.4) / (2 / 3)),
    ],
)
def test_confidence(probabilities: list[float], choice: float, score: float) -> None:
    assert choice_confidence(probabilities) == pytest.approx(choice, abs=1e-12)
    assert score_confidence(probabilities) == pytest.approx(max(0.0, score), abs=1e-12)


def test_two_options_have_one_confidence() -> None:
    """Both formulas are |2p - 1| for two options."""
    for p in [0.0, 0.1, 0.33, 0.5, 0.77, 1.0]:
        assert choice_confidence([p, 1 - p]) == pytest.approx(abs(2 * p - 1), abs=1e-12)
        assert score_confidence([p, 1 - p]) == pytest.approx(abs(2 * p - 1), abs=1e-12)


def test_a_distribution() -> None:
    found = read_distribution([log(0.2), log(0.5), log(0.1)])
    assert found.probabilities == pytest.approx([0.25, 0.625, 0.125], abs=1e-15)
    assert found.mass == pytest.approx(0.8, abs=1e-15)
    assert found.best == 1 and found.expectation == pytest.approx(0.875, abs=1e-15)


def test_labels_that_hardly_come_are_compared_all_the_same() -> None:
    """Probabilities far below the least f64 have a ratio, and no mass."""
    found = read_distribution([-5000.0, -5000.0 + log(3)])
    assert found.probabilities == pytest.approx([0.25, 0.75], abs=1e-12) and found.mass == 0.0


def test_a_label_that_cannot_come_has_nothing() -> None:
    assert read_distribution([-inf, -1.0, -inf]) == ((0.0, 1.0, 0.0), exp(-1.0))


def test_labels_that_cannot_come_at_all_are_a_failure() -> None:
    with pytest.raises(RequestError, match="no option of a question any probability") as caught:
        read_distribution([-inf, -inf])
    assert (caught.value.status, caught.value.type, caught.value.code) == (500, "server_error", "invalid_output")


def test_of_equal_options_the_first_is_best() -> None:
    assert read_distribution([-3.0, -1.0, -1.0, -1.0]).best == 1


@given(LOGPROBS)
def test_every_distribution(logprobs: list[float]) -> None:
    found = read_distribution(logprobs)
    assert all(0 <= p <= 1 for p in found.probabilities) and 0 <= found.mass <= 1
    assert fsum(found.probabilities) == pytest.approx(1, abs=1e-12)
    assert found.best == min(i for i, p in enumerate(found.probabilities) if p == max(found.probabilities))
    assert 0 <= choice_confidence(found.probabilities) <= 1 and 0 <= score_confidence(found.probabilities) <= 1
    assert 0 <= found.expectation <= len(logprobs) - 1 + 1e-9


@given(LOGPROBS, st.randoms(use_true_random=False))
def test_the_order_of_options_changes_no_digit(logprobs: list[float], draw: random.Random) -> None:
    order = list(range(len(logprobs)))
    draw.shuffle(order)
    found, other = read_distribution(logprobs), read_distribution([logprobs[index] for index in order])
    assert other == (tuple(found.probabilities[index] for index in order), found.mass)
