"""White space of a reply that may yet be answer text, with where it stands."""

from __future__ import annotations


class Blanks:
    """Text that is held back until it is known whether it counts. Places are in characters of the reply, from any place on."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[list[str], int]] = []  # texts without a gap between them, and where they end

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def start(self) -> int:
        """Where the first of it begins; there must be some."""
        parts, end = self._runs[0]
        return end - sum(map(len, parts))

    def add(self, text: str, end: int) -> None:
        """Takes text that ends at a place."""
        if self._runs and self._runs[-1][1] == end - len(text):
            parts = self._runs.pop()[0]
            parts.append(text)
            self._runs.append((parts, end))
        else:
            self._runs.append(([text], end))

    def take(self) -> list[tuple[str, int]]:
        """Returns all of it, each text that has no gap with its end, and holds nothing any more."""
        runs, self._runs = self._runs, []
        return [("".join(parts), end) for parts, end in runs]

    def clear(self) -> None:
        self._runs.clear()
