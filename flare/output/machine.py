"""The machine that splits one choice's output into reasoning, answer text and calls.

It sees each character a bounded number of times, and how the characters are cut into tokens does not matter, but for
delimiters that are tokens themselves. What it decides where models and clients leave it open:

- The line breaks right beside a reasoning delimiter belong to the delimiter.
- White space that stands alone beside calls or reasoning is not answer text: an answer of calls only has no text.
- A delimiter that is repeated, with nothing but white space between, is dropped. Any other that changes nothing is text.
- A call that begins within reasoning ends it. Within a call everything is its data, delimiters too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Literal

from flare.output.blanks import Blanks
from flare.output.faults import cut_off
from flare.output.interface import CallReader, OutputSyntax, Piece
from flare.output.markers import marker_set
from flare.output.openers import Calls
from flare.output.rules import Rules


class Machine:
    """See `Output`. Two states: reasoning or answer; a call is read by a reader of its syntax.

    Without `rules` no call may come: what looks like one is text.
    """

    __slots__ = (
        "_answer_markers",
        "_blank",
        "_breaks",
        "_calls",
        "_carried",
        "_close",
        "_close_token",
        "_divided",
        "_first",
        "_fresh",
        "_held",
        "_markers",
        "_open",
        "_open_token",
        "_openers",
        "_pending",
        "_reader",
        "_reasoning",
        "_reasoning_markers",
        "_rules",
        "_shown",
        "_since",
        "_taken",
        "_trim",
        "_whole",
        "reasoning_tokens",
    )

    def __init__(
        self, syntax: OutputSyntax, calls: Calls | None, rules: Rules | None, *, opens_reasoning: bool
    ) -> None:
        self._open: str | None
        self._close: str | None
        self._open, self._close = syntax.reasoning or (None, None)
        self._open_token = syntax.open_token if self._open is not None else None
        self._close_token = syntax.close_token if self._close is not None else None
        markers = [self._open if self._open_token is None else None, self._close if self._close_token is None else None]
        delimiters = [marker for marker in markers if marker is not None]
        self._calls = calls
        openers = () if calls is None else calls.openers
        within = [opener.text for opener in openers if opener.in_reasoning]
        self._openers = tuple(within)
        self._first = frozenset(opener.text for opener in openers if opener.first)
        self._answer_markers = marker_set(*delimiters, *(opener.text for opener in openers))
        self._reasoning_markers = marker_set(*delimiters, *within)
        self._rules = rules
        self._reasoning = opens_reasoning and self._open is not None
        self._markers = self._reasoning_markers if self._reasoning else self._answer_markers
        self._reader: CallReader | None = None
        self._held = ""  # the beginning of a marker, perhaps
        self._fresh = True  # nothing but white space since the last delimiter or call
        self._blank = Blanks()  # that white space, where it may yet be answer text
        self._taken = 0  # characters, but for texts that were shown as they are: none is while anything is held back
        self._since = 0  # where in these the reader's opener begins, or what it reads behind its latest call
        self._divided = self._reasoning  # the answer has had reasoning or a call
        self._trim = False  # the answer's next text follows a delimiter
        self._whole = True  # there has been one part only
        self._breaks = 0  # line breaks at the end of the reasoning
        self._shown = False  # the token made reasoning visible, of its own text
        self._carried = 0  # characters that came before the token and were undecided
        self._pending = 0  # tokens within reasoning that are part of a delimiter or a call, perhaps
        self.reasoning_tokens = 0

    @property
    def reasoning_open(self) -> bool:
        return self._reasoning and self._whole and self._reader is None and not self._opening

    @property
    def _opening(self) -> bool:
        """What is held back may well become the opener of a call: a single character says too little."""
        return len(self._held) > 1 and any(opener.startswith(self._held) for opener in self._openers)

    @property
    def undecided(self) -> int:
        if self._blank:
            return self._taken - self._blank.start
        if self._reader is not None:
            return 0 if self._reader.within else self._taken - self._since
        return len(self._held)

    @property
    def calling(self) -> Literal["no", "undecided", "yes"]:
        if self._rules is not None and self._rules.begun:
            return "yes"
        return "no" if self._reader is None else "undecided"

    def drain(self) -> Iterable[Piece]:
        return self._release(0)

    def push(self, token: int, text: str) -> Iterable[Piece]:
        if (
            text
            and not (self._held or self._fresh or self._breaks)
            and self._reader is None
            and token != self._open_token
            and token != self._close_token
            and self._markers.absent(text)
        ):
            # By far the most tokens: nothing is held back, and nothing in this one needs to be.
            if not self._reasoning:
                return (Piece("text", text),) if self._rules is None or self._rules.shows_text else ()
            if text[-1] != "\n":
                self.reasoning_tokens += token >= 0
                return (Piece("reasoning", text),)
        return self._push(token, text)

    def end(self, *, natural: bool) -> Iterable[Piece]:
        reader, self._reader = self._reader, None
        if reader is not None:
            if reader.incomplete:
                if natural:
                    raise cut_off()
                self._blank.clear()  # what was left out is part of the answer
            # Else what the reader holds is a cut closer, see `CallReader`.
        elif self._held:
            held, self._held = self._held, ""
            yield from self._show(held, 0)
            self._settle()
        if not self._divided:
            yield from self._show_blank(trim=False)
        if self._rules is not None:
            self._rules.end()

    def _push(self, token: int, text: str) -> Iterator[Piece]:
        self._shown = False
        self._taken += len(text)
        within = self._reasoning
        self._carried = len(self._held)
        if self._reader is not None and not self._reader.within:
            self._carried += len(self._reader.held)
        if token >= 0 and token in (self._open_token, self._close_token) and not (self._reader and self._reader.within):
            marker = self._open if token == self._open_token else self._close
            assert marker is not None
            before = text.removesuffix(marker)
            rest = len(text) - len(before)
            yield from self._read(before, rest)
            yield from self._release(rest)
            if self._shown:
                self._settle()
            self._shown, self._carried = False, 0  # what came with the token is not its own text
            yield from self._delimit(marker, text[len(before) :], 0)
        elif text:
            yield from self._read(text, 0)
        if token >= 0:
            self._count(text, within and self._reasoning)

    def _count(self, text: str, within: bool) -> None:
        """Counts a token as reasoning if it showed some, or was `within` it and is no part of a delimiter or call."""
        undecided = self._reader is not None or (self._held and len(self._held) >= len(text))
        if self._shown:
            self._settle()
        if not self._reasoning and not self._shown:
            self._pending = 0
        elif undecided:
            self._pending += 1
        elif self._shown or within:
            self.reasoning_tokens += 1

    def _settle(self) -> None:
        """Counts the tokens before, whose text has become visible."""
        self.reasoning_tokens += self._pending
        self._pending = 0

    def _read(self, text: str, rest: int) -> Iterator[Piece]:
        """Takes text; `rest` is how many characters of the token's come behind it."""
        data, self._held = self._held + text, ""
        at = 0
        while at < len(data):
            if self._reader is not None:
                data, at = yield from self._read_call(self._reader, data, at, rest)
                continue
            found = self._markers.search(data, at)
            if found is None:
                certain = self._markers.certain(data, at)
                shown, self._held = data[at:certain], data[certain:]
                yield from self._show(shown, len(data) - certain + rest)
                return
            yield from self._show(data[at : found.start()], len(data) - found.start() + rest)
            at = found.end()
            behind = len(data) - at + rest
            self._carried = 0
            marker = found[0]
            if marker == self._open or marker == self._close:
                yield from self._delimit(marker, marker, behind)
            elif marker in self._first and not self._fresh:
                yield from self._show(marker, behind)
            else:
                assert self._calls is not None
                self._reader = self._calls.reader(marker)
                self._since = self._taken - behind - len(marker)

    def _read_call(self, reader: CallReader, data: str, at: int, rest: int) -> Generator[Piece, None, tuple[str, int]]:
        """Feeds the reader once. Returns the data and the place in it to go on from."""
        assert self._rules is not None
        said, at = reader.feed(data, at)
        if said == "begun":
            self._divide(reasoning=False, trim=False)
            self._rules.begin()
        elif said == "call":
            self._since = self._taken - (len(data) - at + rest)
            yield Piece("call", call=self._rules.complete(*reader.call))
        elif said == "done":
            self._reader = None
        elif said == "text":
            self._reader = None
            held, certain = reader.held, reader.certain
            again = len(held) - certain
            yield from self._show(held[:certain], len(data) - at + again + rest)
            # What is looked at again is mostly in this data, right before; else it came before this data.
            return (data, at - again) if again <= at else (held[certain:] + data[at:], 0)
        return data, at

    def _release(self, behind: int) -> Iterator[Piece]:
        """Shows what a token that is a delimiter, of `behind` characters, leaves undecided for ever."""
        held, self._held = self._held, ""
        if self._reader is not None:
            held, self._reader = self._reader.held, None
        yield from self._show(held, behind)

    def _delimit(self, marker: str, spelling: str, behind: int) -> Iterator[Piece]:
        """Takes a delimiter. `spelling` is what it is where it turns out to be text."""
        opens = marker == self._open
        if opens != self._reasoning:
            self._divide(reasoning=opens, trim=not opens)
        elif self._fresh:
            self._trim = True
        else:
            yield from self._show(spelling, behind)

    def _divide(self, *, reasoning: bool, trim: bool) -> None:
        """Begins a new part of the answer."""
        self._reasoning = reasoning
        self._markers = self._reasoning_markers if reasoning else self._answer_markers
        self._divided = self._fresh = True
        self._whole = False
        self._trim = trim
        self._breaks = 0
        self._blank.clear()

    def _show(self, text: str, behind: int) -> Iterator[Piece]:
        """Shows text of the present part, as far as it is certain that it counts; `behind` is as in `Piece`."""
        if not text:
            return
        carried = len(text) <= self._carried
        self._carried = self._carried - len(text) if carried else 0
        if not self._reasoning:
            yield from self._show_answer(text, behind)
            return
        if self._fresh:
            text = text.lstrip("\n")
            if not text:
                return
        self._fresh = False
        ended = text.rstrip("\n")
        breaks, more = self._breaks, len(text) - len(ended)
        if ended:
            self._breaks = more
            if carried:
                self._settle()
            else:
                self._shown = True
            yield Piece("reasoning", "\n" * breaks + ended)
        else:
            self._breaks = breaks + more

    def _show_answer(self, text: str, behind: int) -> Iterator[Piece]:
        if not self._fresh:
            yield from self._answer(text, behind)
            return
        self._blank.add(text, self._taken - behind)
        if text.strip():
            self._fresh = False
            yield from self._show_blank(trim=self._trim)

    def _show_blank(self, *, trim: bool) -> Iterator[Piece]:
        """Shows what was blank, `trim` without the line breaks that it begins with."""
        for text, end in self._blank.take():
            if trim:
                text = text.lstrip("\n")
            if text:
                trim = False
                yield from self._answer(text, self._taken - end)

    def _answer(self, text: str, behind: int) -> Iterator[Piece]:
        if self._rules is None or self._rules.shows_text:
            yield Piece("text", text, behind=behind)
