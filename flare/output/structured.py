"""Replies under an output constraint: their answer is verbatim from where it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from flare.output.interface import Output, Piece


class StructuredOutput:
    """See `Output`. Reads as `machine` does until answer text comes that is not white space; from then on markup, delimiters
    and their tokens are text: a JSON string may hold them."""

    __slots__ = ("_machine", "_shows", "_verbatim")

    def __init__(self, machine: Output, *, shows_text: bool) -> None:
        self._machine = machine
        self._shows = shows_text
        self._verbatim = False

    @property
    def reasoning_tokens(self) -> int:
        return self._machine.reasoning_tokens

    @property
    def reasoning_open(self) -> bool:
        return not self._verbatim and self._machine.reasoning_open

    @property
    def undecided(self) -> int:
        return 0 if self._verbatim else self._machine.undecided

    @property
    def calling(self) -> Literal["no", "undecided", "yes"]:
        return "no" if self._verbatim else self._machine.calling

    def drain(self) -> Iterable[Piece]:
        return () if self._verbatim else self._machine.drain()

    def push(self, token: int, text: str) -> Iterable[Piece]:
        if not self._verbatim:
            return self._watch(self._machine.push(token, text))
        return (Piece("text", text),) if text and self._shows else ()

    def end(self, *, natural: bool) -> Iterable[Piece]:
        return self._machine.end(natural=natural)

    def _watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Passes pieces on, and sees where the answer begins. Beside a call all text is what the model says about it."""
        begins = False
        for piece in pieces:
            yield piece
            begins = begins or (piece.kind == "text" and not piece.text.isspace())
        if begins and self._machine.calling != "yes":
            self._verbatim = True
            yield from self._machine.drain()
