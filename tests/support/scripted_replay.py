"""A replay without a core: the interface of flare's CpuReplay over a "model" that remembers through simulated pages.

The K/V cell of a token is a hash of the token, its position and every earlier cell of its slot *as read back through
the page table*; logits are a function of the cells. A wrong page, position, chunk border, stale page or page shared by
mistake therefore shows as a wrong token, and `ScriptedModel` says what the right one is from the plain sequence alone.

For server tests: `script` fixes the replies, `pause`/`allow`/`resume` stop the engine at a step without sleeping, and
`fail_next_step`, `fail_next_sample` and `die` inject failures.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from math import exp, inf, isnan, log
from zlib import crc32

from flare.core.manifest import Limits
from flare.errors import CoreError, ReplayDead
from flare.replay.step_arrays import ReplayLimits, StepArrays
from tests.support.reference_sampler import Draw, reference_sample

Script = Callable[[tuple[int, ...], int], Sequence[int] | None]
"""(prompt, choice) -> the reply's tokens, or None for the hash model, which also goes on after a reply's last token. The
runtime counts choices in the seed: a small one stands for the choice."""


RowLogits = Callable[[tuple[int, ...]], Sequence[float] | None]
"""The tokens so far -> the logits of the next one, or None for the hash model's."""


class ReplayRefused(ValueError):
    """Arguments that the C border would refuse; the text names argument, value and limit."""


def scripted(replies: Mapping[tuple[int, ...], Sequence[int]], otherwise: Sequence[int] | None = None) -> Script:
    """A script from a table of prompts; `otherwise` answers every prompt that the table lacks."""
    return lambda prompt, choice: replies.get(prompt, otherwise)


class ScriptedModel:
    """The model as a pure function of a sequence: no pages, no slots, no steps."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def extend(self, cells: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The cells of `tokens` that follow a prefix whose cells are given."""
        running = crc32(array("Q", cells).tobytes())
        added = []
        for position, token in enumerate(tokens, len(cells)):
            cell = crc32(array("Q", (token, position)).tobytes(), running)
            running = crc32(array("Q", (cell,)).tobytes(), running)
            added.append(cell)
        return added

    def logits(self, cells: Sequence[int]) -> list[float]:
        """Logits after a sequence: noise in [0, 4) and one peak of 6, so greedy picks the peak and draws vary."""
        state = crc32(array("Q", cells).tobytes()) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        peak = (state >> 21) % self.vocabulary
        row = []
        for _ in range(self.vocabulary):
            state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
            row.append((state >> 48) / 16384.0)
        row[peak] = 6.0
        return row

    def peak(self, cells: Sequence[int]) -> int:
        """The greedy token, without making the logits."""
        state = crc32(array("Q", cells).tobytes()) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        return (state >> 21) % self.vocabulary

    def choose(self, cells: Sequence[int], params: Draw, history: Sequence[int]) -> int:
        """The token that follows a sequence under the sampling parameters."""
        if params.temperature <= 0 and params.repetition == 1 and params.presence == 0 and params.frequency == 0:
            return self.peak(cells)
        return reference_sample(self.logits(cells), params, history)


