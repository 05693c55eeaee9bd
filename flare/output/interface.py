"""The interface of output machines, and the one place that chooses and builds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from flare.conversation import ToolCall, Tools


class OutputError(Exception):
    """What the model wrote cannot be an answer to this request; `str(error)` may be shown to the client."""


class OutputSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a core's model marks reasoning and calls: stored in the core, the same for all requests.

    `tools` names the syntax of calls, None when the model has none. `reasoning` are the delimiters of reasoning; where a
    delimiter is one token, `open_token` and `close_token` are its id and only that token counts.
    """

    tools: Literal["hermes"] | None = None
    reasoning: tuple[str, str] | None = None
    open_token: int | None = None
    close_token: int | None = None


class Piece(NamedTuple):
    """A part of an answer in order. `text` for the first two kinds, `call` for the third."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


class Output(Protocol):
    """The machine of one choice. Both methods raise OutputError."""

    def push(self, token: int, text: str) -> Sequence[Piece]:
        """Takes a token and the text that it made certain, which may be empty; returns the pieces that are certain."""
        ...

    def end(self, *, natural: bool) -> Sequence[Piece]:
        """Returns what was held back. `natural`: the model ended the answer itself, or a stop did; not a limit."""
        ...


def make_output(syntax: OutputSyntax, tools: Tools, *, opens_reasoning: bool, call_prefix: str) -> Output | None:
    """Returns a machine for one choice, None where all text is answer.

    `opens_reasoning`: the prompt ends within reasoning. Ids of calls begin with `call_prefix` and are unique in it.
    """
    if syntax.tools is None and syntax.reasoning is None:
        return None
    raise NotImplementedError
