"""A planned step in a replay's arrays: tokens and pages, the rows that are wanted, how each is drawn from or scored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import POINTER, addressof, c_int32, c_uint32, cast
from time import monotonic
from typing import Any, NamedTuple

from flare.engine.interface import Replay
from flare.engine.request import Request
from flare.engine.sampling import History
from flare.engine.scheduler import Chunk


class Scored(NamedTuple):
    """Rows `first` and up that score the prompt of a request: the tokens that follow its positions `start` to `end`,
    `end` excluded."""

    request: Request
    first: int
    start: int
    end: int


class Filled(NamedTuple):
    """A step in the arrays: its tokens, the requests that draw from the first rows in their order, what the rows after those
    score, and whether a grammar bounds any draw."""

    tokens: int
    sampled: list[Request]
    scored: list[Scored]
    rows: int
    constrained: bool


class StepArrays:
    """Writes the arrays of one replay. The engine thread's alone."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.row_type = replay.sampling._type_
        self.words = -(-replay.limits.vocabulary // 32)
        self.masked = 0
        """Masks written since the start."""
        self.mask_seconds = 0.0
        self._prompt: list[int] | None = None  # the last one that was copied, with its copy
        self._prompt_ids = array("i")
        self._masks: Any = None  # uint32 [max_rows][words], made when a grammar first needs it
        self._mask_rows: list[Any] = []
        self._unmasked: dict[int, Exception] = {}  # what was raised for whose mask, by the request's id

    def admit(self, request: Request) -> None:
        """Writes what stays the same for all of a request's draws into its row."""
        row = request.row = self.row_type()
        request.sampling.write(row, request.choice, len(request.prompt))
        if request.sampling.penalised:
            request.history = History(self._ids_of(request.prompt))
            row.history = request.history.array
        row.alternatives = -1
        if request.logprobs is not None:
            row.alternatives = request.logprobs.alternatives
            if ids := request.logprobs.ids:
                row.explicit_ids = (c_int32 * len(ids))(*ids)  # the structure keeps the array alive
                row.explicit = len(ids)
                row.alternatives = 0  # the ids take their place

    def _ids_of(self, prompt: list[int]) -> array[int]:
        """Returns a prompt's tokens, the same array for the choices of one, which come one after the other."""
        if prompt is not self._prompt:
            self._prompt, self._prompt_ids = prompt, array("i", prompt)
        return self._prompt_ids

    def fill(self, chunks: list[Chunk]) -> Filled:
        """Writes a step, but for how its rows are drawn from."""
        replay = self.replay
        tokens, positions, slots, rows = replay.tokens, replay.positions, replay.slots, replay.rows
        sampled: list[Request] = []
        constrained = False
        scoring: list[tuple[Request, int, int, int]] = []
        end = 0
        for request, count, wants_row in chunks:
            start = request.computed
            if request.mapped != len(request.pages):
                self._map(request)
            if request.score is not None and request.scored < len(request.prompt) - 1:
                scoring.append((request, start, count, end))
            if count == 1:
                tokens[end] = request.tokens[start]
                positions[end] = start
                slots[end] = request.slot
                end += 1
            else:
                after = end + count
                tokens[end:after] = request.tokens[start : start + count]
                positions[end:after] = list(range(start, start + count))
                slots[end:after] = [request.slot] * count
                end = after
            if wants_row:
                rows[len(sampled)] = end - 1
                sampled.append(request)
                constrained |= request.grammar is not None
        if not scoring:
            return Filled(end, sampled, [], len(sampled), constrained)
        scored, row = [], len(sampled)
        for request, start, count, place in scoring:
            first, last = request.unscored(start, count)
            scored.append(Scored(request, row, first, last))
            assert request.score is not None
            for position in range(first, last):
                rows[row] = place + position - start
                replay.targets[row] = request.prompt[position + 1]
                replay.wanted[row] = request.score
                row += 1
        return Filled(end, sampled, scored, row, constrained)

    def mask(self, sampled: Sequence[Request]) -> None:
        """Writes the masks of those of `sampled` that have a grammar. They depend on tokens that came before the step alone, so
        this may run beside it; what it raises comes out of `draw`."""
        for index, request in enumerate(sampled):
            if request.grammar is not None:
                try:
                    request.row.mask = self._mask(request.grammar, index)
                except Exception as error:
                    self._unmasked[request.id] = error
                    request.row.mask = None

    def draw(self, sampled: Sequence[Request]) -> dict[int, Exception]:
        """Writes how the rows of `sampled` are drawn from; returns what was raised for whose mask, by the request's id."""
        sampling = self.replay.sampling
        for index, request in enumerate(sampled):
            row = request.row
            row.position = row.history_len = len(request.tokens)
            sampling[index] = row
        failed, self._unmasked = self._unmasked, {}
        return failed

    def allows(self, index: int, token: int) -> bool:
        """Whether the row's mask lets a token come."""
        if not self.replay.sampling[index].mask:
            return True
        return bool(self._masks[index * self.words + token // 32] >> token % 32 & 1)

    def _map(self, request: Request) -> None:
        """Shows the pages that a request got since in its row of the page table."""
        if not request.admitted_at:
            request.admitted_at = monotonic()
        entry = request.slot * self.replay.limits.page_stride
        self.replay.page_table[entry + request.mapped : entry + len(request.pages)] = request.pages[request.mapped :]
        request.mapped = len(request.pages)

    def _mask(self, grammar: Any, index: int) -> Any:
        """Returns the pointer to the row's mask, None where every token may come."""
        if self._masks is None:
            rows = self.replay.limits.max_rows
            self._masks = (c_uint32 * (rows * self.words))()
            start, stride = addressof(self._masks), 4 * self.words
            self._mask_rows = [cast(start + row * stride, POINTER(c_uint32)) for row in range(rows)]
        begun = monotonic()
        written = grammar.fill(addressof(self._masks) + 4 * self.words * index, self.words)
        self.mask_seconds += monotonic() - begun
        self.masked += written
        return self._mask_rows[index] if written else None
