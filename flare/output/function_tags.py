"""The "qwen" and "mimo" syntaxes of calls, of Qwen, Nemotron, Step and MiMo:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A call begins once a header `<function=NAME>` is followed by a tag `<parameter=KEY>` or `</function>`, and is complete with
`</function>`. The outer tags may be missing, and may hold several functions. Of a value of "qwen" one line break at each
end belongs to the tags; "mimo" writes the same tags without white space, and its values are verbatim.
"""

from __future__ import annotations

import re
from functools import partial

from flare.conversation import Tools
from flare.output.faults import malformed
from flare.output.interface import Said
from flare.output.openers import CallFormat, Opener
from flare.output.scanning import MAX_NAME_WRITTEN
from flare.output.tag_reader import TagReader

WRAPPER, WRAPPER_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
OPENERS = (Opener(WRAPPER), Opener(FUNCTION, in_reasoning=False))

_NAME_END = re.compile(r"[<>\n]")


class FunctionReader(TagReader):
    """What follows one `<tool_call>`, or one `<function=` outside of such, see `CallReader`."""

    __slots__ = ("_function", "_open", "_verbatim")

    def __init__(self, opener: str, tools: Tools, *, verbatim: bool) -> None:
        super().__init__(
            opener, tools, FunctionReader._function_name if opener == FUNCTION else FunctionReader._outside
        )
        self._verbatim = verbatim
        self._function = ""
        self._open = False  # a value has begun; what is read may be the tag of the next one

    @property
    def incomplete(self) -> bool:
        return super().incomplete or self._state is not FunctionReader._outside or self._seen[1:2] == FUNCTION[1]

    def _outside(self, data: str, at: int) -> tuple[Said, int]:
        wanted = (FUNCTION, WRAPPER_END) if self._after else (FUNCTION,)
        tag, at = self._tag(data, at, wanted, spaced=True)
        if tag == "":
            return "text", at
        if tag == WRAPPER_END:
            return "done", at
        if tag:
            self._state = FunctionReader._function_name
        return "more", at

    def _function_name(self, data: str, at: int) -> tuple[Said, int]:
        named, at = self._read_name(data, at)
        if named is None:
            return "text", at
        if named:
            at += 1
            self._function, self._name = self._name, ""
            self._state = FunctionReader._first
        return "more", at

    def _first(self, data: str, at: int) -> tuple[Said, int]:
        """Behind the header: whether a call begins."""
        tag, at = self._tag(data, at, (PARAMETER, FUNCTION_END), spaced=True)
        if tag == "":
            return "text", at
        if tag == PARAMETER:
            self._state = FunctionReader._parameter_name
        elif tag:
            self._begin(self._function)
            self._state = FunctionReader._end
            return "begun", at - 1  # the tag's last character completes the call
        return "more", at

    def _end(self, data: str, at: int) -> tuple[Said, int]:
        return self._complete(FunctionReader._outside, at + 1)

    def _parameter_name(self, data: str, at: int) -> tuple[Said, int]:
        """The rest of a parameter's tag. Within a value, what is no such tag belongs to the value."""
        named, at = self._read_name(data, at)
        if named is None or (named and self._open and not self._name.strip()):
            if not self.within:
                return "text", at
            if not self._open:
                raise malformed("a parameter's tag is not closed")
            self._value += (PARAMETER, self._name)
            self._name, self._state = "", FunctionReader._parameter_value
            return "more", at
        if not named:
            return "more", at
        if not self.within:
            self._begin(self._function)
            return "begun", at  # the tag's last character is read once more
        if self._open:
            self._add()
        self._key, self._name = self._name, ""
        self._open, self._state = True, FunctionReader._parameter_value
        return "more", at + 1

    def _parameter_value(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._read_value(data, at, (PARAMETER_END, FUNCTION_END, PARAMETER))
        if tag == PARAMETER:
            self._state = FunctionReader._parameter_name
        elif tag:
            self._add()
            self._open, self._state = False, FunctionReader._between
            if tag == FUNCTION_END:
                return self._complete(FunctionReader._outside, at)
        return "more", at

    def _between(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._tag(data, at, (PARAMETER, FUNCTION_END), spaced=True)
        if tag == "":
            raise malformed("text between its parameters")
        if tag == FUNCTION_END:
            return self._complete(FunctionReader._outside, at)
        if tag:
            self._state = FunctionReader._parameter_name
        return "more", at

    def _read_name(self, data: str, at: int) -> tuple[bool | None, int]:
        """Reads a name up to the `>` behind it. Returns whether it is complete, None if it cannot be one."""
        room = MAX_NAME_WRITTEN - len(self._name)
        found = _NAME_END.search(data, at, at + room + 1)
        end = min(len(data), at + room) if found is None else found.start()
        self._name += data[at:end]
        if found is None:
            return (False if end == len(data) else None), end
        return (True if found[0] == ">" else None), end

    def _written(self, value: str) -> str:
        if self._verbatim:
            return value
        return value.removeprefix("\n").removesuffix("\n")


QWEN = CallFormat(OPENERS, partial(FunctionReader, verbatim=False))
MIMO = CallFormat(OPENERS, partial(FunctionReader, verbatim=True))
