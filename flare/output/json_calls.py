"""Calls as JSON objects behind an opening tag, one by one or in an array, as several families write them:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>          "hermes": Qwen 2.5 and 3, and many others
    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]             Granite 3, which closes nothing
    <|tool_call|>{"name": "f", "arguments": {...}}<|/tool_call|>      Phi-4-mini
    <tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>      Jamba, Hunyuan, Apriel
    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}]     Mistral, see `mistral.py`

A tag begins a call where an object's first member follows that calls have; any other mention is text. The array's end and
the closing tag may be missing. One pair of the tags of "hermes" may hold several objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from flare.conversation import MAX_NESTING
from flare.output.faults import not_json
from flare.output.interface import Said
from flare.output.json_objects import ObjectReader, read_call
from flare.output.openers import CallFormat, Opener
from flare.output.scanning import SPACE, behind_space

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("id", "type")
"""Members beside name and arguments: the id that a model makes up, and the word "function"."""


class Heads:
    """How the object of a call may begin, one token of JSON after the other; white space may stand between them."""

    def __init__(self, heads: Iterable[tuple[str, ...]], no_gaps: Iterable[str] = ()) -> None:
        """Behind what `no_gaps` lists white space is no gap."""
        heads = list(heads)
        self.whole = frozenset("".join(head) for head in heads)
        self.gaps = frozenset("".join(head[:count]) for head in heads for count in range(len(head))) - set(no_gaps)

    def may_be(self, seen: str) -> bool:
        """Whether one begins so; `seen` has no white space between tokens."""
        return any(head.startswith(seen) for head in self.whole)


class JsonReader:
    """See `CallReader`. What lies outside of the objects is taken by a format's own `_takes`."""

    __slots__ = ("_called", "_object", "_parts", "_seen", "call", "certain")

    heads: Heads
    arguments: tuple[str, ...] = ARGUMENTS
    ignored: tuple[str, ...] = IGNORED

    def __init__(self, opener: str) -> None:
        self._parts = [opener]
        self._seen = ""  # of a head or a closing tag, without white space
        self._called = False  # a call of this opener is complete
        self._object: ObjectReader | None = None
        self.certain = len(opener)
        self.call = ("", "")

    @property
    def held(self) -> str:
        return "".join(self._parts)

    @property
    def within(self) -> bool:
        return self._object is not None

    @property
    def incomplete(self) -> bool:
        return self.within or not self._called or self._seen.startswith("{")

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        if self._object is not None:
            return self._read(self._object, data, at)
        begin = at
        while at < len(data):
            if data[at] in SPACE and self._gap():
                at = behind_space(data, at)
                continue
            said = self._takes(data[at])
            if said == "more":
                at += 1
                continue
            if said == "text":
                self._parts.append(data[begin:at])
                return said, at
            if said == "begun":
                self._parts.append(data[begin : at + 1])
                self._begin()
            return said, at + 1
        self._parts.append(data[begin:])
        return "more", len(data)

    def _gap(self) -> bool:
        """Whether white space that comes now stands between tokens."""
        return self._seen in self.heads.gaps

    def _takes(self, char: str) -> Said:
        """Takes a character outside of objects and gaps. begun: it is the last one of a head."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Goes on with the object whose head has been held."""
        written = self.held
        self._object = ObjectReader(max_depth=MAX_NESTING + 1)
        self._object.feed(written, written.index("{", self.certain if written[:1] != "{" else 0))
        self._parts, self._seen, self.certain = [], "", 0

    def _read(self, reader: ObjectReader, data: str, at: int) -> tuple[Said, int]:
        at = reader.feed(data, at)
        if not reader.complete:
            return "more", at
        self.call = read_call(reader.text, self.arguments, self.ignored)
        self._object, self._called = None, True
        return "call", at


class HermesReader(JsonReader):
    """What follows one `<tool_call>`."""

    __slots__ = ()

    arguments, ignored = ("arguments",), ()
    opener, closer = "<tool_call>", "</tool_call>"
    heads = Heads([("{", '"name"', ":", '"'), ("{", '"arguments"', ":", "{"), ("{", '"arguments"', ":", '"')])

    def _takes(self, char: str) -> Said:
        seen = self._seen + char
        if not self.heads.may_be(seen) and not (self._called and self.closer.startswith(seen)):
            return "text"
        self._seen = seen
        return "begun" if seen in self.heads.whole else "done" if seen == self.closer else "more"


class ArrayReader(JsonReader):
    """What follows one tag behind which an array of calls or a single one stands."""

    __slots__ = ("_array", "_closer", "_place")

    heads = Heads(
        (*begin, f'"{name}"', ":", value)
        for begin in ("[{", "{")
        for name, values in (("name", '"'), ("id", '"'), ("type", '"'), *((name, '{"') for name in ARGUMENTS))
        for value in values
    )

    def __init__(self, opener: str, closer: str | None) -> None:
        super().__init__(opener)
        self._closer = closer
        self._array = False
        self._place: Literal["head", "between", "next", "end"] = "head"

    @property
    def within(self) -> bool:
        return self._object is not None or self._place in ("between", "next")

    @property
    def incomplete(self) -> bool:
        return self._object is not None or self._place in ("head", "next")

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        if self._place == "between" and self._object is None:
            at = self._take_end(data, at)
        if self._place == "end" and self._closer is None and self._object is None:
            return "done", at
        return super().feed(data, at)

    def _take_end(self, data: str, at: int) -> int:
        """Takes the white space behind an object of an array, and the array's end, which no text can have; returns how far."""
        at = behind_space(data, at)
        if data[at : at + 1] != "]":
            return at
        self._place = "end"
        return at + 1

    def _read(self, reader: ObjectReader, data: str, at: int) -> tuple[Said, int]:
        self._place = "between" if self._array else "end"
        return super()._read(reader, data, at)

    def _gap(self) -> bool:
        return super()._gap() if self._place == "head" else not self._seen

    def _takes(self, char: str) -> Said:
        if self._place == "head":
            return self._takes_head(char)
        if self._place != "end":
            return self._takes_between(char)
        assert self._closer is not None
        if not self._closer.startswith(self._seen + char):
            return "text"
        self._seen += char
        return "done" if self._seen == self._closer else "more"

    def _takes_head(self, char: str) -> Said:
        self._seen += char
        self._array = self._seen[0] == "["
        return "begun" if self._seen in self.heads.whole else "more" if self.heads.may_be(self._seen) else "text"

    def _takes_between(self, char: str) -> Said:
        """Behind an object of an array."""
        if self._place == "next" and char == "{":
            return "begun"
        if self._place == "next" or char != ",":
            raise not_json()
        self._place = "next"
        self._parts.clear()
        return "more"


HERMES = CallFormat((Opener(HermesReader.opener),), lambda opener, _tools: HermesReader(opener))
GRANITE = CallFormat((Opener("<|tool_call|>"),), lambda opener, _tools: ArrayReader(opener, "<|/tool_call|>"))
JAMBA = CallFormat((Opener("<tool_calls>"),), lambda opener, _tools: ArrayReader(opener, "</tool_calls>"))
