"""The engine thread: takes commands, plans a step, runs it, delivers what it brought.

Callers of any thread talk to it through a queue; everything else belongs to the engine thread alone, so no lock is held
while a graph runs. It sleeps on the queue when no request is live.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from flare.engine.arrays import Filled, StepArrays
from flare.engine.checks import check_requests
from flare.engine.interface import Replay
from flare.engine.request import Delivery, EngineLimits, EngineStats, QueueFull, Request, StopCause
from flare.engine.scheduler import Scheduler
from flare.errors import CoreError, MaskError, ReplayDead, RequestError
from flare.failures import log_failure
from flare.logprobs import LogprobsWanted, TokenLogprobs, read_logprobs

_log = logging.getLogger("flare.engine")

STEP_FAILED = "the model failed while it worked on this request; the server goes on, try again"
ENGINE_FAILED = "the model can run no more requests; the server must be restarted"
SETTLED_S = 1.0
"""How long no request must be live before the pages are counted, and before what can wait is done."""
ENGINE_CLOSED = "the server is shutting down"
NATURAL = LogprobsWanted()
"""Of prompts: a row of a step has the alternatives, and no tokens that the request names."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command: end a request with this cause, if it is still live."""

    request_id: int
    cause: StopCause


class Close:
    """Command: end every request and the thread."""


