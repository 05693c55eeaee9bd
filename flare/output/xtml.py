"""XTML, the markup of the "kimi_xtml" format: its tags, and a call that is made of them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from flare.output.faults import malformed, nameless, nameless_argument, not_json, repeated
from flare.output.interface import OutputError
from flare.output.json_objects import ObjectReader, call_arguments, read_object
from flare.output.scanning import Room, unescaped

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"

_NAME = re.compile(r"\s*(\S*)")
_ATTRIBUTE = re.compile(r'\s++([^\s="]++)="([^"]*+)"')


class Tag(NamedTuple):
    """A tag: `opens` or closes something, and `text` is what stands between its control tokens."""

    opens: bool
    text: str

    @property
    def name(self) -> str:
        found = _NAME.match(self.text)
        assert found is not None
        return found[1]

    def attributes(self) -> dict[str, str]:
        """Returns the attributes, entities replaced. Raises OutputError."""
        found: dict[str, str] = {}
        text = self.text.strip()
        at = len(self.name)
        while at < len(text):
            pair = _ATTRIBUTE.match(text, at)
            if pair is None or pair[1] in found:
                raise malformed(f"the attributes {text[at:].strip()[:80]!r}")
            found[pair[1]] = unescaped(pair[2])
            at = pair.end()
        return found


class XtmlCall:
    """One call, from its opening tag on. A value that is not closed ends with the next argument or with the call."""

    __slots__ = ("_arguments", "_block", "_key", "_room", "_type", "_value", "_within", "name")

    def __init__(self, tag: Tag) -> None:
        """Raises OutputError for a call without a name."""
        self.name = tag.attributes().get("tool", "")
        if not self.name.strip():
            raise nameless()
        self._arguments: dict[str, Any] = {}
        self._block: str | None = None  # the `json` block, which stands for all arguments
        self._room = Room()
        self._room.take(tag.text)
        self._within: str | None = None  # the name of the open value's tag
        self._key = self._type = ""
        self._value: list[str] = []

    def take_text(self, text: str) -> None:
        """Takes text between tags: part of a value, or white space. Raises OutputError."""
        if self._within is not None:
            self._room.take(text)
            self._value.append(text)
        elif not text.isspace():
            raise malformed("text between its arguments")

    def take_tag(self, tag: Tag) -> bool:
        """Takes a tag; returns whether it completes the call. Raises OutputError."""
        self._room.take(tag.text)
        name = tag.name
        if self._within is not None:
            closed = not tag.opens and name == self._within
            if not closed and (tag.opens, name) not in ((True, "argument"), (False, "call")):
                raise misplaced(tag)
            self._end_value()
            if closed:
                return False
        if tag.opens and name == "argument":
            self._open_argument(tag)
        elif tag.opens and name == "json":
            self._within = name
        elif not tag.opens and name == "call":
            return True
        else:
            raise misplaced(tag)
        return False

    def arguments(self) -> str:
        """Returns the arguments of the complete call, canonical JSON. Raises OutputError."""
        if self._block is None:
            return call_arguments(self._arguments)
        if self._arguments:
            raise malformed("it has both arguments and a json block")
        return call_arguments(self._block)

    def _open_argument(self, tag: Tag) -> None:
        attributes = tag.attributes()
        self._within = "argument"
        self._key, self._type = attributes.get("key", ""), attributes.get("type", "string")
        if not self._key:
            raise nameless_argument()
        if self._key in self._arguments:
            raise repeated([*self._arguments, self._key])

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._within == "argument":
            self._arguments[self._key] = text if self._type == "string" else _json_value(text)
        elif self._block is None:
            self._block = text
        else:
            raise malformed("it has two json blocks")
        self._within = None
        self._value.clear()


def misplaced(tag: Tag) -> OutputError:
    kind = "opening" if tag.opens else "closing"
    return malformed(f"the {kind} tag {tag.name[:80]!r} where none can stand")


def _json_value(text: str) -> Any:
    """Returns a JSON value as `read_object` gives members. Raises OutputError."""
    wrapped = f'{{"":{text}}}'
    reader = ObjectReader()
    whole = reader.feed(wrapped, 0) == len(wrapped) and reader.complete
    members = read_object(wrapped) if whole else {}
    if len(members) != 1:
        raise not_json()
    return members[""]
