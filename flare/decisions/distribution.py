"""From the log probabilities of labels to what an answer says: probabilities, and how sure they are.

All of it in f64, with sums that are exact before they are rounded, so that the order of options changes no digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, fsum, inf, log
from typing import NamedTuple

from flare.errors import RequestError


class Distribution(NamedTuple):
    """How the model spreads one answer over its options. `probabilities` sum to 1; `mass` is what all labels together have of
    the complete vocabulary, 0 to 1."""

    probabilities: tuple[float, ...]
    mass: float

    @property
    def best(self) -> int:
        """The likeliest option, of equal ones the first."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def expectation(self) -> float:
        """The mean of the options' indices."""
        return fsum(index * p for index, p in enumerate(self.probabilities))


def read_distribution(logprobs: Sequence[float]) -> Distribution:
    """Returns the distribution over options whose labels have these log probabilities (natural logarithms of the complete
    vocabulary's). Raises RequestError (500) where none of them can come: an even answer would be made up."""
    top = max(logprobs)
    if top == -inf:
        raise RequestError(
            "the model gives no option of a question any probability; ask another way, or another model",
            status=500,
            type="server_error",
            code="invalid_output",
        )
    weights = [exp(value - top) for value in logprobs]
    total = fsum(weights)
    return Distribution(tuple(weight / total for weight in weights), min(1.0, exp(top + log(total))))


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Returns how far the greatest probability is from an even one's: 0 for all alike, 1 for certainty or a lone option."""
    even = 1 / len(probabilities)
    return 1.0 if even == 1 else clipped((max(probabilities) - even) / (1 - even))


def score_confidence(probabilities: Sequence[float]) -> float:
    """Returns how close to the likeliest level the others are: 1 less the mean distance from it, in units of the mean distance
    of an even distribution from its middle. 1 for a lone level; of equally likely ones the first counts."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    mode = probabilities.index(max(probabilities))
    distance = fsum(p * abs(index - mode) for index, p in enumerate(probabilities))
    even = fsum(abs(index - (count - 1) / 2) for index in range(count)) / count
    return clipped(1 - distance / even)


def clipped(value: float) -> float:
    return min(1.0, max(0.0, value))
