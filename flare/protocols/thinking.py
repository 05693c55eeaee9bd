"""The spellings of the thinking controls in a request, brought together: one level and one switch."""

from __future__ import annotations

from typing import Any

from flare.conversation import Thinking
from flare.protocols.fields import CommonFields
from flare.protocols.hints import near_field
from flare.protocols.refusals import shown, unknown_field
from flare.thinking import refusal

SWITCH_WORDS = {"enabled": True, "disabled": False}


def decode_thinking(fields: CommonFields, levels: list[str]) -> Thinking:
    """Returns what the request asks for; null means "not sent" in every spelling.

    Level: reasoning_effort, thinking_level, reasoning.effort, chat_template_kwargs.reasoning_effort. Switch:
    enable_thinking, thinking (true, false or {"type": "enabled" | "disabled"}), chat_template_kwargs.enable_thinking.
    reasoning.summary has no effect: reasoning comes back whole.
    Raises RequestError with code invalid_thinking (a wrong type) or conflicting_thinking (two spellings that disagree);
    `levels` go with it.
    """
    template = _object(fields.chat_template_kwargs, "chat_template_kwargs", levels)
    reasoning = _object(fields.reasoning, "reasoning", levels)
    for name, value, known in (
        ("chat_template_kwargs", template, {"reasoning_effort", "enable_thinking"}),
        ("reasoning", reasoning, {"effort", "summary"}),
    ):
        for key in value:
            if key not in known and value[key] is not None:
                raise unknown_field(f"{name}.{shown(key)}", near_field(key, known))
    asked_levels = _sent(
        ("reasoning_effort", fields.reasoning_effort),
        ("thinking_level", fields.thinking_level),
        ("reasoning.effort", reasoning.get("effort")),
        ("chat_template_kwargs.reasoning_effort", template.get("reasoning_effort")),
    )
    asked_switches = _sent(
        ("enable_thinking", fields.enable_thinking),
        ("thinking", _switch_word(fields.thinking)),
        ("chat_template_kwargs.enable_thinking", template.get("enable_thinking")),
    )
    for name, value in asked_levels:
        if not isinstance(value, str):
            raise refusal(name, "expected a string, the name of a level", levels, code="invalid_thinking")
    if not isinstance(reasoning.get("summary"), str | None):
        raise refusal("reasoning.summary", "expected a string", levels, code="invalid_thinking")
    for name, value in asked_switches:
        if not isinstance(value, bool):
            raise refusal(name, "expected true or false", levels, code="invalid_thinking")
    for sent in (asked_levels, asked_switches):
        for name, value in sent[1:]:
            if value != sent[0][1]:
                raise refusal(name, f"disagrees with {sent[0][0]}", levels, code="conflicting_thinking")
    level_field, level = asked_levels[0] if asked_levels else ("reasoning_effort", None)
    switch_field, switch = asked_switches[0] if asked_switches else ("enable_thinking", None)
    return Thinking(level, level_field, switch, switch_field)


def _sent(*spellings: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in spellings if value is not None]


def _object(value: Any, name: str, levels: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(name, "expected an object", levels, code="invalid_thinking")
    return value


def _switch_word(value: Any) -> Any:
    """Returns the switch that `thinking` stands for; what is neither form comes back as it is, to be refused."""
    if isinstance(value, dict) and set(value) == {"type"} and isinstance(value["type"], str):
        return SWITCH_WORDS.get(value["type"], value)
    return value
