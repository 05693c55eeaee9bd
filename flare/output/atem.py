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

from flare.conversation import Tools
from flare.output.faults import malformed
from flare.output.interface import Said
from flare.output.scanning import MAX_NAME_WRITTEN, SPACE, Until, unescaped
from flare.output.tag_reader import TagReader

INVOKE, INVOKE_END = "<atem:invoke", "</atem:invoke>"
PARAMETER, PARAMETER_END = "<atem:parameter", "</atem:parameter>"

_NAME, _NAME_END = 'name="', '">'


class AtemReader(TagReader):
    """Reads the calls of one message to a tool. What stands outside of calls is left out, the outer tags with it."""

    __slots__ = ("_gap", "_header")

    def __init__(self, tools: Tools) -> None:
        super().__init__("", tools, AtemReader._outside)
        self._header: Until = Until(_NAME_END)  # the rest of a tag with a name
        self._gap: list[str] = []  # what stands behind a tag that closes the value, perhaps

    @property
    def incomplete(self) -> bool:
        """The message would lack its call, or the rest of one."""
        return super().incomplete or self._state is not AtemReader._outside

    def _outside(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._read_value(data, at, (INVOKE,))
        self._value.clear()
        self._parts.clear()
        if tag:
            self._state = AtemReader._tag_of_call
        return "more", at

    def _tag_of_call(self, data: str, at: int) -> tuple[Said, int]:
        name, at = self._read_header(data, at)
        if name is None:
            return "more", at
        self._begin(name)
        self._state = AtemReader._between
        return "begun", at

    def _tag_of_argument(self, data: str, at: int) -> tuple[Said, int]:
        name, at = self._read_header(data, at)
        if name is not None:
            self._key, self._state = name, AtemReader._argument_value
        return "more", at

    def _between(self, data: str, at: int) -> tuple[Said, int]:
        """Behind the tag of a call, where its first argument or its end stands."""
        tag, at = self._tag(data, at, (PARAMETER, INVOKE_END), spaced=True)
        if tag == "":
            raise malformed("text between its arguments")
        return self._take(tag, at)

    def _argument_value(self, data: str, at: int) -> tuple[Said, int]:
        tag, at = self._read_value(data, at, (PARAMETER_END,))
        if tag:
            self._state = AtemReader._behind_value
        return "more", at

    def _behind_value(self, data: str, at: int) -> tuple[Said, int]:
        """Behind a tag that closes the value, if the next argument or the end of the call follows."""
        begin = at
        tag, at = self._tag(data, at, (PARAMETER, INVOKE_END), spaced=True)
        self._gap.append(data[begin:at])
        if tag == "":
            self._value += (PARAMETER_END, "".join(self._gap).removesuffix(self._seen))
            self._state = AtemReader._argument_value  # what may begin another tag is read on
        elif tag:
            self._add()
        if tag is not None:
            self._gap.clear()
        return self._take(tag, at)

    def _take(self, tag: str | None, at: int) -> tuple[Said, int]:
        """Takes the tag of an argument, or the one that ends the call."""
        if tag == INVOKE_END:
            return self._complete(AtemReader._outside, at)
        if tag:
            self._state = AtemReader._tag_of_argument
        return "more", at

    def _read_header(self, data: str, at: int) -> tuple[str | None, int]:
        """Reads the rest of a tag, ` name="..">`; returns the name once it is whole."""
        end = self._header.feed(data, at)
        written = self._header.text if end is not None else self._header.text.removesuffix(_NAME_END[0])
        if len(written) > MAX_NAME_WRITTEN:
            raise malformed(f"a tag of more than {MAX_NAME_WRITTEN} characters")
        if end is None:
            return None, len(data)
        self._header = Until(_NAME_END)
        named = written.lstrip(SPACE)
        if named == written or not named.startswith(_NAME):
            raise malformed(f"a tag with {written[:20]!r} in place of a name")
        return unescaped(named.removeprefix(_NAME)), end
