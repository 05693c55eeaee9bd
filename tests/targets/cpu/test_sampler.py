"""The native sampler against its definition in plain Python and published vectors; its distributions are tested beside it."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_uint32
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import CoreError
from flare.replay.cpu import CpuArg, CpuReplay
from tests.support.fake_library import fill, io, node, program
from tests.support.logit_rows import open_rows, put_logits, put_params, runnable_levels
from tests.support.reference_sampler import reference_sample

INF = math.inf


@pytest.fixture(scope="module")
def small() -> Iterator[CpuReplay]:
    with open_rows(64, 64, threads=2) as replay:
        yield replay


@pytest.fixture(scope="module")
def medium() -> Iterator[CpuReplay]:
    with open_rows(1000, 16, threads=2) as replay:
        yield replay


# Parts


def parts(words: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    nodes = [node("Parts", 0, CpuArg("io", 1024, 64), CpuArg("io", 2048, 16384))]
    with CpuReplay(program(nodes), threads=1, kv_pages=40) as replay:
        io(replay, c_uint32, 6)[:] = list(words)
        io(replay, c_float, len(values), 2048)[:] = list(values)
        fill(replay, [0])
        replay.step(1, 0)
        return list(io(replay, c_uint32, 4)), list(io(replay, c_float, len(values), 2048))


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    key: tuple[int, ...], counter: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert parts([*key, *counter], [0.0])[0] == list(words)


def test_exp_is_within_two_units_of_the_last_place() -> None:
    xs = [struct.unpack("f", struct.pack("f", -86.0 * i / 4095))[0] for i in range(4096)]
    for x, y in zip(xs, parts([0] * 6, xs)[1], strict=True):
        exact = math.exp(x)
        assert abs(y - exact) <= 2 * 2.0 ** (math.floor(math.log2(exact)) - 23), x
    edges = [0.0, -0.0, -1e-30, -86.0001, -1e30, -INF]
    assert parts([0] * 6, edges)[1] == [1, 1, 1, 0, 0, 0]


# The whole against the definition


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], dict[str, float], list[int], int]:
    """Logits of 64 tokens (often equal ones, sometimes masked ones), parameters, history, length of its prompt."""
    steps = draw(st.sampled_from([2.0, 64.0, 4096.0]))  # coarse steps make ties
    logits = [value / steps for value in draw(st.lists(st.integers(-600, 600), min_size=64, max_size=64))]
    for masked in draw(st.lists(st.integers(0, 63), max_size=5)):
        logits[masked] = -INF
    if all(value == -INF for value in logits):
        logits[5] = 0.0
    fields = dict(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 3.0, -1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 40, 63, 64, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])),
        repetition=draw(st.sampled_from([1.0, 1.1, 0.8, 2.0])),
        presence=draw(st.sampled_from([0.0, 0.5, -0.25])),
        frequency=draw(st.sampled_from([0.0, 0.125, -1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 2**32 - 1)),
        position=draw(st.integers(0, 2**32 - 1)),
    )
    history = draw(st.lists(st.integers(0, 63), max_size=40))
    return logits, fields, history, draw(st.integers(0, len(history)))


@settings(max_examples=500)
@given(case=cases())
def test_every_token_is_the_definitions(
    small: CpuReplay, case: tuple[list[float], dict[str, float], list[int], int]
) -> None:
    logits, fields, history, prompt_len = case
    held = put_logits(small, 0, logits)
    params = put_params(small, 0, history)
    for name, value in fields.items():
        setattr(params, name, value)
    params.prompt_len = prompt_len
    small.sample(1)
    assert small.sampled[0] == reference_sample(held, params, history)
    assert list(small.logits(0)) == held, "sampling changed the logits"


@pytest.mark.parametrize(
    "vocabulary, scale, fields",
    [
        (1000, 2.0, {}),
        (1000, 2.0, {"top_k": 50}),
        (1000, 2.0, {"top_k": 900, "top_p": 0.97}),
        (1000, 0.0, {"top_p": 0.5}),
        (1000, 0.2, {"top_p": 0.95}),
        (1000, 5.0, {"top_p": 0.95, "min_p": 0.02}),
        (1000, 2.0, {"min_p": 0.1}),
        (49152, 3.0, {}),
        (49152, 3.0, {"top_k": 40, "top_p": 0.95}),
        (49152, 3.0, {"top_p": 0.9}),
        (49152, 0.1, {"top_p": 0.9}),
        (49152, 0.0, {"top_p": 0.9}),
        (49152, 0.0, {"top_k": 20000}),
        (49152, 1.0, {"min_p": 0.05}),
    ],
)
def test_many_tokens_are_the_definitions(vocabulary: int, scale: float, fields: dict[str, float]) -> None:
    """Peaked, flat and constant distributions: every path of the bounded selection."""
    rows = 4
    source = random.Random(vocabulary + int(scale * 10))
    with open_rows(vocabulary, rows) as replay:
        for row in range(rows):
            held = put_logits(replay, row, [source.gauss(0, scale) for _ in range(vocabulary)])
            params = put_params(replay, row, seed=row, position=3, **fields)
            replay.sample(row + 1)
            assert replay.sampled[row] == reference_sample(held, params, [])


def test_draws_are_equal_for_all_threads_and_levels() -> None:
    """Thread counts and instruction sets choose the same tokens from the same rows, to the last one."""
    source = random.Random(5)
    rows = [[source.gauss(0, 2) for _ in range(1000)] for _ in range(16)]
    fields = [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 100, "top_p": 0.7, "min_p": 0.01}]
    history = [source.randrange(1000) for _ in range(100)]
    seen = set()
    levels = runnable_levels()
    allowed = [None, source.sample(range(1000), 400), range(0, 1000, 7)]
    for isa, threads in [(levels[0], 2), (levels[0], 8), *((isa, 1) for isa in levels)]:
        with open_rows(1000, 16, threads=threads, isa=isa) as replay:
            tokens = []
            for row, logits in enumerate(rows):
                put_logits(replay, row, logits)
            for seed in range(50):
                for row in range(16):
                    params = put_params(
                        replay,
                        row,
                        history,
                        allowed=allowed[seed % 3],
                        seed=seed,
                        choice=row,
                        **fields[(row + seed) % 5],
                    )
                    params.repetition, params.presence, params.frequency = 1.2, 0.3, 0.1
                    params.temperature = 1.0 if row % 8 else 0.0
                replay.sample(16)
                tokens += list(replay.sampled)
            seen.add(tuple(tokens))
    assert len(seen) == 1


# Degenerate rows


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 3e38])
def test_infinite_logits(medium: CpuReplay, fields: dict[str, float], temperature: float) -> None:
    """+inf outweighs everything; -inf is never chosen; extremes of temperature are fine."""
    some = [float(i % 7) for i in range(1000)]
    certain = [-INF] * 1000
    certain[700] = -3e38
    two = some.copy()
    two[900] = two[33] = INF
    wide = [-3e38] * 1000
    wide[4] = 3e38
    for row, logits in enumerate([certain, two, wide, [-INF, *some[1:]]]):
        put_logits(medium, row, logits)
    seen: list[set[int]] = [set(), set(), set(), set()]
    for seed in range(50):
        for row in range(4):
            put_params(medium, row, seed=seed, temperature=temperature, **fields)
        medium.sample(4)
        for row in range(4):
            seen[row].add(medium.sampled[row])
    assert seen[0] == {700}
    assert seen[1] == ({33} if temperature <= 0 else {33, 900})
    assert seen[2] == {4} or temperature == 3e38
    assert 0 not in seen[3]
    assert temperature == 3e38 or temperature == 1.0 or {some[token] for token in seen[3]} == {6.0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_fails_alone(medium: CpuReplay, temperature: float) -> None:
    good = [0.0] * 1000
    good[123] = 50.0
    for row in range(16):
        put_logits(medium, row, good)
        put_params(medium, row, temperature=temperature)
    medium.logits(5)[999] = math.nan
    put_logits(medium, 7, [-INF] * 1000)
    with pytest.raises(CoreError, match="row 5: its logits hold NaN"):
        medium.sample(16)
    assert list(medium.sampled) == [-1 if row in (5, 7) else 123 for row in range(16)]
    put_logits(medium, 5, good)
    with pytest.raises(CoreError, match="row 7: all its logits are -inf"):
        medium.sample(16)
    put_logits(medium, 7, good)
    medium.sample(16)
    assert list(medium.sampled) == [123] * 16


def test_greedy_takes_the_lowest_of_equal_ids_wherever_it_is(medium: CpuReplay) -> None:
    for first in [0, 1, 15, 16, 63, 64, 500, 959, 960, 998]:
        logits = [-1.0] * 1000
        logits[first] = logits[first + 1] = logits[999] = 2.5
        put_logits(medium, 0, logits)
        put_params(medium, 0, temperature=0)
        medium.sample(1)
        assert medium.sampled[0] == first


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", [math.nan, INF, -INF]),
        ("top_p", [math.nan, -0.01, 1.01]),
        ("min_p", [math.nan, -0.01, 1.01]),
        ("repetition", [math.nan, 0.0, -1.0, INF]),
        ("presence", [math.nan, INF]),
        ("frequency", [math.nan, -INF]),
        ("top_k", [-2]),
        ("prompt_len", [-1, 4]),
        ("history_len", [-1]),
    ],
)
def test_parameters_out_of_range_are_refused(small: CpuReplay, name: str, values: list[float]) -> None:
    for value in values:
        put_params(small, 0)
        params = put_params(small, 1, [1, 2, 3], top_k=4)
        setattr(params, name, value)
        small.sampled[0] = 77
        with pytest.raises(ValueError, match=rf"params\[1\]: .*{name}"):
            small.sample(2)
        assert small.sampled[0] == 77


@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1, -(2**31)])
def test_history_out_of_the_vocabulary_is_refused_where_it_is_read(small: CpuReplay, token: int) -> None:
    params = put_params(small, 0, [1, token, 2])
    small.sample(1)
    params.presence = 0.5
    with pytest.raises(ValueError, match=rf"params\[0\]: history has token {token}: must be in \[0, 64\)"):
        small.sample(1)
    params.history = ctypes.POINTER(c_int32)()
    with pytest.raises(ValueError, match="history is null"):
        small.sample(1)


def test_rows_out_of_range_are_refused(small: CpuReplay) -> None:
    for rows in (-1, 65, 2**31 - 1):
        with pytest.raises(ValueError, match=f"rows {rows}: the last step left 64 rows"):
            small.sample(rows)
    small.sample(0)


@pytest.mark.parametrize("march", ["native", "x86-64"])
def test_the_sanitizers_find_nothing_in_draws_and_scores(march: str, tmp_path: Path, repository: Path) -> None:
    """Random rows, masks and wishes in memory of exactly their sizes, for vocabularies around whole words and blocks."""
    if march == "x86-64-v4" and march not in runnable_levels():
        march = "native"
    kernels = repository / "ignition/targets/cpu/kernels"
    source = Path(__file__).with_name("rows_stress.cc")
    options = (
        f"-std=c++20 -O1 -g -march={march} -Wno-psabi -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    )
    command = ["g++", *options.split(), "-pthread", f"-I{kernels}", source, "-o", "stress"]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "stress", "200"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
