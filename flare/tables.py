"""The manifest's open tables (sampling defaults and ranges, template facts), checked when a core is loaded.

What gets past here is used by every request without another look, so a wrong entry is one line at the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from flare.errors import CoreError
from flare.served import NEUTRAL, VALID
from flare.thinking import NO_THINKING

WHOLE = {
    "top_k": VALID["top_k"],
    "seed": (0, 2**63 - 1),
    "max_new_tokens": (1, 2**63 - 1),
    "max_length": (1, 2**63 - 1),
}
"""Defaults that are integers, and their bounds, inclusive."""

LEVEL = {"id": (str,), "default": (bool,), "enable_thinking": (bool, type(None)), "reasoning_effort": (str, type(None))}
"""What a thinking level has, and the types of each."""

THINKING = {
    "supported": (bool,),
    "toggle": (str, type(None)),
    "effort": (str, type(None)),
    "levels": (list,),
}
"""What of the thinking table requests are resolved with, and the types of each."""


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises CoreError for the default of a field that a request could not be served with. null is no default."""
    for name in (*NEUTRAL, *WHOLE):
        value = defaults.get(name)
        if value is not None:
            _check_number(f"sampling.defaults.{name}", name, value)


def checked_ranges(ranges: Mapping[str, Any]) -> dict[str, tuple[float, float] | None]:
    """Returns the bounds of each sampling field, None where it is fixed. Raises CoreError."""
    checked: dict[str, tuple[float, float] | None] = {}
    for name, pair in ranges.items():
        field = f"sampling.ranges.{name}"
        if name not in NEUTRAL:
            _refuse(field, pair, f"one of the fields {', '.join(NEUTRAL)}")
        if pair is None:
            checked[name] = None
            continue
        if type(pair) is not list or len(pair) != 2:
            _refuse(field, pair, "[least, most] or null")
        for value in pair:
            _check_number(field, name, value)
        if pair[0] > pair[1]:
            _refuse(field, pair, "the least value first")
        checked[name] = (pair[0], pair[1])
    return checked


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raises CoreError for template facts of another shape than the prober's. Absent or null is "nothing found"."""
    if type(facts.get("inline_system", False)) is not bool:
        _refuse("template.facts.inline_system", facts["inline_system"], "true or false")
    tokens = facts.get("special_tokens")
    if tokens is not None and not (type(tokens) is dict and all(type(text) is str for text in tokens.values())):
        _refuse("template.facts.special_tokens", tokens, "an object of texts")
    thinking = facts.get("thinking")
    if thinking is None:
        return
    where = "template.facts.thinking"
    _check_object(where, thinking, THINKING)
    if unknown := sorted(thinking.keys() - NO_THINKING.keys()):
        _refuse(where, unknown[0], f"only {', '.join(NO_THINKING)}")
    for index, level in enumerate(thinking["levels"]):
        _check_object(f"{where}.levels[{index}]", level, LEVEL)


def _check_object(field: str, value: Any, members: Mapping[str, tuple[type, ...]]) -> None:
    if type(value) is not dict:
        _refuse(field, value, "an object")
    for name, types in members.items():
        if name not in value:
            _refuse(field, sorted(value), f"a member {name}")
        if type(value[name]) not in types:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            _refuse(f"{field}.{name}", value[name], names)


def _check_number(field: str, name: str, value: Any) -> None:
    low, high = WHOLE.get(name) or VALID[name]
    if name in WHOLE and type(value) is not int:
        _refuse(field, value, "a whole number")
    if type(value) not in (int, float) or not math.isfinite(value):
        _refuse(field, value, "a number")
    if not low <= value <= high:
        _refuse(field, value, f"{low:.16g} to {high:.16g}")


def _refuse(field: str, value: object, wanted: str) -> NoReturn:
    raise CoreError(f"core.json: {field} is {str(value)[:80]!r}, wanted {wanted}; export the core again")
