"""The "muse_atem" format of replies: messages whose headers say whom they are for.

    <|start|>assistant to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>

To `self` is reasoning, to `user` and `commentary` (or to nobody) is answer text, to `developer` is left out; to anybody
else is a call, see `atem.py`. The prompt of a new reply ends within the first header, behind `assistant`. What the machine
decides where models leave it open:

- Messages are joined as they are, nothing is put between them.
- A message also ends where the next header begins, `<|start|>` or, without it, ` to=NAME<|message|>`.
- Where the prompt ended within a header, text that cannot belong to one is answer text; so is text between messages.
- The reply ends with `<|eot|>`, or where a message of another role begins; what comes then is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from flare.conversation import Tools
from flare.output.atem import AtemReader
from flare.output.framed import FramedMachine
from flare.output.interface import OutputError, OutputSyntax, Piece
from flare.output.markers import marker_set
from flare.output.openers import Frames, ReplyFormat, Way
from flare.output.rules import Rules
from flare.output.scanning import SPACE

MARKERS = START, MESSAGE, EOM, EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"

MAX_HEADER = 512
"""Most characters of a header. Names have at most 256 and two more."""

Place = Literal["outside", "header", "reasoning", "answer", "dropped", "call", "ended"]
"""Where the text goes that comes. `header` is behind `<|start|>`; `outside` of messages a header may come without it."""

_ROLE, _TO = "assistant", "to="
_PLACES: dict[str, Place] = {"self": "reasoning", "user": "answer", "commentary": "answer", "developer": "dropped"}
_HEADER_AT_END = re.compile(rf"(?<![^{SPACE}])t(?:o(?:=[^{SPACE}]{{0,{MAX_HEADER - len(_TO)}}}+)?)?\Z")
_SHOWN: dict[Place, Literal["text", "reasoning"]] = {"reasoning": "reasoning", "answer": "text"}


class MuseMachine(FramedMachine):
    """See `Output`."""

    def __init__(
        self, syntax: OutputSyntax, tools: Tools, rules: Rules | None, *, opens_reasoning: bool, continues: bool
    ) -> None:
        """A prompt ends within a message's header, unless it ends within reasoning or an answer that is continued."""
        super().__init__(syntax, marker_set(*MARKERS), rules)
        self._tools = tools
        self._reader: AtemReader | None = None  # of a message that is a call
        self._header = ""  # what has come of a header; within a message, what may be one that lacks its `<|start|>`
        self._edge = True  # such a header may begin here
        self._place: Place
        self._move("reasoning" if opens_reasoning else "answer" if continues else "outside")

    def _marker(self, marker: str, behind: int) -> Iterator[Piece]:
        if self._place == "ended":
            return
        behind += len(marker)
        if marker == MESSAGE:
            yield from self._open(behind)
            return
        if self._place not in ("header", "outside"):
            yield from self._release(behind)
            self._close()
        self._move("header" if marker == START else "outside" if marker == EOM else "ended")

    def _text(self, text: str, behind: int) -> Iterator[Piece]:
        if self._place == "header":
            self._header += text
            if len(self._header) > MAX_HEADER:
                raise OutputError(f"the model wrote a message header of more than {MAX_HEADER} characters")
        elif self._place == "outside":
            if not self._header:
                written, text = text, text.lstrip()
                if len(text) < len(written):
                    self._blank.add(written[: len(written) - len(text)], self._taken - behind - len(text))
            self._header += text
            if not _may_be_header(self._header):
                text = "".join((*(part for part, _ in self._blank.take()), self._header))
                self._move("answer")
                yield from self._read_body(text, behind)
        elif self._place != "ended":
            yield from self._read_body(text, behind)

    def _end(self) -> Iterator[Piece]:
        if self._place not in ("header", "outside"):
            yield from self._release(0)

    def _cut(self) -> bool:
        return self._reader is not None and self._reader.incomplete

    def _undecided(self) -> int:
        return len(self._held) + len(self._header)

    def _plain(self, text: str) -> bool:
        if _word_at(text, self._edge) < len(text):
            return False
        self._edge = text[-1] in SPACE
        return True

    def _open(self, behind: int) -> Iterator[Piece]:
        """Begins the text of a message; `behind` is how many characters came since its header."""
        if self._place in ("header", "outside") or self._header.startswith(_TO):
            recipient = _recipient(self._header)
            if recipient is None and self._place == "outside":
                recipient = ""  # the beginning of a word
            self._close()
        else:
            yield from self._release(behind)
            return
        if recipient is None:
            self._move("ended")
        elif recipient in _PLACES or not recipient:
            self._move(_PLACES[recipient or "user"])
        elif self._rules is None:
            self._move("dropped")
        else:
            self._move("call")
            self._reader = AtemReader(self._tools)

    def _close(self) -> None:
        """Ends a message."""
        if self._cut():
            raise OutputError("the model ended a message to a tool without a whole tool call")
        self._reader = None

    def _read_body(self, text: str, behind: int) -> Iterator[Piece]:
        """Takes text of a message; what may be the next header is held back."""
        data = self._header + text
        at = _word_at(data, self._edge)
        self._header = data[at:]
        self._edge = at < len(data) or data[-1] in SPACE
        if at:
            yield from self._body(data[:at], behind + len(data) - at)

    def _release(self, behind: int) -> Iterator[Piece]:
        """Takes for text what could have been a header."""
        held, self._header = self._header, ""
        if held:
            self._edge = False
            yield from self._body(held, behind)

    def _body(self, text: str, behind: int) -> Iterator[Piece]:
        if self._reader is None:
            yield from self._show(text, behind)
            return
        assert self._rules is not None
        at = 0
        while at < len(text):
            said, at = self._reader.feed(text, at)
            if said == "begun":
                self._rules.begin()
            elif said == "call":
                yield Piece("call", call=self._rules.complete(*self._reader.call))

    def _move(self, place: Place) -> None:
        self._place = place
        self._kind = _SHOWN.get(place)
        self._header = ""
        self._edge = True
        self._blank.clear()


