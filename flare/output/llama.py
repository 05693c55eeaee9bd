"""The calls of Llama 3's models: `{"name": "f", "parameters": {...}}`, several of them with `;` between.

There is no opener, so a call begins only where the answer begins, or where one has just ended, and only with an object whose
first member is the name, before which `"type": "function"` may stand, and whose next one are the parameters. Any other
object, such as an answer in JSON, is text, from the first character on that tells. `<|python_tag|>` may stand before a call.
"""

from __future__ import annotations

from typing import Literal

from flare.conversation import MAX_NESTING
from flare.output.hermes import read_call
from flare.output.json_calls import ARGUMENTS, IGNORED, SPACE
from flare.output.json_objects import MAX_CALL_BYTES, ObjectReader
from flare.output.openers import CallFormat, Opener
from flare.output.rules import LONGEST_NAME

PYTHON_TAG = "<|python_tag|>"
OPENERS = (Opener("{", in_reasoning=False, first=True), Opener(PYTHON_TAG, in_reasoning=False))

_TYPE = ('"type"', ":", '"function"', ",")
_BEGINS = [("{", *before, '"name"', ":", '"') for before in ((), _TYPE)]
_HEADS = [
    (*begin, '"', ",", f'"{member}"', ":", value)
    for begin in _BEGINS
    for member in ARGUMENTS
    for value in ("{", '"', "n")
]
_NAMES = frozenset("".join(begin) for begin in _BEGINS)  # behind these comes the name, which is left out of the heads
_WHOLE = frozenset("".join(head) for head in _HEADS)  # without white space; with one of them a call has begun
_GAPS = frozenset("".join(head[:count]) for head in _HEADS for count in range(len(head))) - _NAMES

_Said = Literal["more", "begun", "call", "text", "done"]


class LlamaReader:
    """What follows one opener, see `CallReader`."""

    __slots__ = ("_after", "_escaped", "_length", "_object", "_parts", "_seen", "call", "certain")

    def __init__(self, opener: str) -> None:
        self._parts = [opener]
        self._seen = "" if opener == PYTHON_TAG else opener  # of a head, without white space and name
        self._length = 0  # of the name as it is written
        self._escaped = False
        self._after: Literal["", "call", ";"] = ""
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
        return self.within or not self._after or self._seen != ""

    def feed(self, data: str, at: int) -> tuple[_Said, int]:
        if self._object is None:
            return self._head(data, at)
        at = self._object.feed(data, at)
        if not self._object.complete:
            return "more", at
        self.call = read_call(self._object.text, ARGUMENTS, IGNORED)
        self._object, self._seen, self._after = None, "", "call"
        return "call", at

    def _head(self, data: str, at: int) -> tuple[_Said, int]:
        begin = at
        for at in range(begin, len(data)):
            char = data[at]
            if not self._takes(char):
                self._parts.append(data[begin:at])
                return "text", at
            if self._seen in _WHOLE:
                self._parts.append(data[begin : at + 1])
                written = self.held
                self._object = ObjectReader(limit=MAX_CALL_BYTES, max_depth=MAX_NESTING + 1)
                self._object.feed(written[written.index("{") :], 0)
                self._parts, self.certain, self._length = [], 0, 0
                return "begun", at + 1
        self._parts.append(data[begin:])
        return "more", len(data)

    def _takes(self, char: str) -> bool:
        """Takes a character of the head, if it can be one."""
        if self._seen in _NAMES and (self._escaped or char != '"'):
            self._escaped = char == "\\" and not self._escaped
            self._length += 1
            return char >= " " and self._length <= LONGEST_NAME
        if char in SPACE and self._seen in _GAPS:
            return True
        if self._after == "call" and not self._seen:
            self._after = ";"
            return char == ";"
        seen = self._seen + char
        if not any(head.startswith(seen) for head in _WHOLE):
            return False
        self._seen = seen
        return True


FORMAT = CallFormat(OPENERS, lambda opener, _tools: LlamaReader(opener))
