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

    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """One ragged step: (slot, next tokens) in the order given; returns each part's logits at all its tokens."""
        replay, count = self.replay, 0
        for slot, tokens in parts:
            for token in tokens:
                replay.tokens[count] = token
                replay.positions[count] = self.computed[slot]
                replay.slots[count] = slot
                replay.rows[count] = count
                self.computed[slot] += 1
                count += 1
        assert count <= replay.max_rows, "tests look at every row"
        replay.step(count, count)
        results, row = [], 0
        for _, tokens in parts:
            results.append(np.stack([np.array(replay.logits(row + i), dtype=np.float32) for i in range(len(tokens))]))
            row += len(tokens)
        return results


def scattered_pages(replay: CpuReplay, slots: int, per_slot: int, seed: int = 1) -> list[list[int]]:
    """Pages for each slot in an order that has nothing to do with positions."""
    order = np.random.default_rng(seed).permutation(replay.kv_pages)[: slots * per_slot]
    return order.reshape(slots, per_slot).tolist()
