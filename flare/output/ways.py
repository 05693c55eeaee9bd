"""How a reply comes to its answer, to its reasoning or to a call: what a reply under an output constraint may begin with."""

from __future__ import annotations

from typing import NamedTuple

from flare.conversation import Tools
from flare.output.interface import OutputSyntax
from flare.output.openers import CallFormat, Frames, ReplyFormat, Way
from flare.output.syntaxes import BARE, find_format


class Ways(NamedTuple):
    """The ways of one model's replies.

    `first` lead on from the reply's beginning, `behind` from the end of reasoning; `direct_first` and `direct_behind`: there
    the answer itself may begin. Reasoning ends with `close`, as the token `close_token` where that is one. `framed`: no other
    marker may come within reasoning, and no line breaks may stand between it and what follows. `undecided`: an opener may
    turn out to be text, and a call may begin within reasoning.
    """

    first: tuple[Way, ...] = ()
    behind: tuple[Way, ...] = ()
    direct_first: bool = True
    direct_behind: bool = True
    close: str | None = None
    close_token: int | None = None
    framed: bool = False
    undecided: bool = False


def reply_ways(syntax: OutputSyntax, tools: Tools, *, continues: bool = False) -> Ways | None:
    """Returns the ways of a reply; None where the format's frames are no tokens, so that no answer can be told from them.

    `tools`: those that may be called lead to calls; where one has to be, no answer stands instead.
    """
    found = None if syntax.tools is None else find_format(syntax.tools)
    callable_ = tools if tools.offered and tools.choice != "none" else Tools()
    if isinstance(found, ReplyFormat) and found.frames is not None:
        return _framed(found.frames, syntax, callable_, continues)
    openers: tuple[str, ...] = ()
    if found is not None and callable_.offered:
        openers = (found.opener,) if isinstance(found, ReplyFormat) else tuple(o.text for o in found.openers)
    calls = tuple(Way(text, "call") for text in openers if text[0] != BARE)
    undecided = isinstance(found, CallFormat) and bool(calls)
    answers = not calls or tools.choice not in ("required", "named")
    if syntax.reasoning is None:
        return Ways(calls, calls, answers, answers, undecided=undecided)
    opens, close = syntax.reasoning
    if isinstance(found, ReplyFormat):
        # DeepSeek's parser knows no opening delimiter, and takes the closing one's spelling too.
        return Ways(calls, calls, answers, answers, close)
    first = (Way(opens, "reasoning", syntax.open_token), *calls)
    return Ways(first, calls, answers, answers, close, syntax.close_token, undecided=undecided)


def _framed(frames: Frames, syntax: OutputSyntax, tools: Tools, continues: bool) -> Ways | None:
    if not syntax.spelled:
        return None
    first = () if continues else frames.first(tools)
    return Ways(first, frames.behind(tools), continues or frames.direct, False, frames.close, framed=True)
