"""Log probabilities of the native sampler and scorer: within 1e-5 of log-softmax in f64, and exact in order and rank."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from ctypes import c_int32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import CoreError
from flare.replay.cpu import CpuReplay, RowLogprobs
from tests.support.logit_rows import open_rows, put_logits, put_params, runnable_levels

INF = math.inf


@pytest.fixture(scope="module")
def small() -> Iterator[CpuReplay]:
    with open_rows(70, 8, threads=2) as replay:
        yield replay


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In f64. At a highest of +inf its tokens share the probability, as the limit of rising logits would have it."""
    values = logits.astype(np.float64)
    if values.max() == INF:
        values = np.where(values == INF, 0.0, -INF)
    with np.errstate(over="ignore"):
        values = values - values.max()
    return values - math.log(np.exp(values).sum())


def values_of_all(replay: CpuReplay, row: int) -> np.ndarray:
    """The value of every token of a row, f32, asked for by id."""
    found = []
    for first in range(0, replay.vocabulary, 128):
        ids = range(first, min(first + 128, replay.vocabulary))
        put_params(replay, row, temperature=0, alternatives=0, explicit=ids)
        replay.sample(row + 1)
        found += replay.logprobs[row].explicit[: len(ids)]
    return np.array(found, np.float32)


def assert_near(values: np.ndarray, logits: np.ndarray) -> None:
    truth = log_softmax(logits)
    with np.errstate(over="ignore"):
        nearest = truth.astype(np.float32)
        rounding = np.spacing(np.abs(nearest)) / 2
    finite = np.isfinite(nearest)
    assert not np.signbit(values[values == 0]).any(), "-0 is no probability that a client expects"
    assert np.array_equal(values[~finite], nearest[~finite])
    error = np.abs(values[finite].astype(np.float64) - truth[finite])
    assert (error <= 1e-5 + rounding[finite]).all(), error.max()


def assert_ranked(entry: RowLogprobs, values: np.ndarray, token: int, alternatives: int) -> None:
    """Everything of an entry follows from the values of all tokens."""
    assert entry.chosen == values[token]
    assert entry.rank == 1 + (values > values[token]).sum()
    best = sorted(range(len(values)), key=lambda t: (-values[t], t))[:alternatives]
    assert entry.count == len(best)
    assert entry.ids[: entry.count] == best
    assert entry.values[: entry.count] == values[best].tolist()
    assert entry.reserved == 0


def shapes(vocabulary: int) -> dict[str, np.ndarray]:
    """Rows of all kinds: flat and peaked ones, extremes, equal logits, and different ones whose values round to one."""
    source = np.random.default_rng(vocabulary)
    normal = source.standard_normal(vocabulary)
    rows = {
        "constant": np.full(vocabulary, 2.5),
        "flat": 0.01 * normal,
        "usual": 3.0 * normal,
        "peaked": 30.0 * normal,
        "far": 1e5 + 3.0 * normal,
        "huge": 1e30 * normal,
        "widest": np.where(normal < 0, -3.4e38, 3.4e38),
        "tiny": 1e-30 * normal,
        "denormal": 1e-42 * normal,
        "ties": np.round(normal),
        "colliding": np.where(normal > 2, 20.0, 1e-3 + 1e-9 * source.integers(0, 50, vocabulary)),
        "impossible": np.where(normal > 0.5, -INF, normal),
        "one": np.full(vocabulary, -INF),
        "certain": np.where(normal > 1, INF, normal),
    }
    rows["one"][vocabulary // 2] = -7.0
    rows["impossible"][0] = 0.0
    rows["certain"][-1] = INF
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("vocabulary", [1, 2, 19, 20, 63, 64, 65, 1000, 1281, 1300, 5000])
def test_values_order_and_ranks(vocabulary: int) -> None:
    source = np.random.default_rng(1)
    with open_rows(vocabulary, 2, threads=1) as replay:
        for name, logits in shapes(vocabulary).items():
            put_logits(replay, 1, logits)
            put_logits(replay, 0, logits)
            values = values_of_all(replay, 0)
            assert_near(values, logits)
            for target in {0, vocabulary - 1, *source.integers(0, vocabulary, 6).tolist()}:
                replay.targets[1] = target
                for alternatives in (0, 1, 5, 20):
                    replay.wanted[1] = alternatives
                    replay.score(1, 1)
                    assert_ranked(replay.logprobs[1], values, target, alternatives)
            if np.isfinite(logits).all():
                assert math.isclose(np.exp(values.astype(np.float64)).sum(), 1, abs_tol=1e-4), name


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_a_real_vocabulary(vocabulary: int) -> None:
    source = np.random.default_rng(2)
    with open_rows(vocabulary, 1) as replay:
        for scale in (0.0, 3.0, 12.0):
            logits = (scale * source.standard_normal(vocabulary)).astype(np.float32)
            put_logits(replay, 0, logits)
            values = values_of_all(replay, 0)
            assert_near(values, logits)
            replay.targets[0], replay.wanted[0] = int(source.integers(vocabulary)), 20
            replay.score(0, 1)
            assert_ranked(replay.logprobs[0], values, replay.targets[0], 20)


LOGITS = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 2),
    st.integers(0, 40).map(lambda n: 1e-3 + n * 1e-9),
    st.floats(-40, 40, width=32),
    st.floats(width=32, allow_nan=False),
)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    places=st.dictionaries(st.integers(0, 69), LOGITS, max_size=12),
    others=st.sampled_from(["normal", "few values", "-inf"]),
    target=st.integers(0, 69),
    alternatives=st.integers(0, 20),
)
def test_any_row(
    small: CpuReplay, seed: int, places: dict[int, float], others: str, target: int, alternatives: int
) -> None:
    source = np.random.default_rng(seed)
    logits = {
        "normal": 6 * source.standard_normal(70),
        "few values": source.integers(-3, 3, 70) + 0.0,
        "-inf": np.full(70, -INF),
    }[others]
    logits[0] = 0.0
    for token, value in places.items():
        logits[token] = value
    if max(logits) == -INF:
        logits[1] = -3.0
    held = np.array(put_logits(small, 0, logits), np.float32)
    values = values_of_all(small, 0)
    assert_near(values, held)
    small.targets[0], small.wanted[0] = target, alternatives
    small.score(0, 1)
    assert_ranked(small.logprobs[0], values, target, alternatives)


