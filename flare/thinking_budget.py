"""Budgets of reasoning: whether a reply can be held to one, and where its reasoning is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from flare.conversation import ThinkingBudget
from flare.errors import InputError, RequestError
from flare.output import Output, OutputError, OutputSyntax, closes_reasoning, frames_reasoning

if TYPE_CHECKING:
    from flare.engine import ForcedToken

FIELD = "thinking_token_budget"

SEVERAL = -1
"""Stands for the token of text that belongs to several; the output machine counts no negative token."""


class Decoder(Protocol):
    """Tokens to text, incrementally."""

    def push(self, token: int) -> str: ...


def check_default(budget: int | None, syntax: OutputSyntax) -> None:
    """Raises InputError for a default budget of all replies on a model whose reasoning cannot be closed."""
    if budget is None or closes_reasoning(syntax):
        return
    why = "no delimiters of reasoning" if syntax.reasoning is None else "no single token that closes reasoning"
    raise InputError(f"{FIELD}: {budget} cannot be kept, this core declares {why}; leave the setting out")


def tokens_to_close_after(budget: ThinkingBudget | None, syntax: OutputSyntax, *, opens_reasoning: bool) -> int | None:
    """Returns how many tokens a reply may have before its reasoning is closed, None where it never is.

    Raises RequestError for a budget that would be without an effect although the reply may begin with reasoning, unless
    it is a hint.
    """
    if budget is None:
        return None
    if closes_reasoning(syntax):
        return budget.tokens if opens_reasoning else None
    if (opens_reasoning or frames_reasoning(syntax)) and not budget.hint:
        text = "this model's reasoning cannot be closed by one token; leave it out, or lower the effort"
        raise RequestError(f"{FIELD}: {text}", param=FIELD)
    return None


def closing(
    after: int, syntax: OutputSyntax, decoder: Callable[[], Decoder], output: Callable[[], Output | None]
) -> ForcedToken:
    """Returns the token that closes a reply's reasoning behind so many tokens, if it is open then; `decoder` and `output`
    make what reads the reply from its beginning, which is within reasoning."""
    from flare.engine import ForcedToken

    assert syntax.close_token is not None

    def applies(reply: Sequence[int]) -> bool:
        machine = output()
        return machine is not None and reasoning_open(reply, syntax, decoder(), machine)

    return ForcedToken(after, syntax.close_token, applies)


def reasoning_open(reply: Sequence[int], syntax: OutputSyntax, decoder: Decoder, output: Output) -> bool:
    """Whether reasoning is open for certain behind these tokens. `decoder` and `output` are new ones.

    The text is read at once, which is several times as fast as token by token: how it is cut means nothing, but for the
    tokens that are delimiters or part of the format.
    """
    if syntax.close_token in reply:
        return False
    marks = syntax.spelled | {syntax.open_token}
    push = decoder.push
    texts: list[str] = []
    try:
        for token in reply:
            if token in marks:
                _take(output, SEVERAL, "".join(texts))
                texts.clear()
                _take(output, token, push(token))
            else:
                texts.append(push(token))
        _take(output, SEVERAL, "".join(texts))
    except OutputError:
        return False  # where the reply itself is read it fails as well
    return output.reasoning_open


def _take(output: Output, token: int, text: str) -> None:
    for _ in output.push(token, text):
        pass
