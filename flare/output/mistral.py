"""The calls of Mistral's models, in both their forms:

    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}, ...]      tokenizers v3 and v7, see `json_calls.py`
    [TOOL_CALLS]f[CALL_ID]...[ARGS]{...}                                    v11; v13 without the id

The second form has one opener a call, and a call is complete with its arguments. Where the core does not list `[ARGS]` among
the spelled tokens, the arguments follow the name at once. White space ends the name, unless a declared tool's has it: other
mentions of the opener are text. The ids that the model makes up are not used.
"""

from __future__ import annotations

from typing import Literal

from flare.conversation import Tools, qualified
from flare.output.faults import nameless, not_json
from flare.output.interface import Said
from flare.output.json_calls import ArrayReader
from flare.output.json_objects import ObjectReader, call_arguments, read_object
from flare.output.openers import CallFormat, Opener
from flare.output.rules import LONGEST_NAME
from flare.output.scanning import SPACE, behind_space

OPENER = "[TOOL_CALLS]"
OPENERS = (Opener(OPENER),)

_ARGUMENTS, _ID = "[ARGS]", "[CALL_ID]"


class MistralReader:
    """What follows one opener, see `CallReader`."""

    __slots__ = ("_array", "_call", "_id", "_mark", "_name", "_object", "_parts", "_place", "_tools", "certain")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parts = [OPENER]
        self._name = ""
        self._mark = ""  # the beginning of [ARGS] or [CALL_ID], perhaps
        self._id = ""
        self._place: Literal["name", "id", "arguments", "object", "end"] = "name"
        self._object = ObjectReader()
        self._call = ("", "")
        self._array: ArrayReader | None = None  # reads the first form, once it is known to be that
        self.certain = len(OPENER)

    @property
    def held(self) -> str:
        return "".join(self._parts) if self._array is None else self._array.held

    @property
    def call(self) -> tuple[str, str]:
        return self._call if self._array is None else self._array.call

    @property
    def within(self) -> bool:
        return self._place in ("id", "arguments", "object") if self._array is None else self._array.within

    @property
    def incomplete(self) -> bool:
        return self._place != "end" if self._array is None else self._array.incomplete

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        if self._array is not None:
            said, at = self._array.feed(data, at)
            self.certain = self._array.certain
            return said, at
        match self._place:
            case "name":
                return self._read_name(data, at)
            case "id":
                return self._read_id(data, at)
            case "end":
                return "done", at
        return self._read_arguments(data, at)

    def _read_name(self, data: str, at: int) -> tuple[Said, int]:
        begin = at
        start = at if self._name or self._mark else behind_space(data, at)
        for at in range(start, len(data)):
            char = data[at]
            mark = self._mark + char
            if mark in (_ARGUMENTS, _ID):
                return self._begin("arguments" if mark == _ARGUMENTS else "id", at + 1)
            if _ARGUMENTS.startswith(mark) or _ID.startswith(mark):
                self._mark = mark
                continue
            if not self._name and (self._mark == "[" or (char == "{" and not self._mark)):
                return self._read_array(data, begin, at)
            if char == "{" and not self._mark and not any(space in self._name for space in SPACE):
                return self._begin("object", at)
            self._name += char
            if self._mark or char == "{" or len(self._name) > LONGEST_NAME or not self._is_name():
                self._parts.append(data[begin:at])
                return "text", at
        self._parts.append(data[begin:])
        return "more", len(data)

    def _is_name(self) -> bool:
        """Whether what was read can be a name, or the beginning of one."""
        if not any(space in self._name.rstrip(SPACE) for space in SPACE):
            return True
        return any(qualified(tool.namespace, tool.name).startswith(self._name) for tool in self._tools.offered)

    def _begin(self, place: Literal["id", "arguments", "object"], at: int) -> tuple[Said, int]:
        self._place, self._parts, self.certain = place, [], 0
        return "begun", at

    def _read_array(self, data: str, begin: int, at: int) -> tuple[Said, int]:
        """Passes on to the reader of the first form. It is to see the bracket that is held as `_mark`."""
        self._parts.append(data[begin:at])
        self._array = ArrayReader("".join(self._parts).removesuffix(self._mark), None)
        self._array.feed(self._mark, 0)
        return self.feed(data, at)

    def _read_id(self, data: str, at: int) -> tuple[Said, int]:
        begin = at
        for at in range(begin, len(data)):
            self._id += data[at]
            if self._id.endswith(_ARGUMENTS):
                self._place = "arguments"
                return self._read_arguments(data, at + 1)
            if len(self._id) > LONGEST_NAME:
                raise not_json()
        return "more", len(data)

    def _read_arguments(self, data: str, at: int) -> tuple[Said, int]:
        if self._place == "arguments":
            at = behind_space(data, at)
            if at == len(data):
                return "more", at
            if data[at] != "{":
                raise not_json()
            self._place = "object"
        at = self._object.feed(data, at)
        if not self._object.complete:
            return "more", at
        name = self._name.strip(SPACE)
        if not name:
            raise nameless()
        self._call = name, call_arguments(read_object(self._object.text))
        self._place = "end"
        return "call", at


FORMAT = CallFormat(OPENERS, lambda _opener, tools: MistralReader(tools))
