"""Which tokens run in the next step, who gets pages, when a reply ends. Plain data: no threads, no arrays, no clock.

The rules, each a method below:

- A step holds the next token of every decoding slot first, then chunks of prompts, oldest request first.
- Requests are admitted in order of arrival, when a slot is free and the pool can hold what is promised to everybody.
- A prompt that is scored needs a row for each token: its chunk has the slot's own row and those that no slot has.
- A slot takes a page when its tokens cross a page border. When none is free, the youngest running request loses its
  pages and goes back to the front of the queue; later its prompt and reply so far are computed again, as a prompt is.
  The youngest itself waits in place for a page.

Why nothing starves: admission is in order of arrival and only the youngest is preempted, so every running request is
older than every waiting one, and the oldest of all runs. It is planned first, everybody else's pages are there for it,
its context fits into the pool alone, and there is budget for at least one of its tokens since there are never more
slots than tokens in a step. So each step brings the oldest one token nearer to its end.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from flare.engine.pages import PageError, PagePool
from flare.engine.request import Request, StopCause


class Chunk(NamedTuple):
    """The next `length` uncomputed tokens of a request, from `request.computed` on. `sampled`: they reach the end of
    what is known, so the last one's logits give the next token."""

    request: Request
    length: int
    sampled: bool


class Scheduler:
    """State between steps. Use: `add`, then repeatedly `plan`, run the step, `commit`, and `accept` for each sampled
    chunk; `remove` at any time between steps.

    `slots`: requests that run at once, at most `max_step_tokens`. `max_rows`: of a step; every slot has one of its own, and
    those beyond are for prompts that are scored. `context`: most tokens of prompt and reply together,
    at most what the pool holds.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_step_tokens: int,
        page_tokens: int,
        pages: int,
        context: int,
        max_rows: int | None = None,
    ) -> None:
        if not 1 <= slots <= max_step_tokens:
            raise ValueError(f"slots is {slots}, it must be from 1 to max_step_tokens ({max_step_tokens})")
        if not 2 <= context <= pages * page_tokens:
            raise ValueError(f"context is {context}, it must be from 2 to the pool's {pages * page_tokens} tokens")
        self.slots = slots
        self.score_rows = 0 if max_rows is None else max(0, max_rows - slots)
        self.max_step_tokens = max_step_tokens
        self.page_tokens = page_tokens
        self.context = context
        self.pool = PagePool(pages)
        self.waiting: deque[Request] = deque()  # in order of arrival, all younger than all that run
        self.running: list[Request] = []  # in order of arrival
        self.free_slots = list(range(slots - 1, -1, -1))
        self.preemptions = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        """Queues a request whose prompt is not empty and shorter than the context."""
        request.tokens = list(request.prompt)
        request.limit, request.limit_cause = self.context, StopCause.CONTEXT_FULL
        if request.only_scores:
            request.tokens.pop()
        if request.max_new_tokens is not None and len(request.prompt) + request.max_new_tokens <= self.context:
            request.limit, request.limit_cause = len(request.prompt) + request.max_new_tokens, StopCause.MAX_TOKENS
        self.waiting.append(request)

    def plan(self) -> list[Chunk]:
        """The next step, at most `max_step_tokens` tokens and one chunk a slot; empty only when idle. Slots and pages
        are taken for it. Call `commit` after the step ran, or `remove` its requests if it failed."""
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        running = self.running
        budget, rows = self.max_step_tokens, self.score_rows
        for request in running:
            if self._decodes(request):
                budget -= 1
        index = 0
        while index < len(running):  # it shrinks at its end when somebody is preempted
            request = running[index]
            index += 1
            if self._decodes(request):
                if request.computed < request.capacity or self._grow(request, 1):
                    decodes.append(Chunk(request, 1, True))
            elif budget > 0:
                chunk = self._prefill(request, budget, rows)
                if chunk.length:
                    budget -= chunk.length
                    rows -= max(0, self._rows(chunk) - 1)
                    prefills.append(chunk)
        while budget > 0 and self._may_admit():
            chunk = self._prefill(self._admit(), budget, rows)
            budget -= chunk.length
            rows -= max(0, self._rows(chunk) - 1)
            prefills.append(chunk)
        return decodes + prefills

    def commit(self, chunks: list[Chunk]) -> None:
        """The step ran: the keys and values of its tokens are in their pages."""
        for request, length, _ in chunks:
            request.computed += length
            if request.score is not None:
                request.scored = max(request.scored, min(request.computed, len(request.prompt) - 1))
            if request.prefilled < len(request.prompt):
                prefilled = min(request.computed, len(request.prompt))
                if prefilled > request.prefilled:
                    self.prefill_tokens += prefilled - request.prefilled
                    request.prefilled = prefilled

    def accept(self, request: Request, token: int, *, stops: bool = False) -> StopCause | None:
        """The token that was sampled after a committed chunk; `stops`: it completes a sequence that ends the reply. Decides
        the cause if it is the last one, and then frees slot and pages: a stop on the last allowed place is a stop, not
        the limit."""
        request.tokens.append(token)
        if stops or token in request.stop_tokens:
            cause = StopCause.STOP_TOKEN
        elif len(request.tokens) >= request.limit:
            cause = request.limit_cause
        else:
            return None
        self.remove(request)
        return cause

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees what it holds."""
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def clear(self) -> None:
        """Forgets every request and frees everything, for when the memory behind the pages is lost."""
        self.waiting.clear()
        self.running.clear()
        self.pool = PagePool(self.pool.total)
        self.free_slots = list(range(self.slots - 1, -1, -1))

    def check_integrity(self) -> None:
        """Raises PageError unless pages, slots and both queues agree with each other. O(pages)."""
        self.pool.check_integrity([request.pages for request in self.running])
        taken = [request.slot for request in self.running]
        if sorted(taken + self.free_slots) != list(range(self.slots)):
            raise PageError(f"slots in use {taken} and free {self.free_slots} are not the {self.slots} slots")
        for request in self.waiting:
            if request.slot >= 0 or request.pages or request.computed:
                raise PageError(f"request {request.id} waits with slot {request.slot} and pages {request.pages}")

    @staticmethod
    def _decodes(request: Request) -> bool:
        """Whether a request's next step is one token whose row it draws from, and nothing else."""
        done = request.score is None or request.scored >= len(request.prompt) - 1
        return done and len(request.tokens) - request.computed == 1

    def _prefill(self, request: Request, budget: int, rows: int) -> Chunk:
        """The next chunk of a request, at most `budget` tokens; it has one row and `rows` more. Takes its pages: there may be
        none, and the chunk empty."""
        start = request.computed
        remaining = len(request.tokens) - start
        count = min(remaining, budget)
        first, end = request.unscored(start, count)
        if end - first > 1 + rows:
            count = first + 1 + rows - start
        elif end - first == 1 + rows and count == remaining and not request.only_scores:
            count -= 1  # the last token's row would be one too many
        count = self._grow(request, count)
        return Chunk(request, count, count == remaining and not request.only_scores)

    @staticmethod
    def _rows(chunk: Chunk) -> int:
        first, end = chunk.request.unscored(chunk.request.computed, chunk.length)
        return end - first + chunk.sampled

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _grow(self, request: Request, count: int) -> int:
        """Takes the pages for `count` more tokens, preempting younger requests when the pool is exhausted. Returns how
        many tokens there are pages for: fewer than `count`, and maybe none, only for the youngest."""
        missing = self._pages_for(request.computed + count) - len(request.pages)
        while missing > self.pool.free and self.running[-1] is not request:
            self._preempt(self.running[-1])
        for _ in range(min(missing, self.pool.free)):
            request.pages.append(self.pool.allocate())
        request.capacity = len(request.pages) * self.page_tokens
        return min(count, request.capacity - request.computed)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.preemptions += 1
        self.recomputed_tokens += request.computed
        request.preemptions += 1
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        for page in reversed(request.pages):
            self.pool.release(page)
        self.free_slots.append(request.slot)
        request.pages = []
        request.capacity = request.computed = request.mapped = 0
        request.slot = -1

    def _may_admit(self) -> bool:
        """Whether the oldest waiting request gets a slot now: if the pool can hold what is promised to all, so that
        admission does not lead to preemption a moment later. Alone it does: no promise is above the pool."""
        if not self.waiting or not self.free_slots:
            return False
        return self._promised(self.waiting[0]) + sum(map(self._promised, self.running)) <= self.pool.free

    def _promised(self, request: Request) -> int:
        """Pages that a request may still ask for: all of its known tokens, and to grow by a quarter and one page, as
        far as its limit lets it. In proportion to its length, because losing it costs computing that much again."""
        known = self._pages_for(len(request.tokens))
        # The last token of a reply is never computed.
        most = min(self._pages_for(request.limit - 1), known + known // 4 + 1)
        return max(0, most - len(request.pages))

    def _admit(self) -> Request:
        request = self.waiting.popleft()
        request.slot = self.free_slots.pop()
        self.running.append(request)
        return request
