"""The shortest prefix of a row's tokens, by descending logit and then ascending id, whose measures reach a target; no sort.

A prefix is a border (key, place): the tokens whose key is higher, and of those at the key the ones up to a place; places rise
with ids. Its key is found digit by digit, two bits a pass: the highest key such that it and all higher ones hold enough. A last
pass walks the tokens at that key in the order of their ids. Masked sums of non-negative terms in one fixed order never fall as
terms are added, so the search is exact in floating point too. The first block of tokens, most often the only one, is weighed
once for all passes.

Tokens weigh exp(exponent) (exact_math.py); those that weigh nothing or less than `least` belong to no prefix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.exact_math import NEGATIVE_INFINITY, exp_nonpositive
from ignition.targets.cuda.kernels.logit_rows import exponents, keys


@triton.jit
def measures(logits, first, end, highest, inverse, least, key, place, weighed, BLOCK: tl.constexpr):
    """Places, keys, and the f64 measures of those within the border (0 for others) of the block of logits at `first`."""
    places = first + tl.arange(0, BLOCK)
    x = tl.load(logits + places, mask=places < end, other=NEGATIVE_INFINITY)
    weights = exp_nonpositive(exponents(x, highest, inverse))
    of = keys(x)
    inside = (of > key) | ((of == key) & (places <= place))
    inside = inside & (weights > 0.0) & (weights >= least)
    return places, of, tl.where(inside, tl.where(weighed, weights, 1.0), 0.0).to(tl.float64)


@triton.jit
def measured(logits, end, highest, inverse, least, key, place, weighed, at_least, BLOCK: tl.constexpr):
    """The f64 sum of the measures within the border of tokens whose key is at least so."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, end, BLOCK):
        _, of, measure = measures(logits, first, end, highest, inverse, least, key, place, weighed, BLOCK)
        total += tl.where(of >= at_least, measure, 0.0)
    return tl.sum(total, 0)


@triton.jit
def enough(value, target, beyond):
    return (value > target) | ((value == target) & (beyond == 0))


@triton.jit
def shortest_prefix(logits, end, highest, inverse, least, key, place, weighed, target, beyond, BLOCK: tl.constexpr):
    """The border of the shortest prefix, within the border (key, place) of logits[:end], whose measures reach the f64 target
    (beyond: exceed it); that border itself where all do not. A token's measure is its weight (weighed) or 1."""
    found = key * 0
    beyond = beyond | (target == 0.0)  # a prefix has at least one token
    _, first_keys, first_measures = measures(logits, 0, end, highest, inverse, least, key, place, weighed, BLOCK)
    for step in range(16):
        shift = 30 - 2 * step
        one = found + (tl.full([], 1, tl.uint32) << shift)
        two = found + (tl.full([], 2, tl.uint32) << shift)
        three = found + (tl.full([], 3, tl.uint32) << shift)
        of_one = tl.where(first_keys >= one, first_measures, 0.0)
        of_two = tl.where(first_keys >= two, first_measures, 0.0)
        of_three = tl.where(first_keys >= three, first_measures, 0.0)
        for first in range(BLOCK, end, BLOCK):
            _, of, measure = measures(logits, first, end, highest, inverse, least, key, place, weighed, BLOCK)
            of_one += tl.where(of >= one, measure, 0.0)
            of_two += tl.where(of >= two, measure, 0.0)
            of_three += tl.where(of >= three, measure, 0.0)
        digit = enough(tl.sum(of_one, 0), target, beyond).to(tl.uint32)
        digit += enough(tl.sum(of_two, 0), target, beyond).to(tl.uint32)
        digit += enough(tl.sum(of_three, 0), target, beyond).to(tl.uint32)
        found += digit << shift
    if found > 0:
        running = measured(logits, end, highest, inverse, least, key, place, weighed, found + 1, BLOCK)
        reached = end
        last = end * 0
        for first in range(0, end, BLOCK):
            places, of, measure = measures(logits, first, end, highest, inverse, least, key, place, weighed, BLOCK)
            measure = tl.where(of == found, measure, 0.0)
            tied = measure > 0.0
            hit = tied & enough(running + tl.cumsum(measure, 0), target, beyond)
            reached = tl.minimum(reached, tl.min(tl.where(hit, places, end), 0))
            last = tl.maximum(last, tl.max(tl.where(tied, places, 0), 0))
            running += tl.sum(measure, 0)
        key = found
        place = tl.minimum(reached, last)  # the last one if rounding reaches none
    return key, place
