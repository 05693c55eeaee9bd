"""What the readers of calls have in common whose arguments stand between tags, with values as plain text.

A tag that may begin a call is undecided until what must follow it is there. From then on all is the call's; a value ends
at its closing tag, or where that is missing at the tag of the next argument or the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flare.conversation import Tools
from flare.output.argument_types import TypedArguments
from flare.output.interface import Said
from flare.output.scanning import Room, read_word

State = Callable[[Any, str, int], tuple[Said, int]]


class TagReader:
    """See `CallReader`. A format's own reader adds its states, functions that read on and return as `feed` does."""

    __slots__ = (
        "_after",
        "_arguments",
        "_key",
        "_name",
        "_parts",
        "_room",
        "_seen",
        "_state",
        "_tools",
        "_value",
        "call",
        "certain",
    )

    def __init__(self, opener: str, tools: Tools, state: State) -> None:
        self._tools = tools
        self._state = state
        self._parts = [opener]
        self.certain = len(opener)
        self.call = ("", "")
        self._after = False  # a call of this opener is complete
        self._seen = ""  # the beginning of a tag
        self._name = ""  # the name that is being read, of the tool or of an argument
        self._key = ""  # the name of the argument whose value is being read
        self._value: list[str] = []
        self._arguments: TypedArguments | None = None
        self._room = Room()

    @property
    def held(self) -> str:
        return "".join(self._parts)

    @property
    def within(self) -> bool:
        return self._arguments is not None

    @property
    def incomplete(self) -> bool:
        return not self._after or self.within

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        begin = at
        said: Said = "more"
        while said == "more" and at < len(data):
            said, at = self._state(self, data, at)
        part = data[begin:at]
        if self._arguments is None and said != "call":
            self._parts.append(part)
            return said, at
        self._room.take(part)
        if said == "call":
            self._arguments = None
        return said, at

    def _begin(self, name: str) -> None:
        self._arguments = TypedArguments(self._tools, name)
        self._room = Room()
        self._room.take(self.held)
        self._parts.clear()

    def _add(self) -> None:
        """Takes the argument whose value has been read."""
        assert self._arguments is not None
        self._arguments.add(self._key, self._written("".join(self._value)))
        self._value.clear()

    def _written(self, value: str) -> str:
        """Returns what a value is of the text between its tags."""
        return value

    def _complete(self, state: State, at: int) -> tuple[Said, int]:
        """Ends the call; `state` reads on behind it."""
        assert self._arguments is not None
        self.call = (self._arguments.name, self._arguments.text())
        self._after, self.certain = True, 0
        self._state = state
        return "call", at

    def _tag(self, data: str, at: int, wanted: tuple[str, ...], *, spaced: bool) -> tuple[str | None, int]:
        """Reads one of some tags, behind white space if `spaced`. See `read_word`."""
        tag, self._seen, at = read_word(self._seen, data, at, wanted, spaced=spaced)
        return tag, at

    def _read_value(self, data: str, at: int, ends: tuple[str, ...]) -> tuple[str | None, int]:
        """Reads a value up to the first of some tags. Returns the tag, None if none has come yet."""
        while at < len(data):
            if not self._seen:
                found = data.find("<", at)
                if found < 0:
                    self._value.append(data[at:])
                    return None, len(data)
                self._value.append(data[at:found])
                self._seen, at = "<", found + 1
            tag, at = self._tag(data, at, ends, spaced=False)
            if tag != "":
                return tag, at
            self._value.append(self._seen)
            self._seen = ""
        return None, at
