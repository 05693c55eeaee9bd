"""The errors for calls that cannot be passed on, in one form of words. Of the model's text they hold 80 characters at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flare.conversation import MAX_NESTING
from flare.output.interface import OutputError


def malformed(what: str) -> OutputError:
    """A call that its format does not allow."""
    return OutputError(f"the model wrote a tool call that is not well formed: {what}")


def not_json() -> OutputError:
    return OutputError("the model wrote a tool call that is not valid JSON")


def nameless() -> OutputError:
    return OutputError("the model wrote a tool call without a name")


def nameless_argument() -> OutputError:
    return OutputError("the model wrote a tool call that has an argument without a name")


def repeated(names: Iterable[str]) -> OutputError:
    """Two arguments of one name, or two members of an object within one. `names` has it twice."""
    name = next(name for name, count in Counter(names).items() if count > 1)
    return OutputError(f"the model wrote a tool call that has {name[:80]!r} twice")


def too_long(limit: int) -> OutputError:
    return OutputError(f"the model wrote a tool call of more than {limit} bytes")


def too_deep() -> OutputError:
    return OutputError(f"the model wrote a tool call whose arguments nest deeper than {MAX_NESTING} levels")


def cut_off() -> OutputError:
    """A call that the model itself left incomplete."""
    return OutputError("the model ended its answer within a tool call")
