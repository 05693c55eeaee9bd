"""What a format is made from: what begins a call and what reads on from there, or the machine of whole replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from flare.conversation import Tools
from flare.output.interface import CallReader, Output, OutputSyntax
from flare.output.rules import Rules


class Opener(NamedTuple):
    """A text that may begin a call. `in_reasoning`: also within reasoning, which a call then ends. `first`: only where
    nothing but white space stands before it, back to the beginning of the answer, a delimiter or a call."""

    text: str
    in_reasoning: bool = True
    first: bool = False


class Calls(NamedTuple):
    """How one choice's calls are found: `reader` makes what reads on behind an opener, given its text."""

    openers: tuple[Opener, ...]
    reader: Callable[[str], CallReader]


class CallFormat(NamedTuple):
    """A format of calls. `reader` makes what reads on behind an opener, given its text and the request's tools."""

    openers: tuple[Opener, ...]
    reader: Callable[[str, Tools], CallReader]


class Way(NamedTuple):
    """A text that leads to a place of a reply. `token`: only that token does, not its spelling in others."""

    text: str
    to: Literal["answer", "reasoning", "call"]
    token: int | None = None


class Frames(NamedTuple):
    """How a reply in frames comes to its answer: `first` are the ways from its beginning, given the tools that may be called,
    `behind` those from the end of reasoning, which is the marker `close`. `direct`: the answer may begin right away."""

    close: str
    first: Callable[[Tools], tuple[Way, ...]]
    behind: Callable[[Tools], tuple[Way, ...]]
    direct: bool


class ReplyMachine(Protocol):
    """Makes the machine of a reply: of a core's syntax, the request's tools, and the rules for its calls, None where none
    may come. See `make_output`."""

    def __call__(
        self, syntax: OutputSyntax, tools: Tools, rules: Rules | None, /, *, opens_reasoning: bool, continues: bool
    ) -> Output: ...


class ReplyFormat(NamedTuple):
    """A format of replies. `markers` are the texts that give a reply its structure: where one is a special token, the machine
    has to see its text. `require` imports what it needs besides flare, and raises InputError where that fails.
    `delimited`: its reasoning stands between the core's delimiters, and `opener` begins a call; otherwise it has `frames`.
    """

    machine: ReplyMachine
    markers: tuple[str, ...]
    require: Callable[[], None] = lambda: None
    delimited: bool = False
    opener: str = ""
    frames: Frames | None = None
