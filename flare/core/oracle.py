"""The oracle: prompts with known answers that a core carries to prove itself, and what replayed answers must be.

At export a few fixed prompts are continued greedily by the torch reference, over the weights as stored. Then every compiled
library that the machine can run scores the same tokens. The core keeps, at every position, the likeliest tokens and the
score of the token that follows: the reference's, and for each library its own with a hash of its whole row of logits.

A core's graphs are deterministic, so on an instruction set that the oracle has, everything must be equal to the bit. On
another one the log probabilities must agree with the reference's within the tolerance of the core's weight formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from flare.core.manifest import Struct
from flare.errors import CoreError

if TYPE_CHECKING:
    from flare.core.directory import Core

TOP = 20


class Positions(Struct):
    """Results at every position of one prompt.

    ids, logprobs: the likeliest tokens, [positions][up to 20], by decreasing log probability and then by id. scores, ranks:
    the log probability of the token that follows and how many tokens have a greater one, plus 1, [positions - 1]. hashes: of
    the f32 bytes of each row of logits, [positions]; none of the reference.
    """

    ids: list[list[int]]
    logprobs: list[list[float]]
    scores: list[float]
    ranks: list[int]
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
        return msgspec.msgpack.encode(self)


class Deviation(Struct):
    """How far one set of results is from another: mean KL divergence in nats, largest log probability error among the
    reference's top tokens, share of positions whose likeliest token agrees, and the largest reference margin (in nats)
    by which a disagreeing position was decided."""

    mean_kl: float
    max_logprob_error: float
    top1_agreement: float
    worst_margin: float


class Tolerance(Struct):
    """What a deviation may be: tight for f32 cores; for quantised ones divergence and margin, since near ties flip.

    `max_logprob_error` bounds the scores' errors too, and twice that is the margin within which two tokens may change ranks.
    """

    mean_kl: float
    max_logprob_error: float
    worst_margin: float


def tolerance(formats: Iterable[str]) -> Tolerance:
    """The tolerance of numbers in these formats."""
    formats = set(formats)
    if formats & {"q8", "q4", "fp8"}:
        return Tolerance(mean_kl=0.05, max_logprob_error=4.0, worst_margin=1.0)
    if formats & {"f16", "bf16"}:
        return Tolerance(mean_kl=0.002, max_logprob_error=0.25, worst_margin=0.1)
    return Tolerance(mean_kl=1e-6, max_logprob_error=1e-3, worst_margin=1e-3)


def excess(found: Deviation, allowed: Tolerance) -> str | None:
    """What is out of tolerance, as "name value > limit", or None."""
    for name in allowed.__struct_fields__:
        value, limit = getattr(found, name), getattr(allowed, name)
        if not value <= limit:  # NaN is out of tolerance too
            return f"{name} {value:.3g} > {limit:.3g}"
    # A divergence over some tokens may be negative, by no more than the tokens' share changes, which the whole one bounds.
    least = -math.sqrt(allowed.mean_kl / 2)
    return f"mean_kl {found.mean_kl:.3g} < {least:.3g}" if found.mean_kl < least else None


def top_deviation(reference: Positions, found: Positions, at: Sequence[Sequence[float]]) -> Deviation:
    """The deviation of found results from the reference's, over the reference's top tokens alone.

    at: the log probabilities that were found of the tokens `reference.ids`. The divergence sums over those tokens only, so
    it is a little below the full one for flat distributions.
    """
    divergence, error, agree, margin = 0.0, 0.0, 0, 0.0
    for ids, wanted, best, here in zip(reference.ids, reference.logprobs, found.ids, at, strict=True):
        divergence += sum(math.exp(w) * (w - h) for w, h in zip(wanted, here, strict=True))
        error = max(error, *(abs(w - h) for w, h in zip(wanted, here, strict=True)))
        agree += best[0] == ids[0]
        margin = max(margin, wanted[0] - (wanted[ids.index(best[0])] if best[0] in ids else wanted[-1]))
    positions = len(reference.ids)
    return Deviation(
        mean_kl=divergence / positions,
        max_logprob_error=error,
        top1_agreement=agree / positions,
        worst_margin=margin,
    )


def wrong_score(reference: Positions, found: Positions, allowed: Tolerance) -> str | None:
    """Which score or rank is out of tolerance, as "position: name value, reference value", or None."""
    slack = 2 * allowed.max_logprob_error
    for position, (wanted, score) in enumerate(zip(reference.scores, found.scores, strict=True)):
        if wanted != score and not abs(wanted - score) <= allowed.max_logprob_error:
            return f"position {position}: score {score:.4g}, the reference has {wanted:.4g}"
        rank, top = found.ranks[position], reference.logprobs[position]
        least = 1 + sum(value > wanted + slack for value in top)
        # Behind the reference's last token nothing can have moved before the scored one if that is far enough ahead.
        most = sum(value >= wanted - slack for value in top) if top[-1] < wanted - slack else rank
        if not least <= rank <= most:
            return f"position {position}: rank {rank}, the reference has {reference.ranks[position]}"
    return None


def read_oracle(core: Core) -> Oracle:
    """Decodes the oracle of an opened core. Raises CoreError as `decode_oracle` does."""
    manifest = core.manifest
    return decode_oracle(
        core.read(manifest.oracle.file),
        vocabulary=manifest.model.vocabulary,
        max_context=manifest.limits.max_context,
        isas=manifest.oracle.isas,
        name=manifest.oracle.file,
    )


def decode_oracle(
    data: bytes, *, vocabulary: int, max_context: int, isas: Sequence[str], name: str = "oracle.msgpack"
) -> Oracle:
    """Decodes an oracle file of a model with `vocabulary` tokens and a context of `max_context`, run on the levels `isas`.

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
        if differing := sorted(prompt.compiled.keys() ^ set(isas)):
            raise CoreError(
                f"{where}: its results and oracle.isas of the manifest disagree about {differing[0][:20]!r}; "
                "export the core again"
            )
        for isa, found in prompt.compiled.items():
            _check_positions(found, len(prompt.tokens), vocabulary, f"{where}: {isa}")
            if len(found.hashes) != len(prompt.tokens):
                raise CoreError(
                    f"{where}: {isa}: {len(found.hashes)} hashes for {len(prompt.tokens)} tokens; export the core again"
                )
    return oracle


