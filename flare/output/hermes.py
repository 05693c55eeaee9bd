"""The "hermes" syntax of calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call is complete with its object. Several objects may stand in one pair of tags, and the closing tag may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from flare.conversation import MAX_NESTING
from flare.output.interface import OutputError
from flare.output.json_objects import MAX_CALL_BYTES, ObjectReader, call_arguments, canonical, read_object
from flare.output.openers import CallFormat, Opener

OPENER, CLOSER = "<tool_call>", "</tool_call>"
OPENERS = (Opener(OPENER),)

_SPACE = " \t\n\r"
_HEADS = ('{"name":"', '{"arguments":{', '{"arguments":"')  # without white space; with one of them a call has begun
_GAPS = ("", "{", '{"name"', '{"name":', '{"arguments"', '{"arguments":')  # behind these, white space may stand


class HermesReader:
    """What follows one opening tag, see `CallReader`."""

    __slots__ = ("_after", "_object", "_parts", "_seen", "call", "certain")

    def __init__(self) -> None:
        self._parts = [OPENER]
        self._seen = ""  # of a head or the closing tag, without white space
        self._after = False  # a call of this opener is complete
        self._object: ObjectReader | None = None
        self.certain = len(OPENER)
        self.call = ("", "")

    @property
    def held(self) -> str:
        return "".join(self._parts)

    @property
    def within(self) -> bool:
        return self._object is not None

    @property
    def incomplete(self) -> bool:
        return not self._after or self.within or self._seen.startswith("{")

    def feed(self, data: str, at: int) -> tuple[Literal["more", "begun", "call", "text", "done"], int]:
        if self._object is None:
            return self._head(data, at)
        at = self._object.feed(data, at)
        if not self._object.complete:
            return "more", at
        self.call = read_call(self._object.text)
        self._object, self._parts, self._seen = None, [], ""
        self._after, self.certain = True, 0
        return "call", at

    def _head(self, data: str, at: int) -> tuple[Literal["more", "begun", "text", "done"], int]:
        wanted = (*_HEADS, CLOSER) if self._after else _HEADS
        begin = at
        for at in range(begin, len(data)):
            char = data[at]
            if char in _SPACE and self._seen in _GAPS:
                continue
            seen = self._seen + char
            if not any(head.startswith(seen) for head in wanted):
                self._parts.append(data[begin:at])
                return "text", at
            self._seen = seen
            if seen == CLOSER:
                return "done", at + 1
            if seen in _HEADS:
                self._parts.append(data[begin : at + 1])
                self._object = ObjectReader(limit=MAX_CALL_BYTES, max_depth=MAX_NESTING + 1)
                self._object.feed(self.held[self.certain :], 0)
                return "begun", at + 1
        self._parts.append(data[begin:])
        return "more", len(data)


def read_call(text: str, arguments: Sequence[str] = ("arguments",), ignored: Sequence[str] = ()) -> tuple[str, str]:
    """Returns name and arguments of a call's object.

    The member with the arguments has one of the names `arguments`; members named in `ignored` may stand beside it. Raises
    OutputError.
    """
    members: dict[str, Any] = read_object(text)
    if unknown := members.keys() - {"name", *arguments, *ignored}:
        raise OutputError(f"the model wrote a tool call with the member {min(unknown)[:80]!r}")
    name = members.get("name")
    if not isinstance(name, str) or not name.strip():
        raise OutputError("the model wrote a tool call without a name")
    canonical({"name": name})  # for its complaints
    given = [members[member] for member in arguments if member in members]
    if len(given) > 1:
        raise OutputError("the model wrote a tool call that has arguments twice")
    return name, call_arguments(given[0] if given else None)


FORMAT = CallFormat(OPENERS, lambda _opener, _tools: HermesReader())
