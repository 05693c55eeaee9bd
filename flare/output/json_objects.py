"""JSON objects that a model writes: where one ends, its members, and a call's arguments in canonical form.

Nothing here backtracks: the end is found in one pass, whatever the pieces, and the members are read once it is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING
from flare.output.faults import malformed, nameless, nameless_argument, not_json, repeated, too_deep
from flare.output.interface import OutputError
from flare.output.scanning import MAX_CALL_BYTES, SPACE, Room

_OUTSIDE = re.compile(r"[^ \t\n\r0-9A-Za-z+\-.,:]")  # what can open or close something, and what is no JSON at all
_INSIDE = re.compile(r'["\\\x00-\x1f]')


class ObjectReader:
    """Finds the end of a JSON object that comes in pieces. White space may stand before it.

    What no JSON can hold is refused at once; the rest is checked by `read_object`, when the whole text is there.
    """

    __slots__ = ("_depth", "_escaped", "_max_depth", "_parts", "_room", "_string", "complete")

    def __init__(self, *, limit: int = MAX_CALL_BYTES, max_depth: int = MAX_NESTING) -> None:
        """`limit`: most bytes of the object as it is written; `max_depth`: most levels, its own included."""
        self._room = Room(limit)
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
        self._room.take(part)
        self._parts.append(part)
        return at

    def _take(self, char: str) -> None:
        if char == '"':
            self._string = not self._string
        elif self._string:
            if char != "\\":
                raise not_json()
            self._escaped = True
        elif char in "{[":
            self._depth += 1
            if self._depth > self._max_depth:
                raise too_deep()
        elif char in "]}" and self._depth:
            self._depth -= 1
            self.complete = self._depth == 0
        else:
            raise not_json()


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
        raise not_json() from None


def canonical(value: dict[str, Any]) -> str:
    """Returns the JSON text of `read_object`'s result: no white space, characters instead of escapes."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise not_json() from None  # half a surrogate pair


def read_call(text: str, arguments: Sequence[str] = ("arguments",), ignored: Sequence[str] = ()) -> tuple[str, str]:
    """Returns name and arguments of a call that is one JSON object.

    The member with the arguments has one of the names `arguments`; members named in `ignored` may stand beside it. Raises
    OutputError.
    """
    members = read_object(text)
    if unknown := members.keys() - {"name", *arguments, *ignored}:
        raise malformed(f"the member {min(unknown)[:80]!r}")
    name = members.get("name")
    if not isinstance(name, str) or not name.strip():
        raise nameless()
    canonical({"name": name})  # for its complaints
    given = [members[member] for member in arguments if member in members]
    if len(given) > 1:
        raise malformed("it has arguments twice")
    return name, call_arguments(given[0] if given else None)


def call_arguments(value: Any) -> str:
    """Returns the arguments of a call, as `read_object` gave them, as canonical JSON text.

    An object, or a string that holds one; nothing or null is no arguments. Raises OutputError.
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        reader = ObjectReader(limit=MAX_ARGUMENTS_BYTES)
        if value[reader.feed(value, 0) :].strip(SPACE) or not reader.complete:
            raise not_json()
        value = read_object(reader.text)
    if not isinstance(value, dict):
        raise OutputError("the model wrote a tool call whose arguments are not a JSON object")
    if "" in value:
        raise nameless_argument()
    text = canonical(value)
    if len(text.encode()) > MAX_ARGUMENTS_BYTES:
        raise OutputError(f"the model wrote a tool call whose arguments have more than {MAX_ARGUMENTS_BYTES} bytes")
    return text


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise repeated(name for name, _ in pairs)
    return members


def _integer(text: str) -> Any:
    return int(text) if len(text) < 19 and text != "-0" else msgspec.Raw(text)


def _constant(text: str) -> Any:
    raise not_json()  # NaN, Infinity and -Infinity, which Python would take
