"""The launches of the graphs behind a step: `sample` draws tokens from its rows of logits, `score` scores given tokens.

Their launches run one after the other. What lies in memory between them is theirs alone, and nothing of it is expected to be
anything before: a graph needs no memory to be filled.
"""

from __future__ import annotations

from collections.abc import Mapping

from flare.core.manifest import MAX_ALTERNATIVES
from ignition.targets.cuda.kernels import candidates, logprobs, penalties, sampler
from ignition.targets.cuda.kernels.logit_rows import CHUNK, chunks
from ignition.targets.cuda.launch import Element, Launch, Pointer

Scratch = dict[str, tuple[Element, int]]


def sample_scratch(rows: int, vocabulary: int, *, chunk: int = CHUNK, capacity: int = candidates.CAPACITY) -> Scratch:
    """Returns element and number of elements of each array between the launches of a sample graph."""
    parts = rows * chunks(vocabulary, chunk)
    return score_scratch(rows, vocabulary, chunk=chunk) | {
        "counts": ("i32", rows * vocabulary),
        "adjusted": ("f32", rows * vocabulary),
        "highest": ("f32", parts),
        "firsts": ("i32", parts),
        "weights": ("i64", parts),
        "level_counts": ("i32", parts * candidates.LEVELS),
        "level_sums": ("i64", parts * candidates.LEVELS),
        "sizes": ("i32", rows),
        "candidates": ("f32", rows * capacity),
        "ids": ("i32", rows * capacity),
    }


def score_scratch(rows: int, vocabulary: int, *, chunk: int = CHUNK) -> Scratch:
    """Returns element and number of elements of each array between the launches of a score graph."""
    parts = rows * chunks(vocabulary, chunk)
    return {
        "maxima": ("f32", parts),
        "sums": ("i64", parts),
        "above": ("i32", parts),
        "best": ("i64", parts * MAX_ALTERNATIVES),
    }


def sample_launches(
    at: Mapping[str, Pointer],
    *,
    rows: int,
    vocabulary: int,
    max_context: int,
    chunk: int = CHUNK,
    capacity: int = candidates.CAPACITY,
) -> list[Launch]:
    """Returns the launches that draw the tokens of the first `rows` rows; `at` has the arrays of KERNEL_ARRAYS["sample"]
    and of sample_scratch().

    Every row is drawn from. One without a request behind it costs least with temperature 0, repetition 1, alternatives -1 and 0
    elsewhere; what is drawn from it means nothing.
    """
    sizes = {"rows": rows, "vocabulary": vocabulary}
    parts = sizes | {"chunk": chunk}
    entries = parts | {"all_rows": rows}
    return [
        penalties.clear_counts_launch(*_of(at, "params", "counts"), **parts),
        penalties.count_history_launch(*_of(at, "params", "history", "counts"), **sizes, max_context=max_context),
        sampler.scan_launch(
            *_of(at, "logits", "params", "counts", "masks", "adjusted", "highest", "firsts", "maxima"), **parts
        ),
        candidates.weigh_launch(
            *_of(at, "logits", "adjusted", "params", "highest", "maxima"),
            *_of(at, "weights", "sums", "level_counts", "level_sums"),
            **parts,
        ),
        candidates.gather_launch(
            *_of(at, "logits", "adjusted", "params", "highest", "weights"),
            *_of(at, "level_counts", "level_sums", "sizes", "candidates", "ids"),
            **parts,
            capacity=capacity,
        ),
        sampler.choose_launch(
            *_of(at, "logits", "adjusted", "params", "highest", "firsts"),
            *_of(at, "weights", "sizes", "candidates", "ids", "sampled"),
            **parts,
            capacity=capacity,
        ),
        logprobs.compare_launch(
            *_of(at, "logits", "params", "sampled"), None, None, *_of(at, "maxima", "sums", "above", "best"), **entries
        ),
        logprobs.collect_launch(
            *_of(at, "logits", "params", "sampled", "explicit_ids"),
            None,
            None,
            None,
            *_of(at, "maxima", "sums", "above", "best", "logprobs"),
            **entries,
        ),
    ]


def score_launches(
    at: Mapping[str, Pointer], *, rows: int, all_rows: int, vocabulary: int, chunk: int = CHUNK
) -> list[Launch]:
    """Returns the launches that score `rows` rows from `first` on of the `all_rows` in `logits`; `at` has the arrays of
    KERNEL_ARRAYS["score"] and of score_scratch().

    `sampled` gets what became of each row: its target, -1 (NaN) or -2 (all are -inf). Rows behind the last are left
    alone, and so are rows whose `wanted` is -1: those between the live ones and `rows`.
    """
    sizes = {"rows": rows, "all_rows": all_rows, "vocabulary": vocabulary, "chunk": chunk}
    return [
        logprobs.maxima_launch(*_of(at, "logits", "first", "wanted", "maxima"), **sizes),
        logprobs.add_launch(*_of(at, "logits", "first", "wanted", "maxima", "sums"), **sizes),
        logprobs.compare_launch(
            at["logits"], None, *_of(at, "targets", "first", "wanted", "maxima", "sums", "above", "best"), **sizes
        ),
        logprobs.collect_launch(
            *(at["logits"], None, at["targets"], None),
            *_of(at, "first", "wanted", "sampled", "maxima", "sums", "above", "best", "logprobs"),
            **sizes,
        ),
    ]


def _of(at: Mapping[str, Pointer], *names: str) -> list[Pointer]:
    return [at[name] for name in names]
