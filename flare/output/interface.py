"""The interface of output machines, and what they are made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import msgspec

from flare.conversation import ToolCall


class OutputError(Exception):
    """What the model wrote cannot be an answer to this request; `str(error)` may be shown to the client."""


class OutputSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a core's model marks reasoning and calls: stored in the core, the same for all requests.

    `tools` names the format of calls or of replies (`syntaxes.py`), None when the model has none. `reasoning` are the
    delimiters of reasoning; where a delimiter is one token, `open_token` and `close_token` are its id and only that token
    counts. `spelled` are tokens that the tokenizer calls special, and whose spellings the format is made of: the machine
    sees their text, which otherwise is left out.
    """

    tools: str | None = None
    reasoning: tuple[str, str] | None = None
    open_token: int | None = None
    close_token: int | None = None
    spelled: frozenset[int] = frozenset()


class Piece(NamedTuple):
    """A part of an answer in order. `text` for the first two kinds, `call` for the third.

    A "text" is a part of what the machine was given, without a gap: `behind` is how many characters of that came behind it.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None
    behind: int = 0


class Output(Protocol):
    """The machine of one choice.

    Both methods raise OutputError while their pieces are taken: those that came before it are part of the answer. Pieces
    are to be taken before the next token is pushed, unless the answer ends there.
    """

    reasoning_tokens: int
    """How many tokens so far were reasoning, delimiters left out."""

    @property
    def reasoning_open(self) -> bool:
        """Whether the reasoning that the reply began with is certain to be open: neither has a delimiter closed it, nor may a
        call have begun, or its opener with more than one character."""
        ...

    @property
    def undecided(self) -> int:
        """How many characters at the end of what it was given may yet be answer text, as of the last piece that was taken. What
        comes before them, and was no piece of text, never will be."""
        ...

    @property
    def calling(self) -> Literal["no", "undecided", "yes"]:
        """Whether a call has begun; undecided: an opener has come, and what follows may yet make it text."""
        ...

    def drain(self) -> Iterable[Piece]:
        """Returns what is held back, as text: from here on nothing is a marker."""
        ...

    def push(self, token: int, text: str) -> Iterable[Piece]:
        """Takes a token and the text that it made certain, which may be empty; returns the pieces that are certain.

        A negative token stands for text that belongs to none.
        """
        ...

    def end(self, *, natural: bool) -> Iterable[Piece]:
        """Returns what was held back. `natural`: the model ended the answer itself, or a stop did; not a limit."""
        ...


Said = Literal["more", "begun", "call", "text", "done"]
"""What came of a text, see `CallReader.feed`."""


class CallReader(Protocol):
    """Reads what follows the opener of a call, as one format has it; one reader serves all calls behind one opener.

    A call is complete when its arguments are: at the brace or the tag that ends them. What closes the opener may be missing
    or cut, so of a reader that is not `incomplete` nothing that it holds is text: it is the beginning of a closer or a gap.
    """

    @property
    def held(self) -> str:
        """What it has consumed and not used: the opener first, if no call has begun."""
        ...

    @property
    def certain(self) -> int:
        """How many characters of `held` are text if no call stands here; the rest is to be looked at again."""
        ...

    @property
    def call(self) -> tuple[str, str]:
        """Name and arguments, a JSON object as text, of the call that was completed last."""
        ...

    @property
    def within(self) -> bool:
        """A call has begun and is not complete: all that comes belongs to it."""
        ...

    @property
    def incomplete(self) -> bool:
        """An answer that ended here would lack the rest of a call, or of what can only become one."""
        ...

    def feed(self, data: str, at: int) -> tuple[Said, int]:
        """Reads on from `data[at]`; returns what came of it, and where it stopped. Raises OutputError.

        more: undecided or within a call, all of `data` is taken. begun: from here on it is a call and nothing else.
        call: a call is complete. text: no call stands here. done: the end of what the opener opened.
        """
        ...
