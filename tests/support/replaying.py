"""Drives a replay by hand: sequences on slots and pages of the test's choosing, in chunks of the test's choosing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flare.replay.cpu import CpuReplay


class Sequences:
    """Sequences on a replay's slots. `pages[slot]` are the page numbers that a slot uses, in order."""

    def __init__(self, replay: CpuReplay, pages: Sequence[Sequence[int]]) -> None:
        self.replay = replay
        self.computed = [0] * len(pages)
        for slot, numbers in enumerate(pages):
            for index, page in enumerate(numbers):
                replay.page_table[slot * replay.page_stride + index] = page

    def step(
        self, parts: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """One ragged step: (slot, next tokens) in the order given; returns each part's logits [rows, vocabulary].

        Rows are those of `wanted[part]`, indices into the part's tokens; by default of all its tokens.
        """
        replay, count, row = self.replay, 0, 0
        picked = [range(len(tokens)) for _, tokens in parts] if wanted is None else wanted
        for (slot, tokens), indices in zip(parts, picked, strict=True):
            for index in indices:
                replay.rows[row] = count + index
                row += 1
            for token in tokens:
                replay.tokens[count] = token
                replay.positions[count] = self.computed[slot]
                replay.slots[count] = slot
                self.computed[slot] += 1
                count += 1
        replay.step(count, row)
        results, row = [], 0
        for indices in picked:
            found = [np.array(replay.logits(row + i), dtype=np.float32) for i in range(len(indices))]
            results.append(np.stack(found) if found else np.empty((0, replay.vocabulary), np.float32))
            row += len(indices)
        return results


def scattered_pages(replay: CpuReplay, slots: int, per_slot: int, seed: int = 1) -> list[list[int]]:
    """Pages for each slot in an order that has nothing to do with positions."""
    order = np.random.default_rng(seed).permutation(replay.kv_pages)[: slots * per_slot]
    return order.reshape(slots, per_slot).tolist()
