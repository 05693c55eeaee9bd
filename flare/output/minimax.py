"""The "minimax" syntax of calls: elements, each of whose tags stands behind the text `]<]minimax[>[`, here `:`.

    :<tool_call>
    :<invoke name="NAME">:<KEY>text:</KEY>:<KEY>:<item>:<KEY>text:</KEY>:</item>:</KEY>:</invoke>
    :</tool_call>

The opener always starts a call, and what does not follow this grammar is an error: white space may stand between tags,
other text only in elements that hold no others. Elements named item make an array, others an object; texts are converted
by the tool's schema, and kept as they are where that wants a string. A call is complete with its `</invoke>`.

Deployed checkpoints leave out the opening tag of a first argument (`:text:</KEY>`): the closing tag tells its name.
"""

from __future__ import annotations

from flare.conversation import MAX_NESTING, Tools
from flare.output.elements import Element, arguments_of
from flare.output.faults import malformed, nameless, too_deep
from flare.output.interface import Said
from flare.output.openers import CallFormat, Opener
from flare.output.scanning import SPACE, Expected, Room, Until, unescaped
from flare.output.schemas import Schemas

PREFIX = "]<]minimax[>["
BLOCK, INVOKE = "tool_call", "invoke"
OPENERS = (Opener(f"{PREFIX}<{BLOCK}>"),)

_TAG = f"{PREFIX}<"


class MiniMaxReader:
    """What follows one opener, see `CallReader`."""

    __slots__ = ("_before", "_called", "_name", "_open", "_quote", "_room", "_tag", "_tools", "call")

    certain = 0

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._before: Expected | Until = Expected(_TAG)  # what comes before a tag
        self._tag: Until | None = None  # the tag, from its bracket on
        self._quote = ""  # that of a name that holds the bracket which ended the tag
        self._called = False  # a call of this block is complete
        self._name = ""
        self._open: list[Element] = []  # the first one is the call
        self._room = Room()
        self.call = ("", "")

    @property
    def held(self) -> str:
        if self._tag is not None:
            return _TAG + self._tag.text
        return self._before.seen if isinstance(self._before, Expected) else ""

    @property
    def within(self) -> bool:
        return bool(self._open) or not self._called

    @property
    def incomplete(self) -> bool:
        return self.within or (self._tag is not None and self._tag.text[:1] not in ("", "/"))

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        begin, within = at, self.within
        said: Said = "more"
        while said == "more" and at < len(data):
            if self._tag is None:
                at = self._read_before(data, at)
                continue
            end = self._tag.feed(data, at)
            if end is None:
                at = len(data)
                break
            at = end
            said = self._take(self._tag.text + self._quote)
        if within or self._tag is not None:
            self._room.take(data[begin:at])
        if said == "call":
            self._room = Room()
        return said, at

    def _read_before(self, data: str, at: int) -> int:
        if isinstance(self._before, Until):
            found = self._before.feed(data, at)
            if found is None:
                return len(data)
            self._open[-1].text = self._before.text
            at = found
        else:
            word, at = self._before.feed(data, at)
            if word is None:
                return at
            if word == "":
                if self._before.seen != PREFIX or len(self._open) != 1:
                    raise malformed(f"{data[at]!r} where a tag is due")
                self._open.append(Element(None))
                self._before = Until(_TAG)
                return at
        self._tag = Until(">")
        return at

    def _take(self, tag: str) -> Said:
        """Takes a tag, without its brackets, and decides what may stand behind it."""
        said: Said = "more"
        if self._open:
            said = self._take_inner(tag)
        elif tag[: len(INVOKE)] == INVOKE and tag[len(INVOKE) :][:1] in SPACE:
            name = _name(tag)
            if name is None:
                self._quote = tag[tag.index("=") + 1 :].lstrip(SPACE)[0]
                self._tag = Until(f"{self._quote}>", f"{tag}>")
                return "more"
            self._name, said = name, "begun"
            self._open.append(Element(INVOKE))
        elif tag == f"/{BLOCK}" and self._called:
            said = "done"
        elif tag != BLOCK or not self._called:
            raise malformed(f"the tag {tag[:20]!r} where {INVOKE!r} is due")
        self._tag, self._quote = None, ""
        leaf = len(self._open) > 1 and not self._open[-1].members
        self._before = Until(_TAG) if leaf else Expected(_TAG)
        return said

    def _take_inner(self, tag: str) -> Said:
        top = self._open[-1]
        if not tag.startswith("/"):
            if top.name is None or top.text.strip():
                raise malformed(f"the tag {tag[:20]!r} behind text")
            if len(self._open) > MAX_NESTING:
                raise too_deep()
            self._open.append(Element(tag))
            return "more"
        if top.name is None:
            top.name = tag[1:]
        elif top.name != tag[1:]:
            raise malformed(f"the closing tag {tag[:20]!r} within {top.name[:20]!r}")
        self._open.pop()
        if self._open:
            self._open[-1].members.append(top)
            return "more"
        self.call = (self._name, arguments_of(top, Schemas.of_tool(self._tools, self._name)))
        self._called = True
        return "call"


def _name(tag: str) -> str | None:
    """Returns the name that a tag of a call gives, None where the tag ends within it. Raises OutputError."""
    attribute, _, value = tag[len(INVOKE) :].partition("=")
    value = value.strip(SPACE)
    if attribute.strip(SPACE) != "name" or value[:1] not in ('"', "'"):
        raise malformed(f"the tag {tag[:20]!r} without a name")
    if len(value) < 2 or value[-1] != value[0]:
        return None
    name = unescaped(value[1:-1])
    if not name.strip():
        raise nameless()
    return name


FORMAT = CallFormat(OPENERS, lambda _opener, tools: MiniMaxReader(tools))