@settings(max_examples=200)
@given(data=st.data())
def test_a_draws_log_probabilities_are_of_the_logits_before_everything(small: CpuReplay, data: st.DataObject) -> None:
    """Penalties, mask, temperature and filters change what is drawn, and nothing of what is told about it; and telling
    changes nothing of what is drawn."""
    source = random.Random(data.draw(st.integers(0, 2**32)))
    put_logits(small, 0, [source.randint(-40, 40) / 8 for _ in range(70)])
    values = values_of_all(small, 0)
    history = data.draw(st.lists(st.integers(0, 69), max_size=20))
    allowed = data.draw(st.none() | st.sets(st.integers(0, 69), min_size=1))
    fields = dict(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 2.0])),
        top_k=data.draw(st.sampled_from([-1, 5])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        min_p=data.draw(st.sampled_from([0.0, 0.1])),
        repetition=data.draw(st.sampled_from([1.0, 1.5])),
        presence=data.draw(st.sampled_from([0.0, 0.5])),
        frequency=data.draw(st.sampled_from([0.0, -0.5])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    explicit = data.draw(st.lists(st.integers(0, 69), max_size=128))
    alternatives = data.draw(st.integers(0, 20))
    put_params(small, 0, history, allowed=allowed, **fields)
    small.sample(1)
    silent = small.sampled[0]
    put_params(small, 0, history, allowed=allowed, explicit=explicit, alternatives=alternatives, **fields)
    small.sample(1)
    assert small.sampled[0] == silent
    assert_ranked(small.logprobs[0], values, silent, alternatives)
    assert small.logprobs[0].explicit[: len(explicit)] == values[explicit].tolist()


def test_only_wanted_entries_are_written(small: CpuReplay) -> None:
    ctypes.memset(small.logprobs, 0x55, ctypes.sizeof(small.logprobs))
    untouched = bytes(small.logprobs[0])
    for row in range(8):
        put_logits(small, row, [float(row)] * 70)
        put_params(small, row, alternatives=2 if row == 3 else -1, explicit=[999])  # 999: nobody looks at it
    put_params(small, 3, alternatives=2, explicit=[7])
    small.sample(8)
    assert [bytes(entry) == untouched for entry in small.logprobs] == [True] * 3 + [False] + [True] * 4
    entry = small.logprobs[3]
    assert (entry.count, entry.explicit[0]) == (2, entry.chosen)
    assert bytes(entry)[-4 * 127 :] == b"\x55" * 4 * 127
    small.targets[:], small.wanted[:] = [5] * 8, [1] * 8
    small.score(5, 2)
    assert [bytes(entry) == untouched for entry in small.logprobs] == [True] * 3 + [False, True, False, False, True]
    assert bytes(small.logprobs[5])[-4 * 128 :] == b"\x55" * 4 * 128
    small.score(8, 0)


def test_bits_are_equal_for_all_threads_and_levels() -> None:
    source = np.random.default_rng(3)
    rows = [*shapes(1000).values()] + [4.0 * source.standard_normal(1000) for _ in range(18)]
    targets = source.integers(0, 1000, len(rows)).tolist()
    seen = set()
    levels = runnable_levels()
    for isa, threads in [(levels[0], 2), (levels[0], 5), *((isa, 1) for isa in levels)]:
        with open_rows(1000, len(rows), threads=threads, isa=isa) as replay:
            for row, logits in enumerate(rows):
                put_logits(replay, row, logits)
                put_params(replay, row, seed=row, alternatives=20, explicit=range(128))
            replay.sample(len(rows))
            drawn = bytes(replay.sampled) + bytes(replay.logprobs)
            replay.targets[:], replay.wanted[:] = targets, [20] * len(rows)
            replay.score(0, len(rows))
            seen.add(drawn + bytes(replay.logprobs))
    assert len(levels) > 1 and len(seen) == 1


def test_a_row_without_probabilities_has_rank_0_and_fails_alone(small: CpuReplay) -> None:
    for row in range(8):
        put_logits(small, row, [0.0] * 69 + [8.0])
        put_params(small, row, temperature=0, alternatives=3)
    small.logits(2)[69] = math.nan
    put_logits(small, 5, [-INF] * 70)
    put_params(small, 6, temperature=0, alternatives=3, allowed=[])
    small.targets[:], small.wanted[:] = [69] * 8, [3] * 8
    calls = [(lambda: small.sample(8), {2, 5, 6}), (lambda: small.score(0, 8), {2, 5})]
    for call, failed in calls:
        ctypes.memset(small.logprobs, 0x55, ctypes.sizeof(small.logprobs))
        with pytest.raises(CoreError, match="row 2: its logits hold NaN"):
            call()
        for row, entry in enumerate(small.logprobs):
            assert (entry.rank, entry.count) == ((0, 0) if row in failed else (1, 3)), row
            assert entry.chosen == -INF if row in failed else entry.chosen < 0
    with pytest.raises(CoreError, match="row 5: all its logits are -inf"):
        small.score(3, 5)
    small.score(6, 2)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(alternatives=-2), r"params\[1\]: alternatives -2: must be in \[-1, 20\]"),
        (dict(alternatives=21), r"params\[1\]: alternatives 21: must be in \[-1, 20\]"),
        (dict(explicit=-1), r"params\[1\]: explicit -1: must be in \[0, 128\]"),
        (dict(explicit=129), r"params\[1\]: explicit 129: must be in \[0, 128\]"),
        (dict(explicit_ids=ctypes.POINTER(c_int32)()), r"params\[1\]: explicit_ids is null"),
        (dict(explicit_ids=(c_int32 * 2)(3, 70)), r"params\[1\]: explicit_ids has token 70: must be in \[0, 70\)"),
        (dict(explicit_ids=(c_int32 * 2)(-1, 3)), r"params\[1\]: explicit_ids has token -1: must be in \[0, 70\)"),
    ],
)
def test_what_is_wanted_of_a_draw_is_bounded(small: CpuReplay, change: dict[str, object], text: str) -> None:
    put_params(small, 0)
    params = put_params(small, 1, alternatives=0, explicit=[1, 2])
    for name, value in change.items():
        setattr(params, name, value)
    small.sampled[0] = 77
    with pytest.raises(ValueError, match=text):
        small.sample(2)
    assert small.sampled[0] == 77


