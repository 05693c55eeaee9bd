"""The neutral request of a decision: what every protocol decodes into."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.fallbacks import Fallback


class Question(msgspec.Struct, frozen=True):
    """One question. `options` are the texts of its answers, in order, at least one. `field` is the client's name for them, for
    error texts."""

    instructions: str
    options: tuple[str, ...]
    field: str


class Inquiry(msgspec.Struct, frozen=True):
    """Questions about one `state`, each asked for itself: no answer depends on the other questions or on their order.

    `state_field` is the client's name for the state. `details` is the protocol's own: what its encoder shows of the request.
    """

    state: str
    state_field: str
    questions: tuple[Question, ...]
    details: Any = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all questions: of their prompts, those of them that came from a cache, and those that were generated.
    `fallbacks` are those that occurred meanwhile."""

    prompt: int
    cached: int
    generated: int
    fallbacks: tuple[Fallback, ...] = ()


def as_text(value: Any) -> str:
    """Returns a text as it is, and anything else as compact JSON, its members in the order in which they were sent."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
