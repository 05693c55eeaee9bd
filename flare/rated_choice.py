"""A choice whose tokens come with their log probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flare.conversation import Logprobed, Text
from flare.generation import NATURAL, NO_TOKEN, Choice
from flare.output import OutputError, Piece
from flare.token_entries import Entries

if TYPE_CHECKING:
    from flare.engine import Delivery


class RatedChoice(Choice):
    """See `Choice`. Each entry goes out before the event that shows its token, or with the last one of the step that decides
    what becomes of it. The other events are those of a choice without."""

    __slots__ = ("_entries",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._entries = Entries(self.index, held=self.output is not None or self.stops is not None)

    def _receive_text(self, delivery: Delivery) -> None:
        self._receive_pieces(delivery)

    def _receive_pieces(self, delivery: Delivery) -> None:
        entries = self._entries
        for token, entry in zip(delivery.tokens, delivery.logprobs, strict=True):
            self._unreported += 1
            if self.answer.observe:
                self._ids.append(token)
            entries.add(entry, *self.decoder.ahead(token))
            if self._pass_on_text(token, self.decoder.push(token)):
                return
        if delivery.finished is None:
            if self._send(entries.release(self._decided())) or self._unreported:
                self._emit(Text, "")
            return
        self._take_stop_tokens(delivery)
        if self._pass_on_text(NO_TOKEN, self.decoder.flush()):
            return
        if self.output is not None:
            natural = delivery.finished.value in NATURAL
            if self._pass_on(self.output.end(natural=natural)):
                return
        self._send(entries.end())
        self._end(delivery, "" if self.stops is None else self.stops.flush(), None)

    def _pass_on_text(self, token: int, text: str) -> bool:
        self._entries.length += len(text)
        return self._pass_on(self._pieces(token, text))

    def _decided(self) -> int:
        """The place before which it is known what is answer text."""
        return self._entries.length - (0 if self.output is None else self.output.undecided)

    def _pass_on(self, pieces: Iterable[Piece]) -> bool:
        found, error = taken(pieces)
        # Pieces do not tell where reasoning and calls end, so entries up to the next text go with what is before it.
        ends = [self._decided()]
        for piece in reversed(found[1:]):
            ends.append(self._end_of(piece) - len(piece.text) if piece.kind == "text" else ends[-1])
        for piece, end in zip(found, reversed(ends), strict=False):
            if self._pass_on_piece(piece, end):
                return True
        if error is not None:
            raise error
        return False

    def _end_of(self, piece: Piece) -> int:
        return self._entries.length - piece.behind

    def _pass_on_piece(self, piece: Piece, end: int) -> bool:
        """As `_pass_on`, of one piece, with the entries of tokens before the place `end`."""
        entries, stops = self._entries, self.stops
        if piece.kind == "text":
            text, matched = piece.text, None
            entries.answer(self._end_of(piece), len(text))
            if stops is not None:
                text, matched = stops.push(text)
            entries.shown += len(text)
            if matched is not None:
                self._complain()
                self._send(entries.cut())
                self._stop(text, matched)
                return True
            if text:
                self._send(entries.release(max(end, self._end_of(piece))))
                self._emit(Text, text)
            return False
        if stops is not None and (held := stops.flush()):
            entries.shown += len(held)
            self._send(entries.release(end))
            self._emit(Text, held)
        self._send(entries.release(end))
        self._emit_beside(piece)
        return False

    def _send(self, released: Logprobed | None) -> bool:
        """Passes entries on; returns whether there are any."""
        if released is None:
            return False
        self.answer.listener(released)
        return True


def taken(pieces: Iterable[Piece]) -> tuple[list[Piece], OutputError | None]:
    """Takes pieces to their end; returns them, and the error that was it."""
    found = []
    try:
        for piece in pieces:
            found.append(piece)  # one by one: those before the error count
    except OutputError as error:
        return found, error
    return found, None
