"""What readers of calls are made from: words and text that come in pieces, entities, and the bound of a call.

Nothing here backtracks, and a character is looked at a bounded number of times, however the text is cut.
"""

from __future__ import annotations

import html
import re

from flare.conversation import MAX_ARGUMENTS_BYTES
from flare.output.faults import too_long

SPACE = " \t\n\r"

MAX_CALL_BYTES = 2 * MAX_ARGUMENTS_BYTES
"""Most bytes of UTF-8 of a call as it is written: arguments within a string, or between tags, take more room than JSON."""

MAX_NAME_WRITTEN = 1024
"""Most characters of a name between tags, or of a tag that holds one."""

_SPACES = re.compile(f"[{SPACE}]*")
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")


def unescaped(text: str) -> str:
    """Returns an attribute's value: entities stand for characters."""
    return _ENTITY.sub(lambda entity: html.unescape(entity[0]), text) if "&" in text else text


def behind_space(data: str, at: int) -> int:
    """Returns where the white space that begins at `data[at]` ends; `at` itself where none does."""
    found = _SPACES.match(data, at)
    assert found is not None  # no white space is a match too
    return found.end()


class Room:
    """What is left of the bytes that one call may take."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int = MAX_CALL_BYTES) -> None:
        self._limit = self._left = limit

    def take(self, text: str) -> None:
        """Raises OutputError when a call grows too long."""
        self._left -= len(text.encode())
        if self._left < 0:
            raise too_long(self._limit)


def read_word(
    seen: str, data: str, at: int, words: tuple[str, ...], *, spaced: bool = True
) -> tuple[str | None, str, int]:
    """Reads one of several words on from `data[at]`, perhaps behind white space; `seen` is what has come of it.

    Returns the word, what has been seen of one, and the place behind it. None: undecided, all of `data` is taken. An empty
    word: another character stands at that place, behind what was seen.
    """
    if spaced and not seen:
        at = behind_space(data, at)
    for place in range(at, len(data)):
        more = seen + data[place]
        if more in words:
            return more, "", place + 1
        if not any(word.startswith(more) for word in words):
            return "", seen, place
        seen = more
    return None, seen, len(data)


class Expected:
    """One of several words is to come, perhaps behind white space."""

    __slots__ = ("_words", "seen")

    def __init__(self, *words: str) -> None:
        self._words = words
        self.seen = ""  # of a word

    def feed(self, data: str, at: int) -> tuple[str | None, int]:
        """Reads on from `data[at]`; returns the word and the place behind it, see `read_word`."""
        word, self.seen, at = read_word(self.seen, data, at, self._words)
        return word, at


class Until:
    """Text up to a marker, which belongs to neither side."""

    __slots__ = ("_marker", "_parts", "_tail")

    def __init__(self, marker: str, begun: str = "") -> None:
        """`begun` is what the text begins with."""
        self._marker = marker
        self._parts = [begun]
        self._tail = ""  # the beginning of the marker, perhaps

    @property
    def text(self) -> str:
        """What came before the marker, or all that has come so far."""
        return "".join(self._parts) + self._tail

    def feed(self, data: str, at: int) -> int | None:
        """Reads on from `data[at]`; returns the place behind the marker. None: it has not come, all of `data` is taken."""
        marker, tail = self._marker, self._tail
        if tail:
            reach = at + len(marker) - 1
            window = tail + data[at:reach]
            found = window.find(marker)
            if found >= 0:
                self._parts.append(window[:found])
                self._tail = ""
                return at + found + len(marker) - len(tail)
            if reach > len(data):
                self._hold(window, 0)
                return None
            self._parts.append(tail)  # no marker begins there
            self._tail = ""
        found = data.find(marker, at)
        if found >= 0:
            self._parts.append(data[at:found])
            return found + len(marker)
        self._hold(data, at)
        return None

    def _hold(self, data: str, at: int) -> None:
        for place in range(max(at, len(data) - len(self._marker) + 1), len(data)):
            if self._marker.startswith(data[place:]):
                break
        else:
            place = len(data)
        self._parts.append(data[at:place])
        self._tail = data[place:]
