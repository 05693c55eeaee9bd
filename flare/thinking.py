"""From what a request asks of the thinking controls to the variables that the chat template gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare.conversation import Thinking
from flare.errors import RequestError

NO_THINKING: dict[str, Any] = {
    "supported": False,
    "source": None,
    "toggle": None,
    "effort": None,
    "default_level": None,
    "levels": [],
}
"""The table of a template without thinking controls."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Named levels from least to most, by which the nearest one is found."""


def template_variables(asked: Thinking, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template variables of the level that `asked` selects from a probed `table`: see `selected_level`.

    Nothing asked: nothing passed, the template's own default holds.
    """
    if asked.level is None and asked.switch is None:
        return {}
    level = selected_level(asked, table)
    variables: dict[str, Any] = {}
    if level is None:
        return variables
    if table["toggle"] is not None and level["enable_thinking"] is not None:
        variables[table["toggle"]] = level["enable_thinking"]
    if table["effort"] is not None and level["reasoning_effort"] is not None:
        variables[table["effort"]] = level["reasoning_effort"]
    return variables


def opens_reasoning(asked: Thinking, table: Mapping[str, Any], *, otherwise: bool = False) -> bool:
    """Returns whether the generation prompt of the selected level ends within reasoning; `otherwise` where none is."""
    level = selected_level(asked, table)
    return otherwise if level is None else level["opens_reasoning"] is True


def selected_level(asked: Thinking, table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the row of `table` that `asked` selects, None where there are no thinking controls.

    Nothing asked selects the default. A level must be one of the table's ids (or, with `nearest`, is replaced by the
    nearest one), a switch must agree with it; a switch alone picks `none`, or the default level if that thinks, else
    the first that does. With `nearest`, thinking that cannot be switched off becomes the least there is, and a model
    without controls takes everything. Raises RequestError with code unsupported_reasoning_effort, thinking_unsupported or
    conflicting_thinking.
    """
    levels: list[Mapping[str, Any]] = list(table["levels"])
    ids = [level["id"] for level in levels]
    if asked.level is None and asked.switch is None:
        return next((level for level in levels if level["default"]), None)
    if not table["supported"]:
        if asked.nearest or (asked.level in (None, "none") and asked.switch is not True):
            return None
        field = asked.level_field if asked.level not in (None, "none") else asked.switch_field
        text = "this model's chat template has no thinking controls; leave it out"
        raise refusal(field, text, ids, code="thinking_unsupported")
    if asked.level is not None:
        return _named_level(asked, levels, ids)
    if asked.switch:
        thinking = [level for level in levels if _thinks(level)]
        if not thinking:
            text = "this model's chat template cannot think; leave it out"
            raise refusal(asked.switch_field, text, ids, code="thinking_unsupported")
        return next((level for level in thinking if level["default"]), thinking[0])
    level = next((level for level in levels if not _thinks(level)), None)
    if level is None and not asked.nearest:
        text = "this model's chat template cannot switch thinking off; leave it out"
        raise refusal(asked.switch_field, text, ids, code="thinking_unsupported")
    return level if level is not None else _nearest("none", levels)


def _named_level(asked: Thinking, levels: list[Mapping[str, Any]], ids: list[str]) -> Mapping[str, Any] | None:
    assert asked.level is not None
    level = next((level for level in levels if level["id"] == asked.level), None)
    if level is None and asked.nearest and asked.level in EFFORTS:
        level = _nearest(asked.level, levels)
    if level is None:
        text = f"{asked.level[:80]!r} is not defined by this model's chat template; levels: {', '.join(ids)}"
        raise refusal(asked.level_field, text, ids, code="unsupported_reasoning_effort")
    if asked.switch is not None and asked.switch != _thinks(level):
        wants = "asks for thinking" if asked.switch else "asks for no thinking"
        text = f"{wants}, which contradicts {asked.level_field} {asked.level[:80]!r}; send one of them"
        raise refusal(asked.switch_field, text, ids, code="conflicting_thinking")
    return level


def _nearest(name: str, levels: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the level with the least distance to a name of EFFORTS that is not among them; of two the greater one.

    Some thinking never becomes `none`. Where no level that thinks has a name of EFFORTS, all of them are equally near:
    the default, if it thinks, else the first that does.
    """
    thinking = [level for level in levels if _thinks(level)]
    named = [level for level in thinking if level["id"] in EFFORTS]
    if not named:
        default = next((level for level in levels if level["default"]), None)
        return thinking[0] if thinking and default not in thinking else default
    rank = EFFORTS.index(name)
    return min(named, key=lambda level: (abs(EFFORTS.index(level["id"]) - rank), -EFFORTS.index(level["id"])))


def check_effort(effort: str, field: str, ids: list[str]) -> None:
    """Raises RequestError (unsupported_reasoning_effort) for an effort that is neither of EFFORTS nor a level, one of `ids`."""
    if effort not in EFFORTS and effort not in ids:
        text = f"{effort[:80]!r} is not one of {', '.join(dict.fromkeys([*EFFORTS, *ids]))}"
        raise refusal(field, text, ids, code="unsupported_reasoning_effort")


def _thinks(level: Mapping[str, Any]) -> bool:
    return level["id"] != "none"


def refusal(field: str, text: str, ids: list[str], *, code: str) -> RequestError:
    """The refusal of a thinking field, which lists the levels that there are."""
    return RequestError(f"{field}: {text}", param=field, code=code, extra={"levels": ids})