class ScriptedReplay(StepArrays):
    """Limits and arrays as in CpuReplay. `steps` and `processed` count what ran; `refusals` keeps the text of every
    refused call, so a test sees a refusal that an engine turned into a failed request."""

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        max_context: int = 256,
        slots: int = 4,
        max_step_tokens: int = 32,
        max_rows: int | None = None,
        page_tokens: int = 16,
        kv_pages: int = 64,
        script: Script | None = None,
        logits: RowLogits | None = None,
    ) -> None:
        limits = Limits(
            max_context=max_context,
            slots=slots,
            max_step_tokens=max_step_tokens,
            max_rows=slots if max_rows is None else max_rows,
            page_tokens=page_tokens,
        )
        super().__init__(ReplayLimits.of(limits, vocabulary, kv_pages, 8 * page_tokens))

        self.model = ScriptedModel(vocabulary)
        self.script = script
        self.row_logits = logits
        self.steps = 0
        self.processed = 0
        self.refusals: list[str] = []
        self.on_step: Callable[[int, int], None] | None = None
        self._cells = [[0xDEAD] * page_tokens for _ in range(kv_pages)]
        self._ids = [[0] * page_tokens for _ in range(kv_pages)]
        self._row_cells: list[list[int]] = []
        self._row_ids: list[list[int]] = []
        self._dead = ""
        self._step_error: Exception | None = None
        self._sample_error: Exception | None = None
        self._rows_without_token: tuple[int, ...] = ()
        self._gate = threading.Condition()
        self._paused = False
        self._permits = 0
        self._arrivals = 0

    # What tests do to it, from any thread

    def pause(self) -> None:
        """Later steps wait, each for one permit of `allow`, until `resume`."""
        with self._gate:
            self._paused, self._permits, self._arrivals = True, 0, 0

    def allow(self, steps: int = 1) -> None:
        """Lets this many steps pass while paused."""
        with self._gate:
            self._permits += steps
            self._gate.notify_all()

    def resume(self) -> None:
        """Ends the pause and lets a waiting step go on."""
        with self._gate:
            self._paused = False
            self._gate.notify_all()

    def wait_until_held(self, timeout: float = 10.0) -> None:
        """Returns when one more step has come to the pause. Raises AssertionError after `timeout` seconds."""
        with self._gate:
            if not self._gate.wait_for(lambda: self._arrivals > 0, timeout):
                raise AssertionError(f"no step came to the pause within {timeout} s")
            self._arrivals -= 1

    def fail_next_step(self, error: Exception) -> None:
        self._step_error = error

    def fail_next_sample(self, error: Exception) -> None:
        self._sample_error = error

    def fail_rows(self, *rows: int) -> None:
        """The next draw gives these rows no token, as NaN logits do."""
        self._rows_without_token = rows

    def die(self, reason: str = "the device is gone") -> None:
        self._dead = reason

    # The interface of CpuReplay

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Runs `n_tokens` tokens and makes the logits of `n_rows` rows. Raises ReplayRefused before any effect."""
        with self._gate:
            if self._paused:
                self._arrivals += 1
                self._gate.notify_all()
                self._gate.wait_for(lambda: self._permits > 0 or not self._paused)
                self._permits -= self._paused
        if self._dead:
            raise ReplayDead(self._dead)
        if self.on_step is not None:
            self.on_step(n_tokens, n_rows)
        error, self._step_error = self._step_error, None
        if error is not None:
            raise error
        try:
            runs = self._checked_runs(n_tokens, n_rows)
        except ReplayRefused as refused:
            self.refusals.append(str(refused))
            raise
        if meanwhile is not None:
            meanwhile()
        after: dict[int, tuple[int, int]] = {}
        for first, end in runs:
            slot, start = self.slots[first], self.positions[first]
            tokens = self.tokens[first:end]
            added = self.model.extend(self._read(self._cells, slot, start), tokens)
            for position, (token, cell) in enumerate(zip(tokens, added, strict=True), start):
                page = self.page_table[slot * self.limits.page_stride + position // self.limits.page_tokens]
                self._cells[page][position % self.limits.page_tokens] = cell
                self._ids[page][position % self.limits.page_tokens] = token
            for index in range(first, end):
                after[index] = (slot, self.positions[index] + 1)
        rows = [after[self.rows[row]] for row in range(n_rows)]
        self._row_cells = [self._read(self._cells, slot, length) for slot, length in rows]
        self._row_ids = [self._read(self._ids, slot, length) for slot, length in rows]
        self.steps += 1
        self.processed += n_tokens

    def sample(self, n_rows: int) -> None:
        """Chooses `sampled[row]` for the first `n_rows` rows of the last step."""
        if self._dead:
            raise ReplayDead(self._dead)
        error, self._sample_error = self._sample_error, None
        if error is not None:
            raise error
        if not 1 <= n_rows <= len(self._row_cells):
            self._refuse(f"sample: {n_rows} rows asked, the last step made {len(self._row_cells)}")
        for row in range(n_rows):
            self.sampled[row] = self._choose(row)
            params = self.sampling[row]
            if params.alternatives >= 0:
                explicit = list(params.explicit_ids[: params.explicit]) if params.explicit else []
                self._write_logprobs(row, self.sampled[row], params.alternatives, explicit)
        failed, self._rows_without_token = self._rows_without_token, ()
        for row in failed:
            self.sampled[row] = -1
        if failed:
            raise CoreError(f"rows {failed} have no token: their logits are NaN")

    def score(self, first: int, count: int) -> None:
        """Scores rows of the last step against `targets`."""
        if self._dead:
            raise ReplayDead(self._dead)
        if first < 0 or count < 1 or first + count > len(self._row_cells):
            self._refuse(f"score: rows {first} to {first + count}, the last step made {len(self._row_cells)}")
        for row in range(first, first + count):
            if not 0 <= self.targets[row] < self.limits.vocabulary or not 0 <= self.wanted[row] <= 20:
                self._refuse(f"score: row {row} has target {self.targets[row]} and {self.wanted[row]} alternatives")
            self._write_logprobs(row, self.targets[row], self.wanted[row], [])
        failed = [row for row in range(first, first + count) if self.logprobs[row].rank < 1]
        if failed:
            raise CoreError(f"rows {failed} have no scores: their logits are NaN")

    def logits(self, row: int) -> memoryview:
        """f32 [vocabulary] of one row of the last step. Scripts change the choice, not the logits."""
        values = (c_float * self.limits.vocabulary)(*self._logits(row))
        return memoryview(values).cast("B").cast("f")

    def close(self) -> None:
        self._dead = "the replay is closed"

    # Inside

    def _choose(self, row: int) -> int:
        params = self.sampling[row]
        if params.position != len(self._row_ids[row]):
            self._refuse(f"sample: row {row} has position {params.position}, its sequence {len(self._row_ids[row])}")
        if params.history_len != params.position or params.prompt_len > params.history_len:
            self._refuse(f"sample: row {row} has prompt {params.prompt_len} in a history of {params.history_len}")
        history = self._row_ids[row]
        if params.repetition != 1 or params.presence != 0 or params.frequency != 0:
            if not params.history or params.history[: params.history_len] != history:
                self._refuse(f"sample: row {row} has a history that differs from its sequence")
        mask = params.mask
        forbidden = [t for t in range(self.limits.vocabulary) if not mask[t // 32] >> t % 32 & 1] if mask else []
        if self.script is not None:
            prompt, reply = self._row_ids[row][: params.prompt_len], self._row_ids[row][params.prompt_len :]
            words = self.script(tuple(prompt), params.choice or (params.seed if params.seed < 2**16 else 0))
            if words is not None and len(reply) < len(words) and reply == list(words[: len(reply)]):
                if words[len(reply)] not in forbidden:
                    return words[len(reply)]
        if not forbidden and self.row_logits is None:
            return self.model.choose(self._row_cells[row], params, history)
        logits = list(self._logits(row))
        for token in forbidden:
            logits[token] = -inf
        return -1 if max(logits) == -inf else reference_sample(logits, params, history)

    def _logits(self, row: int) -> Sequence[float]:
        given = None if self.row_logits is None else self.row_logits(tuple(self._row_ids[row]))
        return self.model.logits(self._row_cells[row]) if given is None else given

    def _write_logprobs(self, row: int, token: int, alternatives: int, explicit: Sequence[int]) -> None:
        out = self.logprobs[row]
        logits = [c_float(value).value for value in self._logits(row)]
        if any(map(isnan, logits)) or max(logits) == -inf:
            out.rank = 0
            return
        top = max(logits)
        total = top + log(sum(exp(value - top) for value in logits))
        values = [c_float(value - total).value for value in logits]
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))[:alternatives]
        out.chosen = values[token] if token >= 0 else 0.0
        out.rank = 1 + sum(value > values[token] for value in values)
        out.count = len(order)
        out.ids[: len(order)] = order
        out.values[: len(order)] = [values[token] for token in order]
        out.explicit[: len(explicit)] = [values[token] for token in explicit]

    def _read(self, pages: list[list[int]], slot: int, length: int) -> list[int]:
        """The first `length` values of a slot, through its page table."""
        values: list[int] = []
        entry = slot * self.limits.page_stride
        while len(values) < length:
            values += pages[self.page_table[entry]]
            entry += 1
        return values[:length]

    def _refuse(self, text: str) -> None:
        self.refusals.append(text)
        raise ReplayRefused(text)

    def _checked_runs(self, n_tokens: int, n_rows: int) -> list[tuple[int, int]]:
        """The (first, end) token range of each slot's run, after the checks of the C border."""
        limits = self.limits
        if not 1 <= n_tokens <= limits.max_step_tokens:
            raise ReplayRefused(f"step: {n_tokens} tokens, the limit is 1 to {limits.max_step_tokens}")
        if not 0 <= n_rows <= limits.max_rows:
            raise ReplayRefused(f"step: {n_rows} rows, the limit is 0 to {limits.max_rows}")
        for row in range(n_rows):
            if not 0 <= self.rows[row] < n_tokens:
                raise ReplayRefused(f"step: row {row} is token {self.rows[row]} of {n_tokens}")
        runs: list[tuple[int, int]] = []
        seen: set[int] = set()
        for index in range(n_tokens):
            token, position, slot = self.tokens[index], self.positions[index], self.slots[index]
            if not 0 <= token < limits.vocabulary:
                raise ReplayRefused(f"step: token {index} is {token}, the vocabulary has {limits.vocabulary}")
            if not 0 <= position < limits.max_context:
                raise ReplayRefused(f"step: token {index} has position {position}, the context {limits.max_context}")
            if not 0 <= slot < limits.slots:
                raise ReplayRefused(f"step: token {index} has slot {slot} of {limits.slots}")
            if index and slot == self.slots[index - 1]:
                if position != self.positions[index - 1] + 1:
                    raise ReplayRefused(f"step: slot {slot} goes from {self.positions[index - 1]} to {position}")
                runs[-1] = (runs[-1][0], index + 1)
            elif slot in seen:
                raise ReplayRefused(f"step: the tokens of slot {slot} are not contiguous")
            else:
                seen.add(slot)
                runs.append((index, index + 1))
        for _, end in runs:
            slot = self.slots[end - 1]
            for entry in range(self.positions[end - 1] // limits.page_tokens + 1):
                page = self.page_table[slot * limits.page_stride + entry]
                if not 0 <= page < limits.kv_pages:
                    raise ReplayRefused(f"step: slot {slot} has page {page} of {limits.kv_pages}")
        return runs
