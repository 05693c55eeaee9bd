"""DeepSeek's replies: reasoning up to `</think>`, an answer, and calls in DSML, read by the package `deepseek-recipe`.

Its parser owns the recognition of all markup: both spellings of the tags, missing outer ones, the line breaks beside
delimiters. What follows the end of the block of calls is discarded. Here its events become pieces, and what it leaves to its
caller is checked: names, arguments, bounds, and that no call is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from flare.errors import InputError
from flare.output.faults import cut_off, malformed, nameless, not_json
from flare.output.interface import Piece
from flare.output.json_objects import ObjectReader, call_arguments, read_object
from flare.output.openers import ReplyFormat
from flare.output.rules import Rules
from flare.output.scanning import Room

_REASONED = "</think>"
_OPENING, _CLOSING = "<｜DSML｜", ("</｜DSML｜tool_calls>", "</｜DSML｜ calls>")
_LONGEST = max(map(len, (_REASONED, _OPENING, *_CLOSING)))

_BAR = "｜"
_PARTS = re.compile(f"{_BAR}|<[^<{_BAR}]*|[^<{_BAR}]+")
"""What goes to the parser at once. It holds back a part in which a tag may begin, so that every such part begins with the tag,
and every bar stands alone: a brace that comes back for a bar closes the arguments and is no part of a value."""


class _Block(msgspec.Struct):
    type: str = ""
    name: str = ""


class _Delta(msgspec.Struct):
    text: str = ""
    thinking: str = ""
    partial_json: str = ""


class _Event(msgspec.Struct):
    """An event of the parser, which speaks the protocol of Messages: what is used of it."""

    content_block: _Block | None = None
    delta: _Delta | None = None


def require() -> None:
    """Imports the parser's package. Raises InputError where that is not possible."""
    try:
        import deepseek_recipe  # noqa: F401
    except ImportError as error:
        raise InputError(
            "the core's output format deepseek_dsml is read by the package deepseek-recipe 0.2, which cannot be "
            f"imported ({' '.join(str(error).split())[:200]}): pip install 'flare-ignition[deepseek]'"
        ) from None


