"""Thinking on Messages: what a request asks of it, and the marker that a thinking block carries."""

from __future__ import annotations

from hashlib import sha256

from flare.conversation import Thinking, ThinkingBudget
from flare.errors import RequestError
from flare.protocols.fields import thinking_budget
from flare.protocols.messages_fields import ThinkingBlock, ThinkingConfig
from flare.served import ServedModel
from flare.thinking import check_effort

MARKER = "flare-thinking-v1:"

EFFORT_BY_BUDGET = ((5_000, "low"), (20_000, "high"))
"""A budget of at most so many tokens asks for this effort, a larger one for `max`."""


class Marker:
    """The marker of a text that arrives in pieces. It shows that a text came back unchanged, not who wrote it."""

    __slots__ = ("_digest",)

    def __init__(self, text: str = "") -> None:
        self._digest = sha256(text.encode())

    def add(self, text: str) -> None:
        self._digest.update(text.encode())

    def __str__(self) -> str:
        return MARKER + self._digest.hexdigest()[:32]


def check_marker(block: ThinkingBlock, path: str) -> None:
    """Raises RequestError for a marker of this server with another text. Signatures of others say nothing here."""
    if block.signature.startswith(MARKER) and block.signature != str(Marker(block.thinking)):
        text = "does not belong to this text; send the block back as it came, or leave it out"
        raise RequestError(f"{path}.signature: {text}", param=f"{path}.signature")


def asked_thinking(config: ThinkingConfig | None, effort: str | None, model: ServedModel) -> Thinking:
    """Returns what `thinking` and `output_config.effort` ask for; the nearest level that the template has is taken.

    An effort comes before a budget. Where thinking is disabled the effort is about the answer alone, which no template
    controls. Raises RequestError for an effort that no level has as its name, and for a budget of disabled thinking.
    """
    if effort is not None:
        check_effort(effort, "output_config.effort", model.levels)
    switch = None
    level = effort
    level_field = "output_config.effort"
    if config is not None:
        switch = config.type != "disabled"
        budget = config.budget_tokens
        if not switch:
            level = None
            if budget is not None:
                text = "thinking.budget_tokens: thinking is disabled; leave the budget out, or enable it"
                raise RequestError(text, param="thinking.budget_tokens")
        elif level is None and budget is not None:
            level = next((name for limit, name in EFFORT_BY_BUDGET if budget <= limit), "max")
            level_field = "thinking.budget_tokens"
    return Thinking(level, level_field, switch, "thinking.type", nearest=True)


def asked_budget(config: ThinkingConfig | None, tokens: int | None, model: ServedModel) -> ThinkingBudget | None:
    """Returns the budget of `thinking.budget_tokens` and `thinking_token_budget`, or else the server's.

    The first alone is but a hint to models that cannot be held to it. Raises RequestError where the two differ.
    """
    hinted = None if config is None else config.budget_tokens
    if hinted is None or tokens is not None:
        if hinted not in (None, tokens):
            text = f"thinking_token_budget: {tokens} differs from thinking.budget_tokens; send one of them"
            raise RequestError(text, param="thinking_token_budget", code="conflicting_thinking")
        return thinking_budget(tokens, model)
    return ThinkingBudget(hinted, hint=True)
