"""Strings that mean something in a model's output, searched together in text that comes in pieces."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(64)
def marker_set(*markers: str) -> Markers:
    """Returns the markers, made once for a core's many choices."""
    return Markers(markers)


class Markers:
    """The strings that mean something, searched together."""

    __slots__ = ("_first", "_longest", "_markers", "_pattern")

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._first = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers), default=0)
        alternatives = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
        self._pattern = re.compile(alternatives or "(?!)")

    def absent(self, text: str) -> bool:
        """Whether neither a marker nor the beginning of one is in a text."""
        return self._first.isdisjoint(text)

    def at_end(self, text: str) -> str | None:
        """The marker that a text ends with."""
        return next((marker for marker in self._markers if text.endswith(marker)), None)

    def search(self, data: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(data, at)

    def certain(self, data: str, at: int) -> int:
        """Returns up to where `data`, which holds no marker behind `at`, cannot become part of one."""
        for place in range(max(at, len(data) - self._longest + 1), len(data)):
            if data[place] in self._first and any(marker.startswith(data[place:]) for marker in self._markers):
                return place
        return len(data)
