"""A replay whose replies are a script and nothing else: no pages, no hashes, so that the rest of a server is what takes time.

`ScriptedReplay` beside it checks every argument of a step; this one trusts the engine, and takes about a microsecond a
token. It drives servers for real clients (whose prompts have tens of thousands of tokens) and for measurements. Asked for log
probabilities, it says that all tokens are equally likely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from math import exp, log
from typing import Any
from zlib import crc32

from flare.core.manifest import Limits
from flare.errors import ReplayDead
from flare.replay.step_arrays import ReplayLimits, StepArrays

Reply = Callable[[list[int], int], Sequence[int]]
"""(prompt, choice) -> the reply's tokens; behind its end its last token is repeated."""

SCORED_ROWS = 64
"""Rows of a step beyond those that are drawn from."""


class FastReplay(StepArrays):
    """The interface of CpuReplay. `before_step` is called on the engine's thread and may wait or raise."""

    def __init__(
        self,
        reply: Reply,
        *,
        vocabulary: int,
        max_context: int = 1 << 20,
        slots: int = 8,
        max_step_tokens: int = 8192,
        page_tokens: int = 256,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        limits = Limits(
            max_context=max_context,
            slots=slots,
            max_step_tokens=max_step_tokens,
            max_rows=slots + SCORED_ROWS,
            page_tokens=page_tokens,
        )
        pages = slots * -(-max_context // page_tokens)
        super().__init__(ReplayLimits.of(limits, vocabulary, pages, 8 * page_tokens))
        self._logprob = c_float(-log(vocabulary)).value
        self._reply = reply
        self._before_step = before_step
        self._prompts: list[list[int]] = [[] for _ in range(limits.slots)]
        self._replies: list[Sequence[int]] = [()] * limits.slots
        self._closed = False

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Keeps the prompts' tokens. Raises ReplayDead after `close`, and what `before_step` raises."""
        if self._closed:
            raise ReplayDead("the replay is closed")
        self._before_step()
        if meanwhile is not None:
            meanwhile()
        tokens, positions, slots = self.tokens[:n_tokens], self.positions[:n_tokens], self.slots[:n_tokens]
        first = 0
        while first < n_tokens:
            slot, position = slots[first], positions[first]
            end = first + 1
            while end < n_tokens and slots[end] == slot:
                end += 1
            known = self._prompts[slot]
            if position == 0:
                known.clear()
                self._replies[slot] = ()
            if position == len(known) and not self._replies[slot]:
                known += tokens[first:end]
            first = end
        self._row_slots = [slots[row] for row in self.rows[:n_rows]]

    def sample(self, n_rows: int) -> None:
        """Gives every row the next token of its reply."""
        for row in range(n_rows):
            slot, params = self._row_slots[row], self.sampling[row]
            if not self._replies[slot]:
                self._replies[slot] = self._reply(self._prompts[slot][: params.prompt_len], params.choice)
            reply = self._replies[slot]
            token = reply[min(params.position - params.prompt_len, len(reply) - 1)]
            self.sampled[row] = self._masked(params.mask, token, reply[-1]) if params.mask else token
            if params.alternatives >= 0:
                self._rate(row, params.alternatives)
            if params.alternatives >= 0 and params.explicit:
                self._spread(row, self._prompts[slot][: params.prompt_len], params.explicit_ids[: params.explicit])

    def score(self, first: int, count: int) -> None:
        """Scores rows of the last step."""
        for row in range(first, first + count):
            self._rate(row, self.wanted[row])

    def _rate(self, row: int, alternatives: int) -> None:
        out = self.logprobs[row]
        out.chosen, out.rank, out.count = self._logprob, 1, min(alternatives, self.limits.vocabulary)
        out.ids[: out.count] = range(out.count)
        out.values[: out.count] = [self._logprob] * out.count

    def _spread(self, row: int, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Spreads nine tenths of the probability over the tokens that are asked for, by a hash of each and of the prompt."""
        seed = crc32(repr(prompt).encode())
        weights = [exp(crc32(repr(id).encode(), seed) % 4000 / 1000) for id in ids]
        out, total = self.logprobs[row], sum(weights)
        out.chosen, out.rank, out.count = log(0.05), 2, 0
        out.explicit[: len(ids)] = [log(0.9 * weight / total) for weight in weights]

    def _masked(self, mask: Any, token: int, end: int) -> int:
        """The scripted token where it may come; else one that leads to the end of JSON, or the first that may."""
        for wanted in (token, end, *b'"}]{'):
            if mask[wanted // 32] >> wanted % 32 & 1:
                return wanted
        return next(i for i in range(self.limits.vocabulary) if mask[i // 32] >> i % 32 & 1)

    def close(self) -> None:
        self._closed = True
