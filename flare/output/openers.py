"""What begins a call, and what reads on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flare.output.interface import CallReader


class Opener(NamedTuple):
    """A text that may begin a call. `in_reasoning`: also within reasoning, which a call then ends. `first`: only where
    nothing but white space stands before it, back to the beginning of the answer, a delimiter or a call."""

    text: str
    in_reasoning: bool = True
    first: bool = False


class Calls(NamedTuple):
    """How one choice's calls are found: `reader` makes what reads on behind an opener, given its text."""

    openers: tuple[Opener, ...]
    reader: Callable[[str], CallReader]
