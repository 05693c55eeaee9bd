"""What readers of tagged calls are made from: words and text that come in pieces, and the bound of a call.

Nothing here backtracks, and a character is looked at a bounded number of times, however the text is cut.
"""

from __future__ import annotations

from flare.output.interface import OutputError
from flare.output.json_objects import MAX_CALL_BYTES

SPACE = " \t\n\r"


def broken(what: str) -> OutputError:
    """The error for a call that its format does not allow. Of the model's text `what` holds 80 characters at most."""
    return OutputError(f"the model wrote a tool call that is not well formed: {what}")


class Room:
    """What is left of the bytes that one call may take."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_CALL_BYTES

    def take(self, text: str) -> None:
        """Raises OutputError when a call grows too long."""
        self._left -= len(text.encode("utf-8", "surrogatepass"))
        if self._left < 0:
            raise OutputError(f"the model wrote a tool call of more than {MAX_CALL_BYTES} bytes")


class Expected:
    """One of several words is to come, perhaps behind white space."""

    __slots__ = ("_words", "seen")

    def __init__(self, *words: str) -> None:
        self._words = words
        self.seen = ""  # of a word

    def feed(self, data: str, at: int) -> tuple[str | None, int]:
        """Reads on from `data[at]`; returns the word and the place behind it.

        None: undecided, all of `data` is taken. An empty word: another character stands at that place, behind `seen`.
        """
        for place in range(at, len(data)):
            char = data[place]
            if not self.seen and char in SPACE:
                continue
            seen = self.seen + char
            if seen in self._words:
                return seen, place + 1
            if not any(word.startswith(seen) for word in self._words):
                return "", place
            self.seen = seen
        return None, len(data)


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
