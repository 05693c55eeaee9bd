"""The "glm" syntax of calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

A call begins once a function's name is followed by `<arg_key>` or `</tool_call>`. A name is that of a declared tool, or one
word of letters, digits, `_` and, behind the first, `.:/-`: anything else between the tags is a mention of them. Values are
verbatim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flare.conversation import Tools, qualified
from flare.output.faults import malformed
from flare.output.interface import Said
from flare.output.openers import CallFormat, Opener
from flare.output.scanning import MAX_NAME_WRITTEN
from flare.output.tag_reader import TagReader

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
OPENERS = (Opener(CALL),)

_WORD = re.compile(r"\w[\w.:/-]*")


class GlmReader(TagReader):
    """What follows one `<tool_call>`, see `CallReader`."""

    __slots__ = ("_open", "_tried")

    def __init__(self, opener: str, tools: Tools) -> None:
        super().__init__(opener, tools, GlmReader._function_name)
        self._open = False  # a value has begun; what is read may be the tags of the next one
        self._tried: list[str] = []  # those tags so far

    def _function_name(self, data: str, at: int) -> tuple[Said, int]:
        found = data.find("<", at, at + MAX_NAME_WRITTEN + 1)
        end = min(len(data), at + MAX_NAME_WRITTEN + 1) if found < 0 else found
        self._name = (self._name + data[at:end]).lstrip()
        if len(self._name) > MAX_NAME_WRITTEN or not self._may_be_name():
            return "text", end
        if found >= 0:
            self._name = self._name.rstrip()
            self._state = GlmReader._first
        return "more", end

    def _first(self, data: str, at: int) -> tuple[Said, int]:
        """Behind the function's name: whether a call begins."""
        tag, at = self._tag(data, at, (KEY, CALL_END), spaced=False)
        if tag is None:
            return "more", at
        if tag == "" or not (self._is_name() or (tag == KEY and not self._name)):
            return "text", at
        self._begin(self._name)
        self._name = ""
        if tag == KEY:
            self._state = GlmReader._argument_name
            return "begun", at
        self._state = GlmReader._end
        return "begun", at - 1  # the tag's last character completes the call

    def _end(self, data: str, at: int) -> tuple[Said, int]:
        return self._complete(GlmReader._done, at + 1)

    def _done(self, data: str, at: int) -> tuple[Said, int]:
        return "done", at

    def _argument_name(self, data: str, at: int) -> tuple[Said, int]:
        room = MAX_NAME_WRITTEN - len(self._name)
        found = data.find("<", at, at + room + 1)
        end = min(len(data), at + room) if found < 0 else found
        self._name += data[at:end]
        self._tried.append(data[at:end])
        if found >= 0:
            self._state = GlmReader._argument_name_end
        elif end < len(data):
            self._no_argument()
        return "more", end

    def _argument_name_end(self, data: str, at: int) -> tuple[Said, int]:
        begin = at
        tag, at = self._tag(data, at, (KEY_END,), spaced=False)
        self._tried.append(data[begin:at])
        if tag == "":
            self._no_argument()
        elif tag:
            self._state = GlmReader._value_begin
        return "more", at

    def _value_begin(self, data: str, at: int) -> tuple[Said, int]:
        begin = at
        tag, at = self._tag(data, at, (VALUE,), spaced=True)
        self._tried.append(data[begin:at])
        if tag == "":
            self._no_argument()
        elif tag:
            if self._open:
                self._add()
            self._tried.clear()
            self._key, self._name = self._name.strip(), ""
            self._open, self._state = True, GlmReader._argument_value
        return "more", at

    def _no_argument(self) -> None:
        """What has been read are not the tags of an argument. Within a value it belongs to the value."""
        if not self._open:
            raise malformed("an argument that is not a name and a value")
        tried = "".join(self._tried)
        self._value.append(tried.removesuffix(self._seen))  # what may begin another tag is read on
        self._tried.clear()
        self._name, self._state = "", GlmReader._argument_value

    def _argument_value(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._read_value(data, at, (VALUE_END, CALL_END, KEY))
        if tag == KEY:
            self._tried.append(KEY)
            self._state = GlmReader._argument_name
        elif tag:
            self._add()
            self._open, self._state = False, GlmReader._between
            if tag == CALL_END:
                return self._complete(GlmReader._done, at)
        return "more", at

    def _between(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._tag(data, at, (KEY, CALL_END), spaced=True)
        if tag == "":
            raise malformed("text between its arguments")
        if tag == CALL_END:
            return self._complete(GlmReader._done, at)
        if tag:
            self._state = GlmReader._argument_name
        return "more", at

    def _may_be_name(self) -> bool:
        """Whether what has been read can become a name."""
        name = self._name.rstrip()
        return not name or _is_word(name) or any(known.startswith(name) for known in self._declared())

    def _is_name(self) -> bool:
        return _is_word(self._name) or self._name in self._declared()

    def _declared(self) -> Iterator[str]:
        return (qualified(tool.namespace, tool.name) for tool in self._tools.offered)


def _is_word(name: str) -> bool:
    return _WORD.fullmatch(name) is not None


FORMAT = CallFormat(OPENERS, GlmReader)
