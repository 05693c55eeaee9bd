"""The spellings of the thinking controls in a request, brought together: one level and one switch; and the further variables
of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flare.conversation import Thinking
from flare.errors import RequestError
from flare.protocols.endpoint import encode_json
from flare.protocols.fields import CommonFields
from flare.protocols.hints import near_field
from flare.protocols.refusals import shown, unknown_field
from flare.protocols.tools import check_nesting
from flare.served import ServedModel
from flare.text.template import EFFORTS, TOGGLES
from flare.thinking import refusal

SWITCH_WORDS = {"enabled": True, "disabled": False}

MAX_VARIABLES_BYTES = 4096
"""JSON of all template variables of a request but the thinking controls."""

MAX_VARIABLE_NESTING = 8
"""Arrays and objects inside each other in one of them."""

KWARGS = "chat_template_kwargs"

Spelling = tuple[str, Any]
"""A field and its value."""


class Asked(NamedTuple):
    """What a request asks of the thinking controls, and the further variables that it sets."""

    thinking: Thinking
    variables: dict[str, Any]


class TemplateAsked(NamedTuple):
    """The same of `chat_template_kwargs` alone, as it is spelled there."""

    levels: list[Spelling]
    switches: list[Spelling]
    variables: dict[str, Any]


def decode_thinking(fields: CommonFields, model: ServedModel) -> Asked:
    """Returns what the request asks for; null means "not sent" in every spelling.

    Level: reasoning_effort, thinking_level, reasoning.effort, chat_template_kwargs. Switch: enable_thinking, thinking (true,
    false or {"type": "enabled" | "disabled"}), chat_template_kwargs. reasoning.summary has no effect: reasoning comes back
    whole. Raises RequestError with code invalid_thinking (a wrong type) or conflicting_thinking (two spellings that
    disagree); the model's levels go with it; and as `decode_template` does.
    """
    levels = model.levels
    template = decode_template(fields.chat_template_kwargs, model)
    reasoning = _object(fields.reasoning, "reasoning", levels)
    known = {"effort", "summary"}
    for key in reasoning:
        if key not in known and reasoning[key] is not None:
            raise unknown_field(f"reasoning.{shown(key)}", near_field(key, known))
    if not isinstance(reasoning.get("summary"), str | None):
        raise refusal("reasoning.summary", "expected a string", levels, code="invalid_thinking")
    asked_levels = _sent(
        ("reasoning_effort", fields.reasoning_effort),
        ("thinking_level", fields.thinking_level),
        ("reasoning.effort", reasoning.get("effort")),
    )
    asked_switches = _sent(("enable_thinking", fields.enable_thinking), ("thinking", _switch_word(fields.thinking)))
    thinking = agreed([*asked_levels, *template.levels], [*asked_switches, *template.switches], levels)
    return Asked(thinking, template.variables)


def decode_template(kwargs: Any, model: ServedModel) -> TemplateAsked:
    """Returns what `chat_template_kwargs` asks for. The thinking controls have their names of this API there, and those of the
    template, whose efforts are the template's own words.

    Raises RequestError for a variable that the template does not read, and for too many bytes or too deep nesting of those
    that only the template knows.
    """
    table = model.thinking
    given = {name: value for name, value in _object(kwargs, KWARGS, model.levels).items() if value is not None}
    asked = TemplateAsked([], [], {})
    ids = {level["reasoning_effort"]: level["id"] for level in table["levels"]}
    for name, value in given.items():
        field = f"{KWARGS}.{shown(name)}"
        if name in ("enable_thinking", table["toggle"]):
            asked.switches.append((field, value))
        elif name in TOGGLES and name in model.variables and table["toggle"] is not None and isinstance(value, bool):
            asked.switches.append((field, value))  # templates that read both take one for the other
        elif name == table["effort"]:
            asked.levels.append((field, ids.get(value, value) if isinstance(value, str) else value))
        elif name == "reasoning_effort":
            asked.levels.append((field, value))
        elif name in EFFORTS and name in model.variables and table["effort"] is not None and isinstance(value, str):
            asked.levels.append((field, ids.get(value, value)))
        elif name in model.variables:
            check_nesting(value, field, MAX_VARIABLE_NESTING)
            asked.variables[name] = value
        else:
            known = sorted({"enable_thinking", "reasoning_effort", *model.variables})
            raise unknown_field(field, near_field(name, known) or f"it can hold {', '.join(known)}")
    size = len(encode_json(asked.variables))
    if size > MAX_VARIABLES_BYTES:
        text = f"{KWARGS}: {size} bytes of JSON beside the thinking controls, the limit is {MAX_VARIABLES_BYTES}"
        raise RequestError(text, param=KWARGS)
    return asked


def agreed(asked_levels: Sequence[Spelling], asked_switches: Sequence[Spelling], levels: list[str]) -> Thinking:
    """Returns the one level and the one switch of all spellings, which come with their fields' names.

    Raises RequestError for a wrong type, and for two that disagree.
    """
    for name, value in asked_levels:
        if not isinstance(value, str):
            named = f"a string, the name of a level: {', '.join(levels)}" if levels else "a string, the name of a level"
            raise refusal(name, f"{_value(value)} is not {named}", levels, code="invalid_thinking")
    for name, value in asked_switches:
        if not isinstance(value, bool):
            text = f"{_value(value)} is not true or false"
            if name == "thinking":
                text += ", nor {type} of enabled or disabled alone; for a budget send thinking_token_budget"
            raise refusal(name, text, levels, code="invalid_thinking")
    for sent in (asked_levels, asked_switches):
        for name, value in sent[1:]:
            if value != sent[0][1]:
                raise refusal(
                    name, f"disagrees with {sent[0][0]}; send one of them", levels, code="conflicting_thinking"
                )
    level_field, level = asked_levels[0] if asked_levels else ("reasoning_effort", None)
    switch_field, switch = asked_switches[0] if asked_switches else ("enable_thinking", None)
    return Thinking(level, level_field, switch, switch_field)


def _sent(*spellings: Spelling) -> list[Spelling]:
    return [(name, value) for name, value in spellings if value is not None]


def _object(value: Any, name: str, levels: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(name, "expected an object", levels, code="invalid_thinking")
    return value


def _value(value: Any) -> str:
    """A value of the wrong type as an error repeats it."""
    return shown(encode_json(value).decode())


def _switch_word(value: Any) -> Any:
    """Returns the switch that `thinking` stands for; what is neither form comes back as it is, to be refused."""
    if isinstance(value, dict) and set(value) == {"type"} and isinstance(value["type"], str):
        return SWITCH_WORDS.get(value["type"], value)
    return value
