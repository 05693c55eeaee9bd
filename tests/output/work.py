"""Counts what an output machine does, for tests that its work grows with the length of its input and no faster."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import flare.output
from tests.output.feeding import feed

HOME = str(flare.output.__path__[0])


def lines_run(pieces: Iterable[str], **options: Any) -> int:
    """Returns how many lines of flare/output run while a text is fed in pieces; one that is no list, by characters."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        feed(list(pieces), natural=False, **options)
    finally:
        sys.settrace(before)
    return count


def assert_linear(head: str, unit: str, *, most: int = 120, length: int = 1000, **options: Any) -> None:
    """Asserts that twice and four times the text cost twice and four times the lines, and at most `most` a character."""
    count = -(-length // len(unit))
    runs = [lines_run(head + unit * (count * times), **options) for times in (1, 2, 4)]
    assert runs[0] <= most * (len(head) + len(unit) * count)
    assert runs[1] <= 2.1 * runs[0] and runs[2] <= 4.2 * runs[0], runs