def _recipient(header: str) -> str | None:
    """Returns whom a message is for, "" if its header does not say; None for one of another role. Raises OutputError."""
    header = header.strip()
    role, _, rest = header.partition(" ") if not header.startswith(_TO) else (_ROLE, "", header)
    if role not in (_ROLE, ""):
        return None
    rest = rest.strip()
    if rest and not rest.startswith(_TO):
        raise OutputError(f"the model wrote the message header {header[:80]!r}, and its format has 'assistant to=NAME'")
    return rest.removeprefix(_TO).strip()


def _may_be_header(text: str) -> bool:
    """Whether text outside of messages, without leading white space, may be a header or the beginning of one."""
    if len(text) > MAX_HEADER or "\n" in text:
        return False
    if text.startswith(_ROLE):
        rest = text[len(_ROLE) :]
        text = rest.lstrip()
        return (not rest or text != rest) and (text.startswith(_TO) or _TO.startswith(text))
    return text.startswith(_TO) or _TO.startswith(text) or _ROLE.startswith(text)


def _word_at(text: str, edge: bool) -> int:
    """Returns where the last word of a text begins if it may be a header, else the text's length.

    `edge`: a word may begin where the text begins.
    """
    found = _HEADER_AT_END.search(text)
    return len(text) if found is None or not (found.start() or edge) else found.start()


def _ways(start: str, reasons: bool, tools: Tools) -> tuple[Way, ...]:
    """The headers of messages behind `start`."""
    heads = [(f"{_TO}user{MESSAGE}", "answer"), (f"{_TO}self{MESSAGE}", "reasoning")][: 1 + reasons]
    calls = [Way(f"{start} {_TO}{name}{MESSAGE}", "call") for name in tools.declared if name not in _PLACES]
    return (*(Way(f"{start} {head}", to) for head, to in heads), *calls)  # type: ignore[arg-type]


FORMAT = ReplyFormat(
    MuseMachine,
    MARKERS,
    frames=Frames(
        close=EOM,
        first=lambda tools: _ways("", True, tools),
        behind=lambda tools: _ways(f"{START}{_ROLE}", False, tools),
        direct=False,
    ),
)
