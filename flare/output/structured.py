"""Replies under an output constraint: their answer is verbatim from where it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from flare.output.interface import Output, Piece


class StructuredOutput:
    """See `Output`. Reads as `machine` does until answer text comes; from then on markup, delimiters and their tokens are
    text: a JSON string may hold them.

    White space begins the answer, but not line breaks, which belong to the delimiter before them: unless `breaks`, where the
    answer itself may begin with some. In `framed` replies only the machine can tell where the answer begins.
    """

    __slots__ = ("_breaks", "_framed", "_machine", "_shows", "_verbatim")

    def __init__(self, machine: Output, *, shows_text: bool, breaks: bool = False, framed: bool = False) -> None:
        self._machine = machine
        self._shows = shows_text
        self._breaks = breaks
        self._framed = framed
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
        if not self._verbatim and self._begins(text):
            self._verbatim = True
            for _ in self._machine.drain():
                pass  # line breaks that it held back
        if not self._verbatim:
            return self._watch(self._machine.push(token, text))
        return (Piece("text", text),) if text and self._shows else ()

    def end(self, *, natural: bool) -> Iterable[Piece]:
        return self._machine.end(natural=natural)

    def _begins(self, text: str) -> bool:
        """Whether the answer begins with white space at the beginning of a token's text."""
        if not text[:1].isspace() or self._framed or not (self._breaks or text.strip("\n")):
            return False
        machine = self._machine
        return not machine.reasoning_open and not machine.undecided and machine.calling == "no"

    def _watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Passes pieces on, and sees where the answer begins. Beside a call all text is what the model says about it."""
        begins = False
        for piece in pieces:
            yield piece
            begins = begins or (piece.kind == "text" and bool(piece.text.strip("" if self._breaks else "\n")))
        if begins and self._machine.calling != "yes":
            self._verbatim = True
            yield from self._machine.drain()
