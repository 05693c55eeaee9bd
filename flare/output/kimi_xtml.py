"""The "kimi_xtml" format of replies: channels `think`, `response` and `tools`, and calls, all in tags of control tokens.

    <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

Arguments of type string are verbatim, all others are JSON; one `json` block may stand for all of a call's arguments.
What the machine decides where models leave it open:

- A channel may end without its closing tag, where the next one opens. A call opens `tools` by itself.
- Text outside of channels is answer text; white space that stands alone there is not.
- A channel's tag without its `<|sep|>` ends at the next tag. One that closes what is not open is dropped, and so is a cut one.
- The reply ends with its message, and what comes then is dropped. Opening any other channel is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flare.conversation import Tools
from flare.output.faults import cut_off, malformed
from flare.output.framed import FramedMachine
from flare.output.interface import OutputError, OutputSyntax, Piece
from flare.output.markers import marker_set
from flare.output.openers import Frames, ReplyFormat, Way
from flare.output.rules import Rules
from flare.output.xtml import CLOSE, OPEN, SEP, Tag, XtmlCall, misplaced

END = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)

MAX_TAG = 8192
"""Most characters of a tag. Names and keys stand in tags, values never do."""

_CHANNELS = ("think", "response", "tools")


class KimiMachine(FramedMachine):
    """See `Output`. The prompt ends within `think` or within `response`."""

    def __init__(self, syntax: OutputSyntax, rules: Rules | None, *, opens_reasoning: bool) -> None:
        super().__init__(syntax, marker_set(*MARKERS), rules)
        self._place = ""  # a channel, "outside" of all, or "ended"
        self._tag: list[str] | None = None  # what has come of a tag
        self._opens = False  # the tag opens something
        self._left = 0  # characters that the tag may still have
        self._call: XtmlCall | None = None
        self._called = False  # the tools channel has had a call
        self._move("think" if opens_reasoning else "response")

    def _marker(self, marker: str, behind: int) -> Iterator[Piece]:
        if self._place == "ended":
            return
        if self._tag is not None:
            tag, self._tag = Tag(self._opens, "".join(self._tag)), None
            begins = tag.opens and tag.name == "call" and self._rules is not None
            if marker != SEP and (begins or self._call is not None):
                raise malformed("a tag that is not closed")
            yield from self._take(tag)
        elif marker == SEP and self._call is not None:
            raise malformed("a separator where none can stand")
        if marker == END:
            self._close_message()
        elif marker != SEP and self._place != "ended":
            self._tag, self._opens, self._left = [], marker == OPEN, MAX_TAG
            self._kind = None

    def _text(self, text: str, behind: int) -> Iterator[Piece]:
        if self._tag is not None:
            self._left -= len(text)
            if self._left < 0:
                raise OutputError(f"the model wrote a tag of more than {MAX_TAG} characters")
            self._tag.append(text)
        elif self._call is not None:
            self._call.take_text(text)
        elif self._place == "outside":
            self._blank.add(text, self._taken - behind)
            if not text.isspace():
                runs = self._blank.take()
                self._move("response")
                for part, end in runs:
                    yield from self._show(part, self._taken - end)
        elif self._kind is not None:
            yield from self._show(text, behind)
        elif self._place == "tools" and self._rules is not None and not text.isspace():
            raise OutputError("the model wrote text between its tool calls")

    def _end(self) -> Iterable[Piece]:
        return ()

    def _cut(self) -> bool:
        if self._place != "tools" or self._rules is None:
            return False
        opening = self._tag is not None and self._opens and "call".startswith(Tag(True, "".join(self._tag)).name)
        return self._call is not None or opening or not self._called

    def _take(self, tag: Tag) -> Iterator[Piece]:
        """Takes a whole tag."""
        if self._call is not None:
            if self._call.take_tag(tag):
                call, self._call = self._call, None
                assert self._rules is not None
                yield Piece("call", call=self._rules.complete(call.name, call.arguments()))
        elif tag.opens:
            self._open(tag)
        elif tag.name == self._place or (not tag.name and self._place != "tools"):
            self._move("outside")
        elif tag.name == "message":
            self._close_message()
        else:
            self._move(self._place)

    def _open(self, tag: Tag) -> None:
        name = tag.name
        if name == "call":
            if self._rules is not None:
                self._call = XtmlCall(tag)
                self._rules.begin()
            self._called = True
            self._move("tools")
        elif name in _CHANNELS:
            self._called = False
            self._move(name)
        elif name == "message":
            self._close_message()
        elif self._place != "tools" or self._rules is not None:
            if name in ("argument", "json"):
                raise misplaced(tag)
            raise OutputError(f"the model opened the channel {name[:80]!r}, and its format has {', '.join(_CHANNELS)}")

    def _close_message(self) -> None:
        if self._cut():
            raise cut_off()
        self._move("ended")

    def _move(self, place: str) -> None:
        self._place = place
        self._kind = "reasoning" if place == "think" else "text" if place == "response" else None
        self._blank.clear()


def _ways(before: str, tools: Tools, *others: Way) -> tuple[Way, ...]:
    """What may follow the closing tag of a channel, which `before` is."""
    return (*others, *([Way(f"{before}{OPEN}tools{SEP}", "call")] if tools.offered else []))


FORMAT = ReplyFormat(
    lambda syntax, _tools, rules, *, opens_reasoning, continues: KimiMachine(
        syntax, rules, opens_reasoning=opens_reasoning
    ),
    MARKERS,
    frames=Frames(
        close=CLOSE,
        first=lambda tools: _ways(f"{CLOSE}response{SEP}", tools),
        behind=lambda tools: _ways(f"think{SEP}", tools, Way(f"think{SEP}{OPEN}response{SEP}", "answer")),
        direct=True,
    ),
)
