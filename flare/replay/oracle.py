"""Replaying the oracle: a core's prompts through its compiled graphs, held against the answers that it carries.

`flare serve --check` does it at start on the server's own replay, `ignition validate` on every level of the machine, and an
export makes the stored answers in the same way. Nothing is needed but the replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flare.core.oracle import (
    TOP,
    Oracle,
    Positions,
    Prompt,
    Tolerance,
    excess,
    read_oracle,
    tolerance,
    top_deviation,
    wrong_score,
)
from flare.errors import CoreError, SettingError

if TYPE_CHECKING:
    from flare.core.directory import Core
    from flare.core.manifest import CpuTarget, CudaTarget

Look = Callable[["memoryview[float]", Any], None]
"""Takes a position's logits and their RowLogprobs, which are there during the call only; positions come in order."""


class Scorer(Protocol):
    """What scoring needs of a replay; see `CpuReplay`."""

    tokens: Any
    positions: Any
    slots: Any
    rows: Any
    page_table: Any
    targets: Any
    wanted: Any
    logprobs: Any
    max_step_tokens: int
    max_rows: int
    page_tokens: int
    kv_pages: int

    def step(self, n_tokens: int, n_rows: int) -> None: ...
    def score(self, first: int, count: int) -> None: ...
    def logits(self, row: int) -> memoryview[float]: ...


def pages_needed(prompts: Iterable[Sequence[int]], page_tokens: int) -> int:
    """Returns how many kv pages the longest of the prompts takes."""
    return -(-max(map(len, prompts)) // page_tokens)


def score_prompt(replay: Scorer, tokens: Sequence[int], look: Look) -> Positions:
    """Replays a prompt alone and returns its results at every position; `look` sees each row.

    Tokens run in chunks of at most `max_rows`, since every position's row is wanted; chunking changes no result. The pages
    that the prompt needs are overwritten. Raises CoreError where logits are NaN or give no token.
    """
    for page in range(pages_needed([tokens], replay.page_tokens)):
        replay.page_table[page] = page
    found = Positions(ids=[], logprobs=[], scores=[], ranks=[], hashes=[])
    chunk = min(replay.max_rows, replay.max_step_tokens)
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        following = [*tokens[begin + 1 : begin + 1 + len(part)], 0]  # nothing follows the last: any target will do
        for i, token in enumerate(part):
            replay.tokens[i], replay.positions[i], replay.slots[i], replay.rows[i] = token, begin + i, 0, i
            replay.targets[i], replay.wanted[i] = following[i], TOP
        replay.step(len(part), len(part))
        replay.score(0, len(part))
        for i in range(len(part)):
            row, logits = replay.logprobs[i], replay.logits(i)
            found.ids.append(row.ids[: row.count])
            found.logprobs.append(row.values[: row.count])
            found.hashes.append(hashlib.sha256(logits).hexdigest()[:32])
            if begin + i + 1 < len(tokens):
                found.scores.append(row.chosen)
                found.ranks.append(row.rank)
            look(logits, row)
    return found


def check_oracle(replay: Scorer, oracle: Oracle, isa: str, allowed: Tolerance) -> str:
    """Replays the oracle on a replay compiled for `isa`; returns the finding.

    The reference's answers must be met within `allowed`, those of the same library, where the oracle has them, to the bit.
    Raises CoreError where they are not.
    """
    positions = compared = other_bits = other_scores = 0
    error = 0.0
    for index, prompt in enumerate(oracle.prompts):
        found, at = _answer(replay, prompt)
        deviation = top_deviation(prompt.reference, found, at)
        positions, error = positions + len(prompt.tokens), max(error, deviation.max_logprob_error)
        problem = excess(deviation, allowed)
        problem = problem or wrong_score(prompt.reference, found, allowed)
        if problem is not None:
            raise CoreError(
                f"oracle: answers to prompt {index} on {isa} are out of tolerance: {problem}; export the core again"
            )
        stored = prompt.compiled.get(isa)
        if stored is not None:
            compared += len(prompt.tokens)
            other_bits += sum(a != b for a, b in zip(found.hashes, stored.hashes, strict=True))
            other_scores += differing(found, stored)
    if other_bits:
        raise CoreError(
            f"oracle: on {isa} {other_bits} of {compared} positions differ in their bits; export the core again"
        )
    if other_scores:
        raise CoreError(
            f"oracle: on {isa} {other_scores} of {compared} positions are scored differently; export the core again"
        )
    met = f"{compared} positions equal to the bit" if compared else f"{positions} positions within tolerance"
    beside = "" if compared else " (not run at export)"
    return f"{met}{beside}, log probabilities {error:.2g} at most from the reference's"


def check_core(core: Core, target: CpuTarget | CudaTarget, replay: Scorer, architecture: str) -> str:
    """Checks a core's oracle on a replay of its `target`, compiled for `architecture`, and returns what was found. The replay
    serves nothing yet: keys and values in its pool are overwritten.

    Raises CoreError where an answer is wrong, SettingError where the pool cannot hold the prompts.
    """
    oracle = read_oracle(core)
    pages = pages_needed([prompt.tokens for prompt in oracle.prompts], replay.page_tokens)
    if pages > replay.kv_pages:
        raise SettingError(
            "kv_memory",
            f"{replay.kv_pages} pages are too few for the check of the core, which takes {pages}; ask for "
            f"{pages * target.kv_page_bytes} bytes, or leave --check out",
        )
    return f"{architecture} {check_oracle(replay, oracle, architecture, tolerance(target.formats))}"


def differing(found: Positions, stored: Positions) -> int:
    """Returns at how many positions the likeliest tokens, or the score or rank of the one that follows, differ."""
    pairs = zip(
        zip(found.ids, found.logprobs, [*found.scores, 0.0], [*found.ranks, 0], strict=True),
        zip(stored.ids, stored.logprobs, [*stored.scores, 0.0], [*stored.ranks, 0], strict=True),
        strict=True,
    )
    return sum(a != b for a, b in pairs)


def _answer(replay: Scorer, prompt: Prompt) -> tuple[Positions, list[list[float]]]:
    """Replays a prompt; returns its results, and the log probabilities of the reference's likeliest tokens."""
    at: list[list[float]] = []

    def look(logits: memoryview[float], row: Any) -> None:
        shift = row.values[0] - logits[row.ids[0]]  # of the likeliest, whose log probability is rounded the least
        at.append([logits[token] + shift for token in prompt.reference.ids[len(at)]])

    return score_prompt(replay, prompt.tokens, look), at
