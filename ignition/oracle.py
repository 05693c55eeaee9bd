"""The oracle: prompts with known answers that a core carries to prove itself.

At export a few fixed prompts are continued greedily by the torch reference, over the weights as stored. Then every compiled
library that this machine can run scores the same tokens. The core keeps, for every position, the reference's twenty
likeliest tokens with their log probabilities, and for each library those of its own and a hash of its whole logits row.
Replaying needs no torch: a core's graphs are deterministic, so on the same instruction set the hashes must be equal; on
another one the log probabilities must agree within the tolerance of the core's weight formats.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgpack
import msgspec
import numpy as np

from flare.core.manifest import Struct
from flare.errors import CoreError

TOP = 20
GREEDY_TOKENS = 16
PROMPT_TOKENS = 48
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
)


class Replay(Protocol):
    """What scoring needs of `flare.replay`."""

    vocabulary: int
    max_step_tokens: int
    max_rows: int
    page_tokens: int
    kv_pages: int


class Positions(Struct):
    """Results at every position of one prompt: likeliest ids and their log probabilities, [positions][up to 20]."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    hashes: list[str] = []


class Prompt(Struct):
    """Token ids (the first `prompt_tokens` given, the rest the reference's greedy continuation) and results by source."""

    tokens: list[int]
    prompt_tokens: int
    reference: Positions
    compiled: dict[str, Positions]


class Oracle(Struct):
    """The file `oracle.msgpack`."""

    prompts: list[Prompt]

    def encode(self) -> bytes:
        return msgpack.packb(msgspec.to_builtins(self), use_bin_type=True)


class Deviation(Struct):
    """How far one set of results is from another: mean KL divergence in nats, largest log probability error among the
    reference's top tokens, share of positions whose likeliest token agrees, and the largest reference margin (in nats)
    by which a disagreeing position was decided."""

    mean_kl: float
    max_logprob_error: float
    top1_agreement: float
    worst_margin: float


class Tolerance(Struct):
    """What a deviation may be: tight for f32 cores; for quantised ones divergence and margin, since near ties flip."""

    mean_kl: float
    max_logprob_error: float
    worst_margin: float


def tolerance(formats: Iterable[str]) -> Tolerance:
    """The tolerance of a core with these weight formats."""
    formats = set(formats)
    if formats & {"q8", "q4"}:
        return Tolerance(mean_kl=0.05, max_logprob_error=4.0, worst_margin=1.0)
    if formats & {"f16", "bf16"}:
        return Tolerance(mean_kl=0.002, max_logprob_error=0.25, worst_margin=0.1)
    return Tolerance(mean_kl=1e-6, max_logprob_error=1e-3, worst_margin=1e-3)


def decode_oracle(data: bytes, *, vocabulary: int, max_context: int, name: str = "oracle.msgpack") -> Oracle:
    """Decodes an oracle file of a model with `vocabulary` tokens and a context of `max_context`.

    Raises CoreError when it is malformed, empty, incomplete, or holds what no export of such a model could have written.
    """
    try:
        oracle = msgspec.msgpack.decode(data, type=Oracle)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CoreError(f"{name}: {str(error).splitlines()[0][:200]}; export the core again") from None
    if not oracle.prompts:
        raise CoreError(f"{name}: it holds no prompts and proves nothing; export the core again")
    for index, prompt in enumerate(oracle.prompts):
        where = f"{name}: prompt {index}"
        if not 1 <= prompt.prompt_tokens <= len(prompt.tokens) <= max_context:
            raise CoreError(
                f"{where}: {prompt.prompt_tokens} of {len(prompt.tokens)} tokens given, the context holds {max_context}; "
                "export the core again"
            )
        _check_ids(prompt.tokens, vocabulary, where)
        _check_positions(prompt.reference, len(prompt.tokens), vocabulary, f"{where}: reference")
        for isa, found in prompt.compiled.items():
            _check_positions(found, len(prompt.tokens), vocabulary, f"{where}: {isa[:20]}")
            if len(found.hashes) != len(prompt.tokens):
                raise CoreError(
                    f"{where}: {isa[:20]}: {len(found.hashes)} hashes for {len(prompt.tokens)} tokens; export again"
                )
    return oracle


