"""Calls as JSON objects behind an opening tag, an array of them or a single one, as several families write them:

    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]             Granite 3, which closes nothing
    <|tool_call|>{"name": "f", "arguments": {...}}<|/tool_call|>      Phi-4-mini
    <tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>      Jamba, Hunyuan, Apriel
    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}]     Mistral, see `mistral.py`

A tag begins a call where an object's first member follows that calls have; any other mention is text. A call is complete
with its object: the array's end and the closing tag may be missing.
"""

from __future__ import annotations

from typing import Literal

from flare.conversation import MAX_NESTING
from flare.output.hermes import read_call
from flare.output.json_objects import MAX_CALL_BYTES, ObjectReader, malformed
from flare.output.openers import CallFormat, Opener

ARGUMENTS = ("arguments", "parameters")
IGNORED = ("id", "type")
"""Members beside name and arguments: the id that a model makes up, and the word "function"."""

SPACE = " \t\n\r"

_MEMBERS = (
    *(("name", '"'), ("id", '"'), ("type", '"')),
    *((name, begin) for name in ARGUMENTS for begin in '{"'),
)
_HEADS = [(*begin, f'"{name}"', ":", value) for begin in ("[{", "{") for name, value in _MEMBERS]
_WHOLE = frozenset("".join(head) for head in _HEADS)  # without white space; with one of them a call has begun
_GAPS = frozenset("".join(head[:count]) for head in _HEADS for count in range(len(head)))  # behind these it may stand

_Said = Literal["more", "begun", "call", "text", "done"]


class JsonCallsReader:
    """What follows one opening tag, see `CallReader`."""

    __slots__ = ("_array", "_closer", "_object", "_parts", "_place", "_seen", "call", "certain")

    def __init__(self, opener: str, closer: str | None) -> None:
        self._closer = closer
        self._parts = [opener]
        self._seen = ""  # of a head or the closing tag, without white space
        self._place: Literal["head", "between", "next", "end"] = "head"
        self._array = False
        self._object: ObjectReader | None = None
        self.certain = len(opener)
        self.call = ("", "")

    @property
    def held(self) -> str:
        return "".join(self._parts)

    @property
    def within(self) -> bool:
        return self._object is not None or self._place in ("between", "next")

    @property
    def incomplete(self) -> bool:
        return self._object is not None or self._place in ("head", "next")

    def feed(self, data: str, at: int) -> tuple[_Said, int]:
        if self._object is not None:
            return self._read(self._object, data, at)
        if self._place == "head":
            return self._head(data, at)
        if self._place == "end":
            return self._end(data, at)
        return self._between(data, at)

    def _read(self, reader: ObjectReader, data: str, at: int) -> tuple[_Said, int]:
        at = reader.feed(data, at)
        if not reader.complete:
            return "more", at
        self.call = read_call(reader.text, ARGUMENTS, IGNORED)
        self._object, self._seen = None, ""
        self._place = "between" if self._array else "end"
        return "call", at

    def _head(self, data: str, at: int) -> tuple[_Said, int]:
        begin = at
        for at in range(begin, len(data)):
            char = data[at]
            if char in SPACE and self._seen in _GAPS:
                continue
            self._seen += char
            if not any(head.startswith(self._seen) for head in _WHOLE):
                self._parts.append(data[begin:at])
                return "text", at
            if self._seen in _WHOLE:
                self._parts.append(data[begin : at + 1])
                written = self.held
                self._array = self._seen[0] == "["
                self._open(written[written.index("{", self.certain) :])
                return "begun", at + 1
        self._parts.append(data[begin:])
        return "more", len(data)

    def _open(self, written: str) -> None:
        self._parts, self.certain = [], 0
        self._object = ObjectReader(limit=MAX_CALL_BYTES, max_depth=MAX_NESTING + 1)
        self._object.feed(written, 0)

    def _between(self, data: str, at: int) -> tuple[_Said, int]:
        """Reads on behind an object of an array."""
        begin = at
        for at in range(begin, len(data)):
            char = data[at]
            if char in SPACE:
                continue
            if self._place == "next" and char == "{":
                self._open(char)
                return "begun", at + 1
            if self._place == "between" and char == ",":
                self._place = "next"
            elif self._place == "between" and char == "]":
                self._place = "end"
                return self._end(data, at + 1)
            else:
                raise malformed()
        return "more", len(data)

    def _end(self, data: str, at: int) -> tuple[_Said, int]:
        """Reads on behind the last call: takes the closing tag, if one comes."""
        if self._closer is None:
            return "done", at
        begin = at
        for at in range(begin, len(data)):
            char = data[at]
            if char in SPACE and not self._seen:
                continue
            self._seen += char
            if not self._closer.startswith(self._seen):
                self._parts.append(data[begin:at])
                return "text", at
            if self._seen == self._closer:
                return "done", at + 1
        self._parts.append(data[begin:])
        return "more", len(data)


GRANITE = CallFormat((Opener("<|tool_call|>"),), lambda opener, _tools: JsonCallsReader(opener, "<|/tool_call|>"))
JAMBA = CallFormat((Opener("<tool_calls>"),), lambda opener, _tools: JsonCallsReader(opener, "</tool_calls>"))