@pytest.mark.parametrize(
    "first, count", [(-1, 1), (0, -1), (0, 9), (8, 1), (2**31 - 1, 1), (1, 2**31 - 1), (-(2**31), -(2**31))]
)
def test_only_rows_of_the_last_step_are_scored(small: CpuReplay, first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"rows {count} from {first} on: the last step left 8 rows of logits"):
        small.score(first, count)


@pytest.mark.parametrize(
    "array, value, text",
    [
        ("targets", -1, r"target\[3\] -1: must be in \[0, 70\)"),
        ("targets", 70, r"target\[3\] 70: must be in \[0, 70\)"),
        ("wanted", -1, r"wanted\[3\] -1: must be in \[0, 20\]"),
        ("wanted", 21, r"wanted\[3\] 21: must be in \[0, 20\]"),
    ],
)
def test_targets_and_what_is_wanted_are_bounded(small: CpuReplay, array: str, value: int, text: str) -> None:
    small.targets[:], small.wanted[:] = [0] * 8, [0] * 8
    getattr(small, array)[3] = value
    untouched = bytes(small.logprobs)
    with pytest.raises(ValueError, match=text):
        small.score(2, 2)
    assert bytes(small.logprobs) == untouched
    for row in range(8):
        put_logits(small, row, [0.0] * 70)
    small.score(0, 3)  # that row's numbers are not looked at
    small.score(4, 4)


@pytest.mark.parametrize("name", ["target", "wanted", "logprobs"])
def test_a_missing_array_is_refused(small: CpuReplay, name: str) -> None:
    kept = getattr(small._score, name)
    try:
        setattr(small._score, name, None)
        with pytest.raises(ValueError, match="target, wanted or logprobs is null"):
            small.score(0, 1)
    finally:
        setattr(small._score, name, kept)


def test_logprobs_are_not_needed_where_none_are_wanted(small: CpuReplay) -> None:
    kept = small._sample.logprobs
    try:
        small._sample.logprobs = None
        put_params(small, 0)
        small.sample(1)
        put_params(small, 0, alternatives=0)
        with pytest.raises(ValueError, match=r"params\[0\]: alternatives 0: logprobs is null"):
            small.sample(1)
    finally:
        small._sample.logprobs = kept
