"""White space of a reply that may yet be answer text, with where it stands."""

from __future__ import annotations

from typing import NamedTuple


class _Run(NamedTuple):
    """Texts without a gap between them, and where the first one begins."""

    parts: list[str]
    start: int


class Blanks:
    """Text that is held back until it is known whether it counts. Places are in characters of the reply, from any place on."""

    __slots__ = ("_end", "_runs")

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._end = 0  # of the last run

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def start(self) -> int:
        """Where the first of it begins; there must be some."""
        return self._runs[0].start

    def add(self, text: str, end: int) -> None:
        """Takes text that ends at a place."""
        start = end - len(text)
        if self._runs and self._end == start:
            self._runs[-1].parts.append(text)
        else:
            self._runs.append(_Run([text], start))
        self._end = end

    def take(self) -> list[tuple[str, int]]:
        """Returns all of it, each text that has no gap with its end, and holds nothing any more."""
        runs, self._runs = self._runs, []
        texts = ["".join(run.parts) for run in runs]
        return [(text, run.start + len(text)) for text, run in zip(texts, runs, strict=True)]

    def clear(self) -> None:
        self._runs.clear()