class Engine:
    """Runs requests on a replay. The caller owns the replay and closes it after `close`.

    `deliver` is called by the engine thread, at most once a step, with all that the step brought; it must return soon
    and not raise. Exactly one delivery of each submitted request is final. `settled` is called there each time that no
    request has been live for SETTLED_S after a step; it must return soon and not raise, too.
    """

    def __init__(
        self,
        replay: Replay,
        limits: EngineLimits,
        deliver: Callable[[list[Delivery]], None],
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._replay = replay
        self._limits = limits
        self._deliver = deliver
        self._settled = settled
        sizes = replay.limits
        self._scheduler = Scheduler(
            # Every slot has at most one row and at least one token of a step.
            slots=min(sizes.slots, sizes.max_rows, sizes.max_step_tokens),
            max_step_tokens=sizes.max_step_tokens,
            page_tokens=sizes.page_tokens,
            pages=sizes.kv_pages,
            context=min(sizes.max_context, sizes.kv_pages * sizes.page_tokens),
            max_rows=sizes.max_rows,
        )
        self._arrays = StepArrays(replay)
        self._commands: SimpleQueue[Request | Cancel | Close] = SimpleQueue()
        self._lock = threading.Lock()
        self._live: dict[int, Request] = {}  # with the lock: added by submit, taken out by the engine thread
        self._refusal = ""  # with the lock: why nothing is accepted any more
        self._failed = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._deliveries: list[Delivery] = []
        self._steps = self._samples = self._generated = self._first_tokens = 0
        self._completed = self._cancelled = self._failures = self._forced = self._scored = 0

    # For callers, from any thread

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its reply together."""
        return self._scheduler.context

    @property
    def capacity(self) -> int:
        """Most requests that are live at a time: those that fill every slot, and those that wait."""
        return self._scheduler.slots + self._limits.max_waiting

    @property
    def healthy(self) -> bool:
        """False once the replay is dead or the engine itself failed; it does not come back."""
        return not self._failed

    def start(self) -> None:
        """Starts the thread. Requests may be submitted before."""
        self._thread = threading.Thread(target=self._run, name="flare-engine", daemon=True)
        self._thread.start()

    def check_ready(self) -> None:
        """Raises RequestError (503) once no request is accepted any more, and says why."""
        if self._refusal:
            raise RequestError(self._refusal, status=503, type="server_error")

    def submit(self, *group: Request) -> None:
        """Queues all requests of a group, at most `capacity`, or none. Raises RequestError: 400 for what can never run, 503
        (QueueFull among them) for what cannot be taken now; ValueError for an id that is live already, or comes twice."""
        check_requests(group, context=self._scheduler.context, vocabulary=self._replay.limits.vocabulary)
        now = monotonic()
        with self._lock:
            self.check_ready()
            if len(self._live) + len(group) > self.capacity:
                raise QueueFull(len(self._live), len(group), self._scheduler.slots, self._limits.max_waiting)
            ids = set(self._live)
            for request in group:
                if request.id in ids:
                    raise ValueError(f"request id {request.id} is live already")
                ids.add(request.id)
            for request in group:
                request.submitted_at = now
                self._live[request.id] = request
                self._commands.put(request)

    def cancel(self, request_id: int, cause: StopCause = StopCause.CANCELLED) -> None:
        """Ends a request wherever it is, with one final delivery of this cause: the text layer passes STOP_SEQUENCE
        when it found a stop string. Without effect if the final delivery is already made."""
        with self._lock:  # never between a submission's two halves
            self._commands.put(Cancel(request_id, cause))

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        active = len(scheduler.running)
        return EngineStats(
            healthy=self.healthy,
            slots=scheduler.slots,
            active=active,
            waiting=max(0, len(self._live) - active),
            free_pages=scheduler.pool.free,
            total_pages=scheduler.pool.total,
            page_tokens=scheduler.page_tokens,
            steps=self._steps,
            samples=self._samples,
            decode_rounds=self._generated - self._first_tokens,
            prefill_tokens=scheduler.prefill_tokens,
            recomputed_tokens=scheduler.recomputed_tokens,
            generated_tokens=self._generated,
            preemptions=scheduler.preemptions,
            forced=self._forced,
            scored_tokens=self._scored,
            masked_tokens=self._arrays.masked,
            mask_seconds=self._arrays.mask_seconds,
            completed=self._completed,
            cancelled=self._cancelled,
            failed=self._failures,
        )

    def close(self) -> None:
        """Cancels every request, delivers that, and ends the thread. Returns when that is done; may be called twice."""
        with self._lock:
            self._refusal = self._refusal or ENGINE_CLOSED
        self._commands.put(Close())
        if self._thread is None:
            self._run()
        else:
            self._thread.join()

    # The engine thread

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._scheduler.idle:
                    self._obey(self._await_command())
                while not self._commands.empty():
                    self._obey(self._commands.get())
                if not self._closing and not self._scheduler.idle:
                    self._step()
                self._flush()
            for request in list(self._live.values()):
                self._scheduler.remove(request)
                self._finish(Delivery(request, [], StopCause.CANCELLED))
            self._scheduler.check_integrity()
            self._flush()
        except Exception as error:
            if isinstance(error, ReplayDead):
                _log.error("the engine stops, its replay is dead: %s", error)
            else:
                log_failure(_log, "the engine stops, it failed")
            self._die()

    def _await_command(self) -> Request | Cancel | Close:
        """Sleeps until there is something to do. Pages are counted once idleness has lasted: that takes milliseconds for a
        large pool, and must not stand in the way of a client that asks one thing after another."""
        try:
            return self._commands.get(timeout=SETTLED_S)
        except Empty:
            self._scheduler.check_integrity()
            if self._steps:
                self._settled()
            return self._commands.get()

    def _obey(self, command: Request | Cancel | Close) -> None:
        match command:
            case Request():
                try:
                    self._admit(command)
                except Exception:
                    log_failure(_log, "a request could not be taken in")
                    self._finish(Delivery(command, [], error=STEP_FAILED))
            case Cancel(request_id, cause):
                request = self._live.get(request_id)
                if request is not None:
                    self._scheduler.remove(request)
                    self._finish(Delivery(request, [], cause))
            case Close():
                self._closing = True

    def _admit(self, request: Request) -> None:
        if request.only_scores and len(request.prompt) == 1:
            self._finish(Delivery(request, [], StopCause.MAX_TOKENS))  # its one token follows nothing
            return
        self._arrays.admit(request)
        self._scheduler.add(request)

    def _step(self) -> None:
        chunks = self._scheduler.plan()
        if not chunks:
            raise RuntimeError(f"no step for {len(self._live)} live requests")
        filled = self._arrays.fill(chunks)
        meanwhile = partial(self._arrays.mask, filled.sampled) if filled.constrained else None
        try:
            self._replay.step(filled.tokens, filled.rows, meanwhile)
        except ReplayDead:
            raise
        except Exception:
            log_failure(_log, f"a step of {filled.tokens} tokens failed; its {len(chunks)} requests end")
            for chunk in chunks:
                self._fail(chunk.request)
            return
        self._scheduler.commit(chunks)
        self._steps += 1
        unscored = self._score(filled) if filled.scored else []
        if filled.sampled:
            self._sample(filled.sampled, unscored)
        for request in unscored:
            self._fail(request)

    def _score(self, filled: Filled) -> list[Request]:
        """Delivers the scores of prompts that the step's rows give; returns the requests whose rows give none."""
        first = len(filled.sampled)
        if not self._runs(self._replay.score, (first, filled.rows - first), "scoring", len(filled.scored)):
            return [scored.request for scored in filled.scored]
        rows, failed = self._replay.logprobs, []
        for request, row, start, end in filled.scored:
            entries = []
            for index, position in enumerate(range(start, end), row):
                found = rows[index]
                if found.rank < 1:
                    failed.append(request)
                    break
                entries.append(read_logprobs(found, request.prompt[position + 1], NATURAL))
            else:
                self._scored += len(entries)
                if request.only_scores and request.scored == len(request.prompt) - 1:
                    self._scheduler.remove(request)
                    self._finish(Delivery(request, [], StopCause.MAX_TOKENS, scores=entries))
                elif entries:
                    self._deliveries.append(Delivery(request, [], scores=entries))
        return failed

    @staticmethod
    def _runs(call: Callable[..., None], arguments: tuple[int, ...], what: str, requests: int) -> bool:
        """Calls the replay on the rows of a step; returns whether it gave something, if not for every row. Raises
        ReplayDead."""
        try:
            call(*arguments)
        except ReplayDead:
            raise
        except CoreError:
            log_failure(_log, f"{what} gave nothing for some rows of {requests} requests; these requests end")
        except Exception:
            log_failure(_log, f"{what} failed; its {requests} requests end")
            return False
        return True

    def _sample(self, sampled: list[Request], unscored: list[Request]) -> None:
        """Draws the next token of `sampled`, and takes it but for those of `unscored`."""
        failed = self._arrays.draw(sampled)
        if not self._runs(self._replay.sample, (len(sampled),), "sampling", len(sampled)):
            for request in sampled:
                if request not in unscored:
                    self._fail(request)
            return
        self._samples += 1
        now = monotonic()
        for index, token in enumerate(self._replay.sampled[: len(sampled)]):
            request = sampled[index]
            if unscored and request in unscored:
                continue
            if error := failed.get(request.id):
                self._fail(request, error)
            elif token < 0:
                self._fail(request)
            else:
                self._accept(request, index, token, now)

    def _accept(self, request: Request, index: int, token: int, now: float) -> None:
        """Takes the token that was drawn from a row at the moment `now`."""
        entry: TokenLogprobs | None = None
        forced, wanted, grammar = request.forced, request.logprobs, request.grammar
        if forced is not None or wanted is not None or grammar is not None:
            try:
                if forced is not None and request.generated == forced.after and self._forces(request, index):
                    token = forced.token
                    self._forced += 1
                elif wanted is not None:
                    entry = read_logprobs(self._replay.logprobs[index], token, wanted)
                if grammar is not None:
                    grammar.accept(token)
            except Exception as error:
                self._fail(request, error)
                return
        self._generated += 1
        if not request.first_token_at:
            request.first_token_at = now
            self._first_tokens += 1
        # Sequences are matched here, not where tokens become text: so the reply ends with the sequence, whatever its
        # limit and the model's own stops are, and nothing is computed behind it.
        sequences, stop = request.stop_sequences, None
        shown = [token]
        if sequences is not None:
            certain, stop = sequences.push((token,))
            shown = list(certain)
        cause = self._scheduler.accept(request, token, stops=stop is not None)
        if cause is None and request.history is not None:
            request.history.append(token)
            request.row.history = request.history.array
        if cause is not None and stop is None:
            if sequences is not None:
                shown += sequences.flush()
            if cause is StopCause.STOP_TOKEN:
                stop = (shown.pop(),)
        entries: Sequence[TokenLogprobs | None] = ()
        if wanted is not None:
            request.withheld.append(entry)
            entries = request.withheld[: len(shown)]
            del request.withheld[: len(shown)]
        if cause is not None:
            self._finish(Delivery(request, shown, cause, None, stop or (), entries))
        elif shown:
            self._deliveries.append(Delivery(request, shown, None, None, (), entries))

    def _forces(self, request: Request, index: int) -> bool:
        """Whether a reply that has come to its forced token gets it."""
        assert request.forced is not None
        reply = request.tokens[len(request.prompt) :]
        return self._arrays.allows(index, request.forced.token) and request.forced.applies(reply)

    def _fail(self, request: Request, error: Exception | None = None) -> None:
        """Ends a request that a step failed; `error` is what its grammar or what forces its token raised."""
        if error is not None and not isinstance(error, MaskError):
            log_failure(_log, "what bounds or forces a request's tokens failed; it ends", error)
        self._scheduler.remove(request)
        self._finish(Delivery(request, [], error=str(error) if isinstance(error, MaskError) else STEP_FAILED))

    def _finish(self, delivery: Delivery) -> None:
        """Counts a final delivery and queues it; the request is no longer live when the caller sees it."""
        request = delivery.request
        request.finished_at = monotonic()
        request.row = request.history = None
        with self._lock:
            del self._live[request.id]
        if delivery.error is not None:
            self._failures += 1
        elif delivery.finished is StopCause.CANCELLED:
            self._cancelled += 1
        else:
            self._completed += 1
        self._deliveries.append(delivery)

    def _flush(self) -> None:
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._deliver(deliveries)

    def _die(self) -> None:
        """Fails every live request, those still in the command queue too: they are live since `submit`."""
        with self._lock:
            self._failed = True
            self._refusal = ENGINE_FAILED
        self._scheduler.clear()
        for request in list(self._live.values()):
            self._finish(Delivery(request, [], error=ENGINE_FAILED))
        try:
            self._flush()
        except Exception:
            log_failure(_log, "the last deliveries failed")
