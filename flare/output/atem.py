"""ATEM, the markup of calls in the "muse_atem" format:

    <atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="k">v</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

It is no XML: values are verbatim, and nothing in them is escaped. So a value ends only at a closing tag behind which the
next argument or the end of the call stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from flare.conversation import Tools
from flare.output.argument_types import TypedArguments
from flare.output.interface import OutputError
from flare.output.json_objects import MAX_CALL_BYTES
from flare.output.markers import marker_set

INVOKE, INVOKE_END = "<atem:invoke", "</atem:invoke>"
PARAMETER, PARAMETER_END = "<atem:parameter", "</atem:parameter>"

MAX_NAME_WRITTEN = 1024
"""Most characters of a tag that holds a name."""

Said = Literal["more", "on", "begun", "call"]

_SPACE = " \t\n\r"
_NAME, _NAME_END = 'name="', '">'
_NEXT = (PARAMETER, INVOKE_END)
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"))
_INVOKES = marker_set(INVOKE)
_VALUE_ENDS = marker_set(PARAMETER_END)
_NAME_ENDS = marker_set(_NAME_END)


class AtemReader:
    """Reads the calls of one message to a tool. What stands outside of calls is left out, the outer tags with it."""

    __slots__ = (
        "_arguments",
        "_called",
        "_gap",
        "_held",
        "_key",
        "_left",
        "_parts",
        "_state",
        "_tools",
        "_written",
        "call",
    )

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._state: State = AtemReader._outside
        self._held = ""  # the beginning of a tag, perhaps
        self._parts: list[str] = []  # of the tag or the value that is being read
        self._gap: list[str] = []  # white space behind what closes a value, perhaps
        self._key = ""
        self._arguments: TypedArguments | None = None
        self._called = False  # the message has a complete call
        self._written = 0  # characters of the tag that is being read
        self._left = 0  # bytes that the call may still have
        self.call = ("", "")
        """Name and arguments of the call that was completed last."""

    @property
    def within(self) -> bool:
        """A call has begun and is not complete."""
        return self._state != AtemReader._outside

    @property
    def incomplete(self) -> bool:
        """The message would lack its call, or the rest of one."""
        return self.within or not self._called

    def feed(self, text: str) -> Iterator[Literal["begun", "call"]]:
        """Reads on; yields what came of it, where it came. Raises OutputError."""
        data, self._held = self._held + text, ""
        at, said = 0, "on"
        while said != "more":
            begin = at
            at, said = self._state(self, data, at)
            if self._arguments is not None:
                self._left -= len(data[begin:at].encode())
                if self._left < 0:
                    raise OutputError(f"the model wrote a tool call of more than {MAX_CALL_BYTES} bytes")
            if said == "begun":
                yield "begun"
            elif said == "call":
                assert self._arguments is not None
                self.call = (self._arguments.name, self._arguments.text())
                self._arguments, self._called = None, True
                yield "call"
        self._held = data[at:]

    def _outside(self, data: str, at: int) -> tuple[int, Said]:
        found = _INVOKES.search(data, at)
        if found is None:
            return _INVOKES.certain(data, at), "more"
        self._state = AtemReader._name
        return found.end(), "on"

    def _name(self, data: str, at: int) -> tuple[int, Said]:
        """The rest of a tag, with the name of the tool or of an argument."""
        found = _NAME_ENDS.search(data, at)
        until = _NAME_ENDS.certain(data, at) if found is None else found.start()
        self._parts.append(data[at:until])
        self._written += until - at
        if self._written > MAX_NAME_WRITTEN:
            raise OutputError(f"the model wrote a tool call with a tag of more than {MAX_NAME_WRITTEN} characters")
        if found is None:
            return until, "more"
        name = _read_name("".join(self._parts))
        self._parts.clear()
        self._written = 0
        if self._arguments is None:
            self._arguments, self._left = TypedArguments(self._tools, name), MAX_CALL_BYTES
            self._state = AtemReader._between
            return found.end(), "begun"
        self._key, self._state = name, AtemReader._value
        return found.end(), "on"

    def _between(self, data: str, at: int) -> tuple[int, Said]:
        """Behind the tag of a call, where its first argument or its end stands."""
        at = _behind_space(data, at)
        tag = _tag(data, at)
        if tag is None:
            raise OutputError("the model wrote a tool call with text between its arguments")
        if not tag:
            return at, "more"
        return self._take(tag, at)

    def _value(self, data: str, at: int) -> tuple[int, Said]:
        found = _VALUE_ENDS.search(data, at)
        until = _VALUE_ENDS.certain(data, at) if found is None else found.start()
        self._parts.append(data[at:until])
        if found is None:
            return until, "more"
        self._state = AtemReader._behind_value
        return found.end(), "on"

    def _behind_value(self, data: str, at: int) -> tuple[int, Said]:
        """Behind a tag that closes the value, if the next argument or the end of the call follows."""
        begin, at = at, _behind_space(data, at)
        self._gap.append(data[begin:at])
        tag = _tag(data, at)
        if tag is None:
            self._parts += (PARAMETER_END, *self._gap)
            self._gap.clear()
            self._state = AtemReader._value
            return at, "on"
        if not tag:
            return at, "more"
        assert self._arguments is not None
        self._arguments.add(self._key, "".join(self._parts))
        self._parts.clear()
        self._gap.clear()
        return self._take(tag, at)

    def _take(self, tag: str, at: int) -> tuple[int, Said]:
        """Takes the tag of an argument, or the one that ends the call."""
        self._state = AtemReader._name if tag == PARAMETER else AtemReader._outside
        return at + len(tag), "on" if tag == PARAMETER else "call"


State = Callable[[AtemReader, str, int], tuple[int, Said]]


def _behind_space(data: str, at: int) -> int:
    while at < len(data) and data[at] in _SPACE:
        at += 1
    return at


def _tag(data: str, at: int) -> str | None:
    """Returns the tag that stands at a place behind a value, "" as long as it is undecided, None for anything else."""
    rest = data[at : at + len(PARAMETER)]
    for tag in _NEXT:
        if rest.startswith(tag):
            return tag
    return "" if any(tag.startswith(rest) for tag in _NEXT) else None


def _read_name(written: str) -> str:
    """Returns the name of a tag's rest, ` name="..`."""
    written = written.lstrip(_SPACE) if written[:1] in tuple(_SPACE) else ""
    if not written.startswith(_NAME):
        raise OutputError("the model wrote a tool call with a malformed tag")
    name = written.removeprefix(_NAME)
    for entity, character in _ENTITIES:
        name = name.replace(entity, character)
    return name
