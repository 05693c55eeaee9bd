"""The "gemma4" syntax of calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true,null]}<tool_call|>`.

The opener always starts a call, and what does not follow this grammar is an error: white space may stand between any two
of its parts, keys are bare (they end at the colon) or delimited, texts are delimited and hold anything but their
delimiter, all else is as in JSON, JSON's own strings included. `None` stands for null too, since templates render it so.

A call is complete with its closing brace. Behind it stand the closing tag, or another call, with or without an opener.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from flare.conversation import MAX_NESTING
from flare.output.faults import malformed, nameless, too_deep
from flare.output.interface import OutputError, Said
from flare.output.json_objects import call_arguments, read_object
from flare.output.openers import CallFormat, Opener
from flare.output.scanning import SPACE, Expected, Room, Until

OPENER, CLOSER = "<|tool_call>", "<tool_call|>"
OPENERS = (Opener(OPENER),)

_CALL = "call:"
_QUOTE = '<|"|>'
_MARK = re.compile(r'[{}\[\],:"<]')  # what ends a bare key, number or word
_NAME_END = re.compile(r"[{}<\n]")
_STRING_MARK = re.compile(r'["\\]')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}

_OPENS = {"}": "{", "]": "["}

_Due = Literal["key", "colon", "value", "comma"]


class Gemma4Reader:
    """What follows one opener, see `CallReader`."""

    __slots__ = ("_arguments", "_between", "_name", "_next", "_room", "call")

    certain = 0

    def __init__(self) -> None:
        self._next: Literal["opener", "head", "name", "arguments", "end"] = "opener"
        self._between = Expected(_CALL)
        self._name: list[str] = []
        self._arguments = ArgumentsReader()
        self._room = Room()
        self.call = ("", "")

    @property
    def held(self) -> str:
        return self._between.seen

    @property
    def within(self) -> bool:
        return self._next != "end"

    @property
    def incomplete(self) -> bool:
        return self._next != "end" or self._between.seen.startswith((_CALL[0], OPENER[:2]))

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        if self._next == "opener":
            self._begin("head")
            return "begun", at
        if self._next == "end":
            return self._end(data, at)
        begin = at
        if self._next == "head":
            at = self._head(data, at)
        if self._next == "name":
            at = self._read_name(data, at)
        if self._next == "arguments":
            at = self._arguments.feed(data, at)
        self._room.take(data[begin:at])
        if not self._arguments.complete:
            return "more", at
        name = "".join(self._name).strip(SPACE)
        if not name:
            raise nameless()
        self.call = (name, call_arguments(read_object(self._arguments.text)))
        self._next, self._between = "end", Expected(CLOSER, OPENER, _CALL)
        self._arguments = ArgumentsReader()
        return "call", at

    def _begin(self, then: Literal["head", "name"]) -> None:
        self._next, self._between = then, Expected(_CALL)
        self._name = []
        self._room = Room()

    def _head(self, data: str, at: int) -> int:
        word, at = self._between.feed(data, at)
        if word == "":
            raise malformed(f"{data[at]!r} where {_CALL!r} is due")
        if word:
            self._next = "name"
        return at

    def _read_name(self, data: str, at: int) -> int:
        found = _NAME_END.search(data, at)
        self._name.append(data[at : len(data) if found is None else found.start()])
        if found is None:
            return len(data)
        if found[0] != "{":
            raise malformed(f"{found[0]!r} in the name of the tool, where '{{' is due")
        self._next = "arguments"
        return found.start()

    def _end(self, data: str, at: int) -> tuple[Said, int]:
        word, at = self._between.feed(data, at)
        if word is None:
            return "more", at
        if word == CLOSER:
            return "done", at
        if word == "":
            raise malformed(f"{data[at]!r} where {CLOSER!r} is due")
        self._begin("head" if word == OPENER else "name")
        return "begun", at


class ArgumentsReader:
    """Makes JSON text of arguments that come in pieces, from their opening to their closing brace.

    What JSON text does not show is checked here: that each thing stands where it is due. The rest, as members that occur
    twice, is left to who reads the text.
    """

    __slots__ = ("_bare", "_due", "_empty", "_escaped", "_opening", "_parts", "_stack", "_string", "_text", "complete")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._stack: list[str] = []
        self._due: _Due = "value"
        self._empty = False  # the object or array has only been opened: it may be closed
        self._bare: list[str] = []
        self._opening = ""  # of a delimiter
        self._text: Until | None = None  # within a delimited text
        self._string: list[str] | None = None  # within a JSON string
        self._escaped = False
        self.complete = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, data: str, at: int) -> int:
        """Reads on from `data[at]`; returns where it stopped: behind the arguments, or at the end of `data`.

        Raises OutputError for what the grammar does not allow, and for deep nesting.
        """
        while at < len(data) and not self.complete:
            if self._text is not None:
                end = self._text.feed(data, at)
                if end is None:
                    return len(data)
                self._scalar(json.dumps(self._text.text, ensure_ascii=False))
                self._text, at = None, end
            elif self._string is not None:
                at = self._read_string(self._string, data, at)
            elif self._opening:
                at = self._read_opening(data, at)
            else:
                found = _MARK.search(data, at)
                self._bare.append(data[at : len(data) if found is None else found.start()])
                if found is None:
                    return len(data)
                at = found.end()
                self._end_bare(found[0])
                self._take(found[0])
        return at

    def _read_opening(self, data: str, at: int) -> int:
        self._opening += data[at]
        if not _QUOTE.startswith(self._opening):
            raise self._misplaced(self._opening)
        if self._opening == _QUOTE:
            self._opening, self._text = "", Until(_QUOTE)
        return at + 1

    def _read_string(self, parts: list[str], data: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            parts.append(data[at])
            return at + 1
        found = _STRING_MARK.search(data, at)
        end = len(data) if found is None else found.end()
        parts.append(data[at:end])
        if found is not None:
            self._escaped = found[0] == "\\"
            if not self._escaped:
                self._string = None
                self._scalar("".join(parts))
        return end

    def _end_bare(self, mark: str) -> None:
        """Takes what stands bare before a mark: a key, a number or a word."""
        text = "".join(self._bare).strip(SPACE)
        self._bare.clear()
        if not text:
            return
        if self._due == "key" and mark == ":":
            self._scalar(json.dumps(text, ensure_ascii=False))
        elif self._due == "value" and mark in ",]}" and (value := _bare_value(text)) is not None:
            self._scalar(value)
        else:
            raise self._misplaced(text)

    def _take(self, mark: str) -> None:
        if mark in '"<':
            if self._due not in ("key", "value"):
                raise self._misplaced(mark)
            if mark == '"':
                self._string = [mark]
            else:
                self._opening = mark
            return
        if mark in "{[" and self._due == "value":
            if len(self._stack) == MAX_NESTING:
                raise too_deep()
            self._stack.append(mark)
            self._due, self._empty = "key" if mark == "{" else "value", True
        elif mark in "}]" and self._stack[-1] == _OPENS[mark] and (self._empty or self._due == "comma"):
            self._stack.pop()
            self._due, self._empty = "comma", False
            self.complete = not self._stack
        elif mark == ":" and self._due == "colon":
            self._due = "value"
        elif mark == "," and self._due == "comma":
            self._due = "key" if self._stack[-1] == "{" else "value"
        else:
            raise self._misplaced(mark)
        self._parts.append(mark)

    def _scalar(self, text: str) -> None:
        self._parts.append(text)
        self._due = "colon" if self._due == "key" else "comma"
        self._empty = False

    def _misplaced(self, text: str) -> OutputError:
        due = {"key": "a key", "colon": "a colon", "value": "a value", "comma": "a comma or the end"}[self._due]
        return malformed(f"{text[:20]!r} where {due} is due")


def _bare_value(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else _WORDS.get(text)


FORMAT = CallFormat(OPENERS, lambda _opener, _tools: Gemma4Reader())
