"""The manifest's open tables (sampling defaults and ranges, template facts), checked when a core is loaded.

What gets past here is used by every request without another look, so a wrong entry is one line at the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from flare.core.manifest import Manifest
from flare.core.sampling import NEUTRAL, VALID, WHOLE
from flare.errors import CoreError
from flare.output import FORMATS
from flare.thinking import NO_THINKING

LEVEL = {
    "id": (str,),
    "default": (bool,),
    "enable_thinking": (bool, type(None)),
    "reasoning_effort": (str, type(None)),
    "opens_reasoning": (bool,),
}
"""What a thinking level has, and the types of each."""

THINKING = {
    "supported": (bool,),
    "toggle": (str, type(None)),
    "effort": (str, type(None)),
    "levels": (list,),
}
"""What of the thinking table requests are resolved with, and the types of each."""


OUTPUT = ("tools", "reasoning", "open_token", "close_token", "spelled")
"""What the output table may have: how the model marks calls and reasoning."""


def check_tables(manifest: Manifest) -> None:
    """Checks all open tables of a manifest. Raises CoreError naming the first field that no request could be served with."""
    sampling = manifest.sampling
    check_defaults(sampling.defaults)
    check_facts(manifest.template.facts, manifest.model.vocabulary)
    if sampling.ranges != "open":
        checked_ranges(sampling.ranges, sampling.defaults)


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises CoreError for the default of a field that a request could not be served with. null is no default."""
    for name in (*NEUTRAL, *WHOLE):
        value = defaults.get(name)
        if value is not None:
            _check_number(f"sampling.defaults.{name}", name, value)


def checked_ranges(ranges: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, tuple[float, float] | None]:
    """Returns the bounds of each sampling field, None where it is fixed. Raises CoreError, also where they do not hold the
    field's default."""
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
        if name == "temperature" and pair[0] <= 0:
            _refuse(field, pair, "bounds above 0")
        default = defaults.get(name)
        if not pair[0] <= (NEUTRAL[name] if default is None else default) <= pair[1]:
            _refuse(field, pair, f"bounds that hold the default, {NEUTRAL[name] if default is None else default}")
        checked[name] = (pair[0], pair[1])
    return checked


def check_facts(facts: Mapping[str, Any], vocabulary: int) -> None:
    """Raises CoreError for template facts of another shape than the exporter's. Absent or null is "nothing found"."""
    for name in ("inline_system", "opens_reasoning", "generation_prompt_switch"):
        if type(facts.get(name, False)) is not bool:
            _refuse(f"template.facts.{name}", facts[name], "true or false")
    variables = facts.get("variables")
    if variables is not None and not (type(variables) is list and all(type(name) is str for name in variables)):
        _refuse("template.facts.variables", variables, "a list of names")
    tokens = facts.get("special_tokens")
    if tokens is not None and not (type(tokens) is dict and all(type(text) is str for text in tokens.values())):
        _refuse("template.facts.special_tokens", tokens, "an object of texts")
    _check_thinking("template.facts.thinking", facts.get("thinking"))
    _check_members("template.facts.system", facts.get("system"), {"leading": (str,), "default": (str, type(None))})
    _check_members("template.facts.content", facts.get("content"), {"string": (bool,), "parts": (bool,)})
    tools = facts.get("tools")
    _check_members("template.facts.tools", tools, {"declared": (bool,), "arguments": (str, type(None))})
    if tools is not None and tools.get("arguments") not in (None, "mapping", "string"):
        _refuse("template.facts.tools.arguments", tools["arguments"], "mapping, string or null")
    _check_output("template.facts.output", facts.get("output"), vocabulary)


def _check_thinking(where: str, thinking: Any) -> None:
    if thinking is None:
        return
    _check_object(where, thinking, THINKING)
    if unknown := sorted(thinking.keys() - NO_THINKING.keys()):
        _refuse(where, unknown[0], f"only {', '.join(NO_THINKING)}")
    for index, level in enumerate(thinking["levels"]):
        _check_object(f"{where}.levels[{index}]", level, LEVEL)


def _check_output(where: str, output: Any, vocabulary: int) -> None:
    if output is None:
        return
    _check_members(where, output, {})
    if unknown := sorted(output.keys() - set(OUTPUT)):
        _refuse(where, unknown[0], f"only {', '.join(OUTPUT)}")
    if output.get("tools") not in (None, *FORMATS):
        _refuse(f"{where}.tools", output["tools"], f"null or one of {', '.join(sorted(FORMATS))}")
    spelled = output.get("spelled", [])
    if type(spelled) is not list or any(type(token) is not int or not 0 <= token < vocabulary for token in spelled):
        _refuse(f"{where}.spelled", spelled, f"a list of token ids, 0 to {vocabulary - 1}")
    reasoning = output.get("reasoning")
    if reasoning is not None:
        texts = type(reasoning) is list and [text for text in reasoning if type(text) is str and text]
        if not texts or len(reasoning) != 2 or len(set(texts)) != 2:
            _refuse(f"{where}.reasoning", reasoning, "two different texts, the opening and the closing one, or null")
    for name in ("open_token", "close_token"):
        token = output.get(name)
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < vocabulary:
            _refuse(f"{where}.{name}", token, f"a token's id, 0 to {vocabulary - 1}, or null")
        if reasoning is None:
            _refuse(f"{where}.{name}", token, "null, as there are no delimiters of reasoning")
    if output.get("open_token") is not None and output.get("open_token") == output.get("close_token"):
        _refuse(f"{where}.close_token", output["close_token"], "another token than open_token")


def _check_members(field: str, value: Any, members: Mapping[str, tuple[type, ...]]) -> None:
    """As `_check_object`, where the object and every member may be absent."""
    if value is not None:
        present = {name: types for name, types in members.items() if type(value) is dict and name in value}
        _check_object(field, value, present)


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
