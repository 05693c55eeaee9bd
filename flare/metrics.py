"""What the server counts of its requests, and one reading of everything that it reports of itself.

The service owns one `Metrics`, feeds it on its event loop and reads it there, so nothing is locked; the engine counts its
own work, and its numbers are read without stopping it. How the callers feed it:

    with metrics.answer(choices, arrived_at) as meter:      # at submission, once the number of choices is known
        runtime.submit(prepared, meter.over(listener), ...)  # refused, failed, finished, given up: told apart here
        ...                                                  # until the response is written or the client is gone
    metrics.request_finished(route, status)                  # every HTTP request, by its route's template
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

from flare.conversation import Event, Failed, Finished, Reasoning, Text

if TYPE_CHECKING:
    from flare.engine import EngineStats
    from flare.fallbacks import Fallback, Fallbacks
    from flare.served import ServedModel

WINDOW_S = 60
"""How far back the times to a first response are looked at."""

WINDOW_SAMPLES = 4096
"""The most times to a first response that are kept; sorting them takes less than a millisecond."""

OTHER_ROUTE = "other"
"""Counts requests for no route at all: a label of its own for each path that someone makes up would stay for ever."""

WITH_TEXT = (Text, Reasoning, Finished)


@dataclass(frozen=True, slots=True)
class FirstResponse:
    """Seconds from HTTP admission to the first answer or reasoning text, over the last `window_seconds`.

    `capacity` is the most samples that are kept; `truncated`: some of the window did not fit and the oldest are missing.
    """

    median_seconds: float | None
    samples: int
    window_seconds: int
    capacity: int
    truncated: bool


class Window:
    """A ring of samples of the last `seconds`. `clock` is monotonic, in seconds."""

    def __init__(self, seconds: int, capacity: int, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=capacity)
        self._dropped_at = -float("inf")
        self._capacity = capacity

    def add(self, value: float) -> None:
        samples, now = self._samples, self._clock()
        if len(samples) == self._capacity:
            self._dropped_at = samples[0][0]
        samples.append((now, value))

    def read(self) -> FirstResponse:
        """Returns the window as it is now; forgets what has left it."""
        samples, begin = self._samples, self._clock() - self._seconds
        while samples and samples[0][0] < begin:
            samples.popleft()
        return FirstResponse(
            median_seconds=median(value for _, value in samples) if samples else None,
            samples=len(samples),
            window_seconds=self._seconds,
            capacity=self._capacity,
            truncated=self._dropped_at >= begin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the server holds at a moment, and its bounds: choices, bytes of bodies, connections."""

    admission_used: int
    admission_capacity: int
    body_bytes: int
    body_bytes_capacity: int
    connections: int = 0
    connections_capacity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything that is reported, at one moment.

    Requests are the model's: one for each choice of an answer, counted from submission. Once none is live, `submitted` is
    the sum of `completed`, `cancelled` and `failed`. `http` maps (route, status) to a number of HTTP requests.
    """

    model: ServedModel
    engine: EngineStats
    load: Load
    uptime_seconds: float
    submitted: int
    completed: int
    cancelled: int
    failed: int
    first_responses: int
    first_response_seconds: float
    first_response: FirstResponse
    http: dict[tuple[str, int], int]
    fallbacks: tuple[Fallback, ...] = ()
    fallbacks_allowed: bool = True

    @property
    def fallbacks_total(self) -> int:
        return sum(fallback.count for fallback in self.fallbacks)


class Metrics:
    """The counters of one service, from its start. On its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.submitted = self.completed = self.cancelled = self.failed = 0
        self._started_at = clock()
        self._first_responses = 0
        self._first_response_seconds = 0.0
        self._window = Window(WINDOW_S, WINDOW_SAMPLES, clock)
        self._http: dict[tuple[str, int], int] = {}

    def answer(self, choices: int, arrived_at: float) -> AnswerMeter:
        """Counts an answer of this many choices as submitted. `arrived_at` is when its request was admitted, on the clock."""
        return AnswerMeter(self, choices, arrived_at)

    def first_response(self, seconds: float) -> None:
        """Notes how long an answer's first text took."""
        self._first_responses += 1
        self._first_response_seconds += seconds
        self._window.add(seconds)

    def request_finished(self, route: str, status: int) -> None:
        """Counts an HTTP request. `route` is the route's template, not the client's path, or OTHER_ROUTE; `status` is what was
        sent, 499 where the client left before anything was."""
        key = (route, status)
        self._http[key] = self._http.get(key, 0) + 1

    def read(self, model: ServedModel, engine: EngineStats, load: Load, fallbacks: Fallbacks) -> Reading:
        return Reading(
            model=model,
            engine=engine,
            load=load,
            uptime_seconds=self.clock() - self._started_at,
            submitted=self.submitted,
            completed=self.completed,
            cancelled=self.cancelled,
            failed=self.failed,
            first_responses=self._first_responses,
            first_response_seconds=self._first_response_seconds,
            first_response=self._window.read(),
            http=dict(self._http),
            fallbacks=fallbacks.events,
            fallbacks_allowed=fallbacks.allowed,
        )


class AnswerMeter:
    """What one answer adds to the counters: as a context manager, from its submission to its end.

    Every choice is counted once: completed or cancelled with its end, failed with the answer's `Failed`. Choices
    that are still open at the end of the block failed if an error ends it, such as a full queue; otherwise (the client
    is gone, the task is cancelled, the iterator is closed) they are cancelled.
    """

    __slots__ = ("_arrived_at", "_metrics", "open")

    def __init__(self, metrics: Metrics, choices: int, arrived_at: float) -> None:
        self._metrics = metrics
        self._arrived_at = arrived_at
        self.open = choices
        metrics.submitted += choices

    def over(self, listener: Callable[[Event], None], *, whole: bool = False) -> Callable[[Event], None]:
        """Returns the listener that counts and passes every event on. Text that comes before, such as an echoed prompt,
        is not for it: it is no response of the model. `whole`: the answer is told in one piece behind its last event, and
        `ended` is called for each choice then."""
        metrics = self._metrics
        silent = True

        def listen(event: Event) -> None:
            nonlocal silent
            if isinstance(event, Failed):
                self._fail()
            elif silent and isinstance(event, WITH_TEXT) and event.text:
                silent = False
                metrics.first_response(metrics.clock() - self._arrived_at)
            listener(event)
            if isinstance(event, Finished) and not whole:
                self.ended(event)

        return listen

    def ended(self, end: Finished) -> None:
        """Counts a choice whose end is told, not before: an answer that cannot be encoded has failed."""
        self.open -= 1
        if end.cause == "cancelled":
            self._metrics.cancelled += 1
        else:
            self._metrics.completed += 1

    def _fail(self) -> None:
        self._metrics.failed += self.open
        self.open = 0

    def __enter__(self) -> AnswerMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self._fail()
        else:
            self._metrics.cancelled += self.open
            self.open = 0
