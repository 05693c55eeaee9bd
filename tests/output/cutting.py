"""Streams whose special tokens stay whole and whose text is cut in every way; and hostile ones, whose work is counted."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

from tests.output.feeding import OTHER, Fed, Pushed, feed


def tokens(text: str, special: dict[str, int]) -> list[str | Pushed]:
    """Takes the special tokens out of a text, by their spellings."""
    parts = re.split("|".join(f"({re.escape(spelling)})" for spelling in special), text)
    return [(special[part], part) if part in special else part for part in parts if part]


def same_for_all_cuts(items: str | Sequence[str | Pushed], **options: Any) -> Fed:
    """Feeds a stream with its text whole, by characters, by threes and cut at random; what comes out must be the same."""
    items = [items] if isinstance(items, str) else items
    whole = feed(items, **options)
    for cut in (_by(1), _by(3), *(_at_random(random.Random(seed)) for seed in range(4))):
        pieces = [piece for item in items for piece in ([item] if isinstance(item, tuple) else cut(item))]
        found = feed(pieces, **options)
        assert (found.parts, found.error, found.places) == (whole.parts, whole.error, whole.places)
    return whole


def _by(size: int) -> Callable[[str], Iterator[Pushed]]:
    return lambda text: ((OTHER, text[at : at + size]) for at in range(0, len(text), size))


def _at_random(draw: random.Random) -> Callable[[str], Iterator[Pushed]]:
    def cut(text: str) -> Iterator[Pushed]:
        at = 0
        while at < len(text):
            size = draw.choice((0, 1, 2, 5, 13, 40))
            yield OTHER, text[at : at + size]
            at += size

    return cut


class Counted(str):
    """A text that counts the characters that are copied from it or looked through for others."""

    __slots__ = ("work",)
    work: int

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        self.work += len(found)
        return found

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        found = super().find(sub, start, end)
        self.work += (len(self) if found < 0 else found) - start
        return found


def work(reader: Any, text: str) -> int:
    """Feeds a reader all of a text, as long as it reads on; returns the characters that were looked at."""
    data, at = Counted(text), 0
    data.work = 0
    while at < len(data):
        said, place = reader.feed(data, at)
        if said in ("done", "text"):
            break
        assert place > at or said == "begun"
        at = place
    return data.work


def calls_made(pieces: Sequence[str | Pushed], **options: Any) -> int:
    """Returns how many functions are called for an output in small pieces."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        feed(pieces, **options)
    finally:
        sys.setprofile(before)
    return count
