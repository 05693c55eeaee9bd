"""The launches of the sample and score graphs: what they need, and that a row costs no more than it asks for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import import_module

import pytest

from flare.core.launch_checks import KERNEL_ARRAYS
from flare.replay.cpu import CpuReplay
from flare.replay.cpu_interface import RowLogprobs, SampleParams
from ignition.targets.cuda.launch import Launch, Pointer
from ignition.targets.cuda.sample_graph import (
    sample_launches,
    sample_scratch,
    score_launches,
    score_scratch,
)
from tests.support.cuda_rows import CudaRows
from tests.support.logit_rows import open_rows, put_logits, put_params


@pytest.fixture(scope="module")
def replay() -> Iterator[CpuReplay]:
    with open_rows(300, 4) as replay:
        yield replay


def launches(rows: int, vocabulary: int) -> dict[str, list[Launch]]:
    """Of both graphs, with the names of their operands as operands."""
    io = {
        name: Pointer("f32" if name == "logits" else "i32", name)
        for name in KERNEL_ARRAYS["sample"] | KERNEL_ARRAYS["score"]
    }

    def over(scratch: dict) -> dict[str, Pointer]:
        return io | {name: Pointer(element, name) for name, (element, _) in scratch.items()}

    return {
        "sample": sample_launches(
            over(sample_scratch(rows, vocabulary)), rows=rows, vocabulary=vocabulary, max_context=4096
        ),
        "score": score_launches(over(score_scratch(rows, vocabulary)), rows=rows, all_rows=64, vocabulary=vocabulary),
    }


def operands(graph: list[Launch]) -> set[str]:
    return {value.operand for launch in graph for value in launch.args.values() if isinstance(value, Pointer)}


def test_the_graphs_use_all_that_they_ask_for() -> None:
    graphs = launches(8, 151936)
    assert operands(graphs["sample"]) == KERNEL_ARRAYS["sample"] | sample_scratch(8, 151936).keys()
    assert operands(graphs["score"]) == KERNEL_ARRAYS["score"] | score_scratch(8, 151936).keys()


def test_what_a_kernel_is_compiled_from_does_not_depend_on_the_bucket() -> None:
    """One cubin serves all buckets, and gives the same bits in each."""
    for one, many in zip(*(launches(rows, 49152).values() for rows in (1, 64)), strict=True):
        for launch, other in zip(one, many, strict=True):
            assert launch.grid != other.grid
            for fact in ("kernel", "constants", "warps", "stages"):
                assert getattr(launch, fact) == getattr(other, fact), launch.kernel
            assert launch.signature() == other.signature()


@pytest.mark.parametrize("vocabulary", [1, 4096, 4097, 151936, 262144])
def test_a_chunk_of_every_logit_and_blocks_that_hold_all_chunks(vocabulary: int) -> None:
    for launch in sum(launches(2, vocabulary).values(), []):
        constants = launch.constants
        chunks = constants.get("CHUNKS", -(-vocabulary // 4096))
        assert chunks * 4096 >= vocabulary > (chunks - 1) * 4096
        block = constants.get("CHUNKS_BLOCK", chunks)
        assert block >= chunks and ("CHUNKS_BLOCK" not in constants or block & (block - 1) == 0)
        assert launch.grid in {(chunks, 2, 1), (16, 2, 1), (2, 1, 1)}


@pytest.mark.parametrize("graph", ["sample", "score"])
def test_arguments_and_constants_are_the_kernels_in_their_order(graph: str) -> None:
    for launch in launches(2, 300)[graph]:
        file, _, name = launch.kernel.rpartition(".")
        kernel = getattr(import_module(f"ignition.targets.cuda.kernels.{file}"), name)
        assert [*launch.args, *launch.constants, "PROGRAMMATIC"] == list(kernel.arg_names), launch.kernel


def test_the_words_of_parameters_and_entries_are_the_contracts() -> None:
    """Spelled out once, since graphs in cores rely on them."""
    words = {name: getattr(SampleParams, name).offset / 4 for name, _ in SampleParams._fields_}
    names = "temperature top_p min_p repetition presence frequency top_k choice seed position history_len prompt_len".split()
    assert [words[name] for name in names] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    assert (words["history"], words["mask"], words["explicit_ids"]) == (14, 16, 18)
    assert (words["explicit"], words["alternatives"], ctypes.sizeof(SampleParams)) == (20, 21, 88)
    entry = {name: getattr(RowLogprobs, name).offset / 4 for name, _ in RowLogprobs._fields_}
    assert [*entry.values()] == [0, 1, 2, 3, 4, 24, 44]
    assert ctypes.sizeof(RowLogprobs) == 4 * 172


def test_rows_write_only_what_they_need(replay: CpuReplay) -> None:
    """A greedy row is scanned and chosen, nothing more; draws add weights, filters their candidates."""
    always = {"highest", "firsts", "sampled"}
    drawn = always | {"weights"}
    filtered = drawn | {"level_counts", "level_sums", "sizes", "candidates", "ids"}
    told = always | {"maxima", "sums", "above", "logprobs"}
    for fields, expected in [
        ({"temperature": 0}, always),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "history": 3}, always),
        ({}, drawn),
        ({"top_k": 5}, filtered),
        ({"temperature": 0, "presence": 1}, always | {"counts", "adjusted"}),
        ({"temperature": 0, "allowed": [1]}, always | {"adjusted"}),
        ({"temperature": 0, "alternatives": 0}, told),
        ({"temperature": 0, "alternatives": 1}, told | {"best"}),
    ]:
        history = [1] * fields.pop("history", 0)
        put_logits(replay, 0, range(300))
        put_params(replay, 0, history, **fields)
        rows = CudaRows(replay, 1, chunk=128)
        rows.sample()
        inputs = (
            {"logits", "params"} | ({"history"} if history else set()) | ({"masks"} if "allowed" in fields else set())
        )
        written = {name for name in rows.memory.pointers if not rows.memory.untouched(name)}
        assert written - inputs == expected, fields


def test_what_memory_held_before_changes_nothing(replay: CpuReplay) -> None:
    """The same rows again in the memory that the first draw left."""
    for row in range(2):
        put_logits(replay, row, [token * 7 % 31 / 5 for token in range(300)])
        put_params(replay, row, [1, 2, 3], presence=row % 2, top_k=3 * row, alternatives=3, seed=row)
    rows = CudaRows(replay, 2, chunk=128)
    first = rows.sample()
    entries = rows.memory["logprobs"].clone()
    assert rows.draw_again() == first
    assert rows.memory["logprobs"].equal(entries)
