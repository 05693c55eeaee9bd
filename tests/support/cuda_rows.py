"""The cuda target's sample and score graphs in Triton's interpreter, on the rows of a core without a model (logit_rows.py).

A test writes logits, parameters and targets to an open cpu core; here the same bytes are laid out for a device, and what the
graphs leave is compared with what the core's own native library gives, or with a definition.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch

from flare.replay.cpu import CpuReplay
from flare.replay.cpu_interface import RowLogprobs, SampleParams
from ignition.targets.cuda.launch import BYTES, Element, Launch, Pointer
from ignition.targets.cuda.sample_graph import sample_launches, sample_scratch, score_launches, score_scratch
from tests.support.triton_interpreter import run

DTYPES: Mapping[Element, torch.dtype] = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
CONTEXT = 160
GUARD = 64  # bytes around an array that nobody may write
FILLING = 0x5B  # what memory holds before: as i32 a large number, as f32 6e16, in every byte


class Memory:
    """Arrays by name, filled with rubbish, with guarded surroundings."""

    def __init__(self, sizes: Mapping[str, tuple[Element, int]]) -> None:
        self.pointers: dict[str, Pointer] = {}
        self._blocks = {}
        for name, (element, count) in sizes.items():
            used = count * BYTES[element]
            block = torch.full((used + 2 * GUARD,), FILLING, dtype=torch.uint8)
            self._blocks[name] = block
            self.pointers[name] = Pointer(element, block[GUARD : GUARD + used].view(DTYPES[element]))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.pointers[name].operand

    def untouched(self, name: str) -> bool:
        """Whether nobody wrote to an array."""
        return bool((self._blocks[name] == FILLING).all())

    def check(self) -> None:
        """Raises AssertionError when something was written around an array."""
        for name, block in self._blocks.items():
            assert (block[:GUARD] == FILLING).all() and (block[-GUARD:] == FILLING).all(), f"{name}: written around"


class CudaRows:
    """The memory of both graphs for the first `rows` rows of a core's logits, as many as it has by default."""

    def __init__(self, replay: CpuReplay, rows: int = 0, *, chunk: int = 256, capacity: int = 64) -> None:
        self.replay = replay
        self.rows = rows or len(replay.sampling)
        self.all_rows = len(replay.sampling)
        self.sizes = {"vocabulary": replay.vocabulary, "chunk": chunk}
        self.capacity = capacity
        self.memory = Memory({})

    def sample(self) -> list[int]:
        """Draws from the rows; returns `sampled`."""
        self.lay_out()
        return self.draw_again()

    def draw_again(self) -> list[int]:
        """Draws from what memory holds."""
        sizes = self.sizes | {"max_context": CONTEXT, "capacity": self.capacity}
        self._run(sample_launches(self.memory.pointers, rows=self.rows, **sizes))
        return self.memory["sampled"].tolist()

    def lay_out(self) -> None:
        """Fills new memory of a sample graph with what the core's rows hold."""
        replay, rows, words = self.replay, self.rows, -(-self.replay.vocabulary // 32)
        self.memory = memory = Memory(
            sample_scratch(rows, **self.sizes, capacity=self.capacity)
            | {
                "logits": ("f32", rows * replay.vocabulary),
                "params": ("i32", rows * (ctypes.sizeof(SampleParams) // 4)),
                "history": ("i32", rows * CONTEXT),
                "masks": ("i32", rows * words),
                "explicit_ids": ("i32", rows * 128),
                "sampled": ("i32", rows),
                "logprobs": ("i32", rows * (ctypes.sizeof(RowLogprobs) // 4)),
            }
        )
        self._put_logits()
        memory["params"][:] = ints(bytes(replay.sampling)[: memory["params"].nbytes])
        for row in range(rows):
            params = replay.sampling[row]
            for name, count, source in [
                ("history", params.history_len, params.history),
                ("masks", words if params.mask else 0, params.mask),
                ("explicit_ids", params.explicit if params.alternatives >= 0 else 0, params.explicit_ids),
            ]:
                if count:
                    memory[name].view(rows, -1)[row, :count] = ints(ctypes.string_at(source, 4 * count))

    def score(self, first: int, count: int) -> None:
        """Scores `count` rows from `first` on, in a graph of `rows` rows."""
        replay = self.replay
        self.memory = memory = Memory(
            score_scratch(self.rows, **self.sizes)
            | {
                "logits": ("f32", self.all_rows * replay.vocabulary),
                "first": ("i32", 1),
                "targets": ("i32", self.all_rows),
                "wanted": ("i32", self.all_rows),
                "sampled": ("i32", self.all_rows),
                "logprobs": ("i32", self.all_rows * (ctypes.sizeof(RowLogprobs) // 4)),
            }
        )
        self._put_logits()
        memory["first"][0] = first
        memory["targets"][:] = torch.tensor(list(replay.targets))
        memory["wanted"][:] = -1
        memory["wanted"][first : first + count] = torch.tensor(list(replay.wanted)[first : first + count])
        self._run(score_launches(memory.pointers, rows=self.rows, all_rows=self.all_rows, **self.sizes))

    def entry(self, row: int) -> RowLogprobs:
        """A row's log probabilities."""
        return RowLogprobs.from_buffer_copy(self.entry_bytes(row))

    def entry_bytes(self, row: int) -> bytes:
        """The same as it lies in memory."""
        size = ctypes.sizeof(RowLogprobs)
        return self.memory["logprobs"].numpy().tobytes()[row * size : (row + 1) * size]

    def _run(self, launches: list[Launch]) -> None:
        with np.errstate(all="ignore"):  # a device does not tell of infinities either
            for launch in launches:
                run(launch)
        self.memory.check()

    def _put_logits(self) -> None:
        logits = self.memory["logits"].view(-1, self.replay.vocabulary)
        for row in range(len(logits)):
            logits[row] = torch.frombuffer(bytearray(self.replay.logits(row)), dtype=torch.float32)


def ints(data: bytes) -> torch.Tensor:
    """int32 of bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.int32)


def fill_entries(replay: CpuReplay) -> None:
    """Makes the core's log probabilities hold the rubbish that the graphs' memory holds, so that all bytes can be compared."""
    ctypes.memset(replay.logprobs, FILLING, ctypes.sizeof(replay.logprobs))