class DeepseekMachine:
    """See `Output`. Without `rules` no call may come: what looks like one is text."""

    __slots__ = (
        "_arguments",
        "_chunk",
        "_close_token",
        "_drained",
        "_flows",
        "_name",
        "_opened",
        "_parser",
        "_pending",
        "_room",
        "_rules",
        "_shown",
        "_stage",
        "_tail",
        "_undecided",
        "_unshown",
        "reasoning_tokens",
    )

    def __init__(self, rules: Rules | None, *, opens_reasoning: bool, close_token: int | None = None) -> None:
        from deepseek_recipe import (
            InferenceChunk,
            MessagesChunkGenerator,
            ParsingOptions,
            StreamProcessor,
            ThinkingInitialStage,
        )

        options = ParsingOptions(
            parse_tool_calls=rules is not None,
            thinking_initial_stage=ThinkingInitialStage.ReasoningStart if opens_reasoning else None,
        )
        self._chunk = InferenceChunk.text
        self._parser = StreamProcessor(MessagesChunkGenerator("", "", opens_reasoning), options)
        self._parser.push(InferenceChunk.ready())
        self._rules = rules
        self._close_token = close_token
        self._drained = False
        self._name = ""
        self._arguments: ObjectReader | None = None  # of the call that has begun and is not complete
        self._stage: Literal["reasoning", "answer", "calls", "over"] = "reasoning" if opens_reasoning else "answer"
        self._tail = ""  # the latest text, as far as a tag may have begun in it
        self._unshown: list[str] = []  # what may be answer text that the parser holds back
        self._undecided = 0  # its characters
        self._opened = False  # a tag has been opened, and no call has begun with it
        self._room = Room()
        self._flows: Literal["text", "reasoning"] | None = None  # as what the parser passes on text that holds no tag
        self._shown = False  # the token made reasoning visible
        self._pending = 0  # tokens within reasoning that are part of a delimiter or a tag, perhaps
        self.reasoning_tokens = 0

    @property
    def reasoning_open(self) -> bool:
        return self._stage == "reasoning"

    @property
    def undecided(self) -> int:
        return self._undecided

    @property
    def calling(self) -> Literal["no", "undecided", "yes"]:
        return "yes" if self._rules is not None and self._rules.begun else "no"

    def drain(self) -> Iterable[Piece]:
        self._drained = True
        return self._pieces(self._parser.finish(), "", 0)

    def push(self, token: int, text: str) -> Iterable[Piece]:
        flows = self._flows
        if flows is not None and _is_plain(text) and token != self._close_token:
            # By far the most tokens: the parser holds nothing back, and would pass this on as it is.
            self._tail = ""
            if flows == "reasoning":
                self.reasoning_tokens += token >= 0
            elif self._rules is not None and not self._rules.shows_text:
                return ()
            return (Piece(flows, text),)
        return self._push(token, text)

    def _push(self, token: int, text: str) -> Iterator[Piece]:
        self._shown = False
        left = len(text)
        if token == self._close_token and not text.endswith(_REASONED):
            text += _REASONED  # a special token, whose spelling is left out of the text
        for part in _PARTS.findall(text):
            self._follow(part)
            self._flows = None
            left = max(0, left - len(part))
            yield from self._pieces(self._parser.push(self._chunk(part)), part, left)
        if self._shown:
            # What is left undecided before the closing token becomes visible with it.
            self.reasoning_tokens += self._pending + (token >= 0 and token != self._close_token)
            self._pending = 0
        elif self._stage != "reasoning":
            self._pending = 0
        elif token >= 0 and not self._pending and not text.strip("\n"):
            self.reasoning_tokens += 1
        elif token >= 0:
            self._pending += 1

    def end(self, *, natural: bool) -> Iterable[Piece]:
        cut, self._shown = self._arguments is not None, False
        events = () if self._drained else self._parser.finish()
        if not cut:
            yield from self._pieces(events, "", 0)
        if self._shown:
            self.reasoning_tokens += self._pending
        if natural and (cut or self._opened):
            raise cut_off()
        if self._rules is not None:
            self._rules.end()

    def _pieces(self, events: Iterable[Any], part: str, left: int) -> Iterator[Piece]:
        """Makes pieces of the events that a part of the text brought; `left` characters of the text come behind it."""
        for event in events:
            found = msgspec.json.decode(event.to_json(), type=_Event)
            block, delta = found.content_block, found.delta
            if block is not None and block.type == "tool_use":
                assert self._rules is not None
                self._rules.begin()
                self._name, self._opened = block.name, False
                self._forget()
                self._arguments = ObjectReader()
            if delta is None:
                continue
            passed_on = delta.thinking or delta.text
            if passed_on and passed_on.endswith(part) and _is_plain(part):
                self._flows = "reasoning" if delta.thinking else "text"
            if passed_on:
                self._take_out(passed_on)
            if delta.thinking:
                self._shown = True
                yield Piece("reasoning", delta.thinking)
            elif delta.text:
                if self._rules is None or self._rules.shows_text:
                    yield Piece("text", delta.text, behind=self._undecided + left)
            elif delta.partial_json:
                yield from self._argument(delta.partial_json, closes=part == _BAR)

    def _argument(self, text: str, *, closes: bool) -> Iterator[Piece]:
        """Takes JSON of arguments. `closes`: a brace ends them."""
        assert self._arguments is not None and self._rules is not None
        if self._arguments.feed(text, 0) < len(text):
            raise not_json()
        if not closes or text not in ("}", "{}"):
            return
        if not self._name.strip():
            raise nameless()
        arguments = call_arguments(read_object(self._arguments.text))
        self._arguments, self._tail, self._room = None, "", Room()
        yield Piece("call", call=self._rules.complete(self._name, arguments))

    def _follow(self, part: str) -> None:
        """Takes note of what the parser does not tell: where reasoning ends, where calls begin and end, and their length.

        `part` is a bar, or has none.
        """
        if self._stage == "calls":
            self._room.take(part)
        if self._stage == "over" or self._arguments is not None:
            return
        text = self._tail + part
        if self._stage == "reasoning" and _REASONED in text:
            self._stage = "answer"
            self._forget()
            part = text = text.partition(_REASONED)[2]
        if text.endswith(_OPENING) and self._rules is not None:
            self._stage, self._opened = "calls", True
        elif self._stage == "calls" and any(tag in text for tag in _CLOSING):
            if self._opened:
                raise malformed("a tag that opens nothing")
            self._stage = "over"
            self._forget()
        if self._stage == "answer" or self._opened:
            self._unshown.append(part)
            self._undecided += len(part)
        self._tail = text[1 - _LONGEST :]

    def _take_out(self, passed_on: str) -> None:
        """Leaves of what may be held back what stands behind a text that the parser passed on."""
        held = "".join(self._unshown)
        at = held.find(passed_on)
        if at >= 0:
            rest = held[at + len(passed_on) :]
            self._unshown, self._undecided = [rest], len(rest)

    def _forget(self) -> None:
        self._unshown, self._undecided = [], 0


def _is_plain(text: str) -> bool:
    """Whether the parser holds back nothing of a text: no tag, and no white space that may stand before one, is in it."""
    return bool(text) and "<" not in text and _BAR not in text and not text[-1].isspace()


FORMAT = ReplyFormat(
    lambda syntax, _tools, rules, *, opens_reasoning, continues: DeepseekMachine(
        rules, opens_reasoning=opens_reasoning, close_token=syntax.close_token
    ),
    ("<think>", "</think>", "｜DSML｜"),
    require,
    delimited=True,
    opener=_OPENING,
)