def _check_positions(found: Positions, positions: int, vocabulary: int, where: str) -> None:
    if not len(found.ids) == len(found.logprobs) == positions:
        raise CoreError(
            f"{where}: {len(found.ids)} rows of ids and {len(found.logprobs)} of logprobs for {positions} tokens; "
            "export the core again"
        )
    for ids, logprobs in zip(found.ids, found.logprobs, strict=True):
        if not len(ids) == len(logprobs) == min(TOP, vocabulary):
            raise CoreError(f"{where}: a row of {len(ids)} ids and {len(logprobs)} logprobs; export the core again")
        _check_ids(ids, vocabulary, where)
        if not all(-math.inf < value <= 0 for value in logprobs):
            raise CoreError(f"{where}: a log probability is not finite, or above 0; export the core again")
    if not len(found.scores) == len(found.ranks) == positions - 1:
        raise CoreError(
            f"{where}: {len(found.scores)} scores and {len(found.ranks)} ranks for {positions} tokens; export the core again"
        )
    if not all(value <= 0 for value in found.scores):  # NaN is not
        raise CoreError(f"{where}: a score is above 0, or no number; export the core again")
    for position, (score, rank) in enumerate(zip(found.scores, found.ranks, strict=True)):
        top = found.logprobs[position]
        least = 1 + sum(value > score for value in top)
        most = sum(value >= score for value in top) if top[-1] < score else vocabulary
        if not least <= rank <= most:
            raise CoreError(
                f"{where}: position {position}: rank {rank} contradicts the score {score:.6g} and the likeliest tokens; "
                "export the core again"
            )


def _check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise CoreError(f"{where}: token id {token}, the vocabulary has {vocabulary}; export the core again")
