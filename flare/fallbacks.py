"""What ran on the processor for want of a device or of a kernel: counted by cause, told in the log and in answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from flare.errors import RequestError

NO_DEVICE = "the core's cuda target did not come up; its cpu target runs the steps"

_log = logging.getLogger("flare.fallbacks")


class Fallback(NamedTuple):
    """A cause, and how often it has occurred since the start."""

    cause: str
    count: int


class Fallbacks:
    """The counts of one runtime. Any thread records and reads. Causes are sentences of this program and of the core, never of a
    request, so there are few. `allowed` says whether the operator lets anything run elsewhere, `told` that the log says so."""

    def __init__(self, *, allowed: bool = True, told: bool = True) -> None:
        self.allowed = allowed
        self._told = told
        self._counting = True
        self._needed: tuple[str, ...] = ()
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def record(self, cause: str) -> None:
        """Counts one occurrence; the first one and each power of two are logged."""
        if not self._counting:
            return
        with self._lock:
            count = self._counts[cause] = self._counts.get(cause, 0) + 1
        if self._told and count & (count - 1) == 0:
            _log.warning("CPU FALLBACK (%d so far for this cause): %s", count, cause)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it nothing is counted: what runs is no request's. For the start, when no other thread records."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def need(self, causes: Iterable[str]) -> None:
        """Takes down what every step of the core will record, beside what was taken down before."""
        self._needed += tuple(causes)

    def check(self) -> None:
        """Raises RequestError (500) where steps need what is not allowed."""
        if self._needed and not self.allowed:
            text = f"CPU fallback disabled: {'; '.join(self._needed)}"
            raise RequestError(text, status=500, type="server_error")

    def counts(self) -> Mapping[str, int]:
        """Returns how often each cause has occurred, in the order of their first occurrences."""
        with self._lock:
            return dict(self._counts)

    def since(self, before: Mapping[str, int]) -> tuple[Fallback, ...]:
        """Returns the causes that have occurred since `counts` returned `before`, with their whole counts."""
        return tuple(Fallback(cause, count) for cause, count in self.counts().items() if count > before.get(cause, 0))

    @property
    def events(self) -> tuple[Fallback, ...]:
        return self.since({})
