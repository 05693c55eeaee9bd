"""What the machines of formats have in common whose replies stand in frames of control tokens.

Where the core names the control tokens (`OutputSyntax.spelled`) only those tokens are markers, and the same text in
ordinary tokens is data: a model can explain its own format. Otherwise the spellings are markers wherever they occur.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from flare.output.blanks import Blanks
from flare.output.faults import cut_off
from flare.output.interface import OutputSyntax, Piece
from flare.output.markers import Markers
from flare.output.rules import Rules


class FramedMachine:
    """See `Output`. A format says what its markers, and the text between them, mean in the state that it is in.

    Without `rules` no call may come: one that the model makes is left out, since frames are never shown.
    """

    def __init__(self, syntax: OutputSyntax, markers: Markers, rules: Rules | None) -> None:
        self._tokens = syntax.spelled
        self._markers = markers
        self._rules = rules
        self._kind: Literal["text", "reasoning"] | None = None
        """What text is shown as in the present state, None where it is not shown."""
        self._held = ""  # the beginning of a marker, perhaps
        self._blank = Blanks()  # white space outside of frames, where it may yet be answer text
        self._taken = 0  # characters, but for texts that were shown as they are: none is while anything is held back
        self._shown = False  # the token made reasoning visible
        self._pending = 0  # tokens within reasoning that are part of a frame, perhaps
        self.reasoning_tokens = 0

    @property
    def reasoning_open(self) -> bool:
        return self._kind == "reasoning"

    @property
    def undecided(self) -> int:
        return self._taken - self._blank.start if self._blank else self._undecided()

    @property
    def calling(self) -> Literal["no", "undecided", "yes"]:
        return "yes" if self._rules is not None and self._rules.begun else "no"

    def drain(self) -> Iterable[Piece]:
        held, self._held = self._held, ""
        if held:
            yield from self._text(held, 0)
        yield from self._end()

    def push(self, token: int, text: str) -> Iterable[Piece]:
        kind = self._kind
        if (
            text
            and kind is not None
            and not self._undecided()
            and (token not in self._tokens if self._tokens else self._markers.absent(text))
            and self._plain(text)
        ):
            # By far the most tokens: nothing is held back, and nothing in this one needs to be.
            if kind == "reasoning":
                self.reasoning_tokens += token >= 0
                return (Piece("reasoning", text),)
            return (Piece("text", text),) if self._rules is None or self._rules.shows_text else ()
        return self._push(token, text)

    def end(self, *, natural: bool) -> Iterable[Piece]:
        self._shown = False
        held, self._held = self._held, ""
        if held and self._kind is not None:  # where no text is shown, it is a marker that was cut
            yield from self._text(held, 0)
        yield from self._end()
        if self._shown:
            self.reasoning_tokens += self._pending
        if natural and self._cut():
            raise cut_off()
        if self._rules is not None:
            self._rules.end()

    def _marker(self, marker: str, behind: int) -> Iterator[Piece]:
        """Takes a marker; `behind` is how many characters of what came are behind it."""
        raise NotImplementedError

    def _text(self, text: str, behind: int) -> Iterator[Piece]:
        """Takes text between markers, any part of it; `behind` is as in `Piece`."""
        raise NotImplementedError

    def _end(self) -> Iterator[Piece]:
        """Returns what the format held back itself, where that is text after all."""
        raise NotImplementedError

    def _cut(self) -> bool:
        """Whether an answer that ends here would lack the rest of a call."""
        raise NotImplementedError

    def _undecided(self) -> int:
        """How many characters are held back, since they may belong to a frame."""
        return len(self._held)

    def _plain(self, text: str) -> bool:
        """Whether text without markers is shown as it is in the present state, nothing held back of it."""
        return True

    def _push(self, token: int, text: str) -> Iterator[Piece]:
        self._shown = False
        self._taken += len(text)
        within = self._kind == "reasoning"
        if not self._tokens:
            yield from self._read(text)
        elif token in self._tokens and (marker := self._markers.at_end(text)):
            if before := text.removesuffix(marker):
                yield from self._text(before, len(marker))
            within = False
            yield from self._marker(marker, 0)
        elif text:
            yield from self._text(text, 0)
        if token >= 0:
            self._count(text, within and self._kind == "reasoning")

    def _read(self, text: str) -> Iterator[Piece]:
        """Finds the markers in text; what may become one with the text that comes next is held back."""
        data, self._held = self._held + text, ""
        at = 0
        while (found := self._markers.search(data, at)) is not None:
            if at < found.start():
                yield from self._text(data[at : found.start()], len(data) - found.start())
            at = found.end()
            yield from self._marker(found[0], len(data) - at)
        certain = self._markers.certain(data, at)
        self._held = data[certain:]
        if at < certain:
            yield from self._text(data[at:certain], len(data) - certain)

    def _count(self, text: str, within: bool) -> None:
        """Counts a token as reasoning if it showed some, or was `within` it and is no part of a frame."""
        undecided = 0 < len(text) <= self._undecided()
        if self._shown:
            self.reasoning_tokens += self._pending
        if self._shown or self._kind != "reasoning":
            self._pending = 0
        if undecided and self._kind == "reasoning":
            self._pending += 1
        elif self._shown or within:
            self.reasoning_tokens += 1

    def _show(self, text: str, behind: int) -> Iterator[Piece]:
        """Shows text as the present state does."""
        if self._kind == "reasoning":
            self._shown = True
            yield Piece("reasoning", text)
        elif self._kind == "text" and (self._rules is None or self._rules.shows_text):
            yield Piece("text", text, behind=behind)
