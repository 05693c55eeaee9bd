"""JSON objects that a model writes: where one ends, and its members in canonical form.

Nothing here backtracks: the end is found in one pass, whatever the pieces, and the members are read once it is known.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING
from flare.output.interface import OutputError

_OUTSIDE = re.compile(r"[^ \t\n\r0-9A-Za-z+\-.,:]")  # what can open or close something, and what is no JSON at all
_INSIDE = re.compile(r'["\\\x00-\x1f]')

MAX_CALL_BYTES = 2 * MAX_ARGUMENTS_BYTES
"""Most bytes of UTF-8 of a call as it is written: arguments within a string, or between tags, take more room than JSON."""


def malformed() -> OutputError:
    return OutputError("the model wrote a tool call that is not valid JSON")


class ObjectReader:
    """Finds the end of a JSON object that comes in pieces. White space may stand before it.

    What no JSON can hold is refused at once; the rest is checked by `read_object`, when the whole text is there.
    """

    __slots__ = ("_depth", "_escaped", "_left", "_limit", "_max_depth", "_parts", "_string", "complete")

    def __init__(self, *, limit: int, max_depth: int) -> None:
        """`limit`: most bytes of the object as it is written; `max_depth`: most levels, its own included."""
        self._limit = self._left = limit
        self._max_depth = max_depth
        self._parts: list[str] = []
        self._depth = 0
        self._string = False
        self._escaped = False
        self.complete = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, data: str, at: int) -> int:
        """Reads on from `data[at]`; returns where it stopped: behind the object, or at the end of `data`.

        Raises OutputError for what cannot be JSON, for deep nesting and for too long an object.
        """
        begin, end = at, len(data)
        while at < end and not self.complete:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._string else _OUTSIDE).search(data, at)
            if found is None:
                at = end
                break
            at = found.end()
            self._take(found[0])
        part = data[begin:at]
        self._left -= len(part.encode())
        if self._left < 0:
            raise OutputError(f"the model wrote a tool call of more than {self._limit} bytes")
        self._parts.append(part)
        return at

    def _take(self, char: str) -> None:
        if char == '"':
            self._string = not self._string
        elif self._string:
            if char != "\\":
                raise malformed()
            self._escaped = True
        elif char in "{[":
            self._depth += 1
            if self._depth > self._max_depth:
                raise OutputError(f"the model wrote a tool call whose arguments nest deeper than {MAX_NESTING} levels")
        elif char in "]}" and self._depth:
            self._depth -= 1
            self.complete = self._depth == 0
        else:
            raise malformed()


def read_object(text: str) -> dict[str, Any]:
    """Returns the members of a JSON object, see `read_value`. Raises OutputError for anything else."""
    value = read_value(text)
    if not isinstance(value, dict):
        raise OutputError("the model wrote a tool call that is not a JSON object")
    return value


def read_value(text: str) -> Any:
    """Returns the value of a JSON text that nests no deeper than it may.

    Numbers stay as they are written (`msgspec.Raw` where Python would change them), and members stay in order. Raises
    OutputError for what is no JSON, and for a name that occurs twice in an object.
    """
    try:
        return json.loads(
            text, parse_int=_integer, parse_float=msgspec.Raw, parse_constant=_constant, object_pairs_hook=_members
        )
    except (ValueError, RecursionError):
        raise malformed() from None


def canonical(value: dict[str, Any]) -> str:
    """Returns the JSON text of `read_object`'s result: no white space, characters instead of escapes."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise malformed() from None  # half a surrogate pair


def call_arguments(value: Any) -> str:
    """Returns the arguments of a call, as `read_object` gave them, as canonical JSON text.

    An object, or a string that holds one; nothing or null is no arguments. Raises OutputError.
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        reader = ObjectReader(limit=MAX_ARGUMENTS_BYTES, max_depth=MAX_NESTING)
        if value[reader.feed(value, 0) :].strip(" \t\n\r") or not reader.complete:
            raise malformed()
        value = read_object(reader.text)
    if not isinstance(value, dict):
        raise OutputError("the model wrote a tool call whose arguments are not a JSON object")
    if "" in value:
        raise OutputError("the model wrote a tool call that has an argument without a name")
    text = canonical(value)
    if len(text.encode()) > MAX_ARGUMENTS_BYTES:
        raise OutputError(f"the model wrote a tool call whose arguments have more than {MAX_ARGUMENTS_BYTES} bytes")
    return text


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise OutputError("the model wrote a tool call that has the same member twice")
    return members


def _integer(text: str) -> Any:
    return int(text) if len(text) < 19 and text != "-0" else msgspec.Raw(text)


def _constant(text: str) -> Any:
    raise malformed()  # NaN, Infinity and -Infinity, which Python would take