def _check_positions(found: Positions, positions: int, vocabulary: int, where: str) -> None:
    if not len(found.ids) == len(found.logprobs) == positions:
        raise CoreError(
            f"{where}: {len(found.ids)} rows of ids and {len(found.logprobs)} of logprobs for {positions} tokens; "
            "export the core again"
        )
    for ids, logprobs in zip(found.ids, found.logprobs, strict=True):
        if not 1 <= len(ids) == len(logprobs) <= TOP:
            raise CoreError(f"{where}: a row of {len(ids)} ids and {len(logprobs)} logprobs; export the core again")
        _check_ids(ids, vocabulary, where)
        if not all(map(math.isfinite, logprobs)):
            raise CoreError(f"{where}: a log probability is not finite; export the core again")


def _check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise CoreError(f"{where}: token id {token}, the vocabulary has {vocabulary}; export the core again")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities [positions, vocabulary] in float64 of logits in any float type; NaN where logits are not finite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide -= wide.max(axis=-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def summarise(logits: np.ndarray, *, hashes: bool) -> Positions:
    """The top tokens of each row, by decreasing log probability and then by id, and the hash of its f32 bytes."""
    logprobs = log_softmax(logits)
    count = min(TOP, logprobs.shape[1])
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
    values = np.take_along_axis(logprobs, order, axis=-1)
    rows = np.ascontiguousarray(logits, dtype="<f4")
    return Positions(
        ids=order.tolist(),
        logprobs=[[round(v, 6) for v in row] for row in values.tolist()],
        hashes=[hashlib.sha256(row.tobytes()).hexdigest()[:32] for row in rows] if hashes else [],
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


def top_deviation(reference: Positions, found: np.ndarray) -> Deviation:
    """The deviation of logits [positions, vocabulary] from stored results, over the stored top tokens alone.

    The divergence sums over those tokens only, so it is a little below the full one for flat distributions.
    """
    got = log_softmax(found)
    divergence, errors, agree, margins = [], [], [], []
    for ids, logprobs, row in zip(reference.ids, reference.logprobs, got, strict=True):
        wanted = np.asarray(logprobs)
        here = row[ids]
        divergence.append(float((np.exp(wanted) * (wanted - here)).sum()))
        errors.append(float(np.abs(wanted - here).max()))
        best = int(row.argmax())
        agree.append(best == ids[0])
        margins.append(float(wanted[0] - (wanted[ids.index(best)] if best in ids else wanted[-1])))
    return Deviation(
        mean_kl=float(np.mean(divergence)),
        max_logprob_error=max(errors),
        top1_agreement=float(np.mean(agree)),
        worst_margin=max(margins),
    )


def excess(found: Deviation, allowed: Tolerance) -> str | None:
    """What is out of tolerance, as "name value > limit", or None."""
    for name in allowed.__struct_fields__:
        value, limit = getattr(found, name), getattr(allowed, name)
        if not value <= limit:  # NaN is out of tolerance too
            return f"{name} {value:.3g} > {limit:.3g}"
    return None


def score(replay: Replay, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Replays each prompt alone and returns its logits at every position, [positions, vocabulary] f32.

    Tokens run in chunks of at most `max_rows`, since every position's row is wanted. Raises CoreError if a prompt needs
    more pages than the replay has.
    """
    chunk = min(replay.max_rows, replay.max_step_tokens)
    results = []
    for tokens in prompts:
        pages = -(-len(tokens) // replay.page_tokens)
        if pages > replay.kv_pages:
            raise CoreError(
                f"oracle: a prompt of {len(tokens)} tokens needs {pages} kv pages, {replay.kv_pages} are open"
            )
        for page in range(pages):
            replay.page_table[page] = page
        logits = np.empty((len(tokens), replay.vocabulary), dtype=np.float32)
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            for i, token in enumerate(part):
                replay.tokens[i], replay.positions[i], replay.slots[i], replay.rows[i] = token, begin + i, 0, i
            replay.step(len(part), len(part))
            for i in range(len(part)):
                logits[begin + i] = np.frombuffer(replay.logits(i), dtype=np.float32)
        results.append(logits)
    return results
