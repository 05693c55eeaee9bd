"""The log probabilities of a reply's tokens on their way to the client, which hears of a token no later than of its text and,
where text is held back, not before."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from flare.conversation import Logprobed
from flare.logprobs import TokenLogprobs


class _Waiting(NamedTuple):
    """A token whose text begins at `place`; one that is not `visible` has no text."""

    entry: TokenLogprobs
    place: int
    visible: bool


class _Span(NamedTuple):
    """Answer text that stands at `start` to `end`; `offset` is how much answer text there is before it."""

    start: int
    end: int
    offset: int


class Entries:
    """Those of one choice. Places are in characters of all that the decoder gives, offsets in characters of answer text.

    A token waits until it is known whether its text is answer text and whether a stop string begins before it: then it has no
    entry. Where neither an output machine nor a stop can hold text back it does not wait (`held` is false).
    """

    __slots__ = ("_answered", "_choice", "_held", "_spans", "_waiting", "length", "shown")

    def __init__(self, choice: int, *, held: bool) -> None:
        self._choice = choice
        self._held = held
        self._waiting: deque[_Waiting] = deque()
        self._spans: deque[_Span] = deque()  # from that of the first waiting token, or of the first text not shown, on
        self._answered = 0
        self.length = 0
        """Characters that the decoder gave."""
        self.shown = 0
        """Characters of answer text that went on to the client; the rest of it is held back by stops."""

    def add(self, entry: TokenLogprobs | None, ahead: int, visible: bool) -> None:
        """Takes the next token before the decoder does, with what the decoder says is `ahead` of its text. One without an entry
        has been forced."""
        if entry is not None:
            self._waiting.append(_Waiting(entry, self.length + ahead, visible))

    def answer(self, end: int, size: int) -> None:
        """Takes `size` characters of answer text that end at a place."""
        start, offset = end - size, self._answered
        if self._spans and self._spans[-1].end == start:
            start, _, offset = self._spans.pop()
        self._spans.append(_Span(start, end, offset))
        self._answered += size

    def release(self, end: int, *, ended: bool = False) -> Logprobed | None:
        """Returns the entries of waiting tokens that begin before a place at which all is decided; None without any."""
        if not self._waiting or self._waiting[0].place > end:
            return None
        if self.shown < self._answered:
            end = min(end, self._place_of(self.shown))
        entries, answers, offsets = [], [], []
        while self._waiting:
            entry, place, visible = self._waiting[0]
            if place > end or (place == end and visible and self._held and not ended):
                break
            self._waiting.popleft()
            entries.append(entry)
            answers.append(visible and self._is_answer(place))
            offsets.append(place)
        return Logprobed(self._choice, entries, answers, offsets) if entries else None

    def cut(self) -> Logprobed | None:
        """Ends the reply behind what is `shown`, where a stop string begins: tokens that begin behind it are left out."""
        released = self.release(self.length)
        self._waiting.clear()
        return released

    def end(self) -> Logprobed | None:
        """Ends the reply: all that waits is released."""
        self.shown = self._answered
        return self.release(self.length + 1, ended=True)

    def _is_answer(self, place: int) -> bool:
        if not self._held:
            return True
        spans = self._spans
        while spans and spans[0].end <= place:
            spans.popleft()
        return bool(spans) and spans[0].start <= place

    def _place_of(self, offset: int) -> int:
        """Returns where the character of the answer text at an offset stands, one that is not shown yet."""
        return next(s.start + offset - s.offset for s in self._spans if offset < s.offset + s.end - s.start)
