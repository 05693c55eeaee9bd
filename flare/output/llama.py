"""The calls of Llama 3's models: `{"name": "f", "parameters": {...}}`, several of them with `;` between.

There is no opener, so a call begins only where the answer begins, or where one has just ended, and only with an object whose
first member is the name, before which `"type": "function"` may stand, and whose next one are the parameters. Any other
object, such as an answer in JSON, is text, from the first character on that tells. `<|python_tag|>` may stand before a call.
"""

from __future__ import annotations

from flare.output.interface import Said
from flare.output.json_calls import ARGUMENTS, Heads, JsonReader
from flare.output.openers import CallFormat, Opener
from flare.output.rules import LONGEST_NAME

PYTHON_TAG = "<|python_tag|>"
OPENERS = (Opener("{", in_reasoning=False, first=True), Opener(PYTHON_TAG, in_reasoning=False))

_TYPE = ('"type"', ":", '"function"', ",")
_BEGINS = [("{", *before, '"name"', ":", '"') for before in ((), _TYPE)]
_NAMES = frozenset("".join(begin) for begin in _BEGINS)  # behind these comes the name, which is left out of the heads


class LlamaReader(JsonReader):
    """What follows one opener."""

    __slots__ = ("_escaped", "_length", "_separated")

    heads = Heads(
        (
            (*begin, '"', ",", f'"{member}"', ":", value)
            for begin in _BEGINS
            for member in ARGUMENTS
            for value in ("{", '"', "n")
        ),
        no_gaps=_NAMES,
    )

    def __init__(self, opener: str) -> None:
        super().__init__(opener)
        if opener != PYTHON_TAG:
            self._seen = opener
        self._length = 0  # of the name as it is written
        self._escaped = False
        self._separated = True  # no semicolon may come

    @property
    def incomplete(self) -> bool:
        return self.within or not self._called or self._seen != ""

    def _takes(self, char: str) -> Said:
        if self._seen in _NAMES and (self._escaped or char != '"'):
            self._escaped = char == "\\" and not self._escaped
            self._length += 1
            return "more" if char >= " " and self._length <= LONGEST_NAME else "text"
        if char == ";" and not self._separated and not self._seen:
            self._separated = True
            return "more"
        seen = self._seen + char
        if not self.heads.may_be(seen):
            return "text"
        self._seen = seen
        if seen not in self.heads.whole:
            return "more"
        self._length, self._separated = 0, False
        return "begun"


FORMAT = CallFormat(OPENERS, lambda opener, _tools: LlamaReader(opener))
