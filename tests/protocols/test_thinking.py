"""The thinking controls: every spelling, the level that they select, and the four refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.errors import RequestError
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.thinking import template_variables
from tests.support.live_server import make_model


def level(id: str, switch: bool | None, effort: str | None, default: bool = False) -> dict[str, Any]:
    return {"id": id, "enable_thinking": switch, "reasoning_effort": effort, "default": default}


def table(toggle: str | None, effort: str | None, levels: list[dict[str, Any]]) -> dict[str, Any]:
    return {"supported": bool(levels), "toggle": toggle, "effort": effort, "levels": levels}


EFFORTS = table(
    "enable_thinking",
    "reasoning_effort",
    [
        level("none", False, None),
        level("xhigh", True, "xhigh", True),
        level("medium", True, "medium"),
        level("low", True, "low"),
    ],
)
SWITCH = table("enable_thinking", None, [level("none", False, None), level("on", True, None, True)])
OFF_BY_DEFAULT = table("enable_thinking", None, [level("none", False, None, True), level("on", True, None)])
ALWAYS = table(None, "reasoning_effort", [level("high", None, "high", True), level("low", None, "low")])
NOTHING = table(None, None, [])


def resolve(controls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The template variables that a chat request with these fields gets."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    (prompt,) = ChatCompletions().decode(body, make_model(thinking=controls)).generation.prompts
    return template_variables(prompt.thinking, controls)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"thinking_level": "low"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"reasoning_effort": "low", "enable_thinking": True, "thinking_level": "low"},
        {"reasoning_effort": "low", "thinking": {"type": "enabled"}, "reasoning": None, "chat_template_kwargs": {}},
    ],
)
def test_spellings_of_a_level_are_equivalent(fields: dict[str, Any]) -> None:
    assert resolve(EFFORTS, **fields) == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "enable_thinking": False},
    ],
)
def test_spellings_of_off_are_equivalent(fields: dict[str, Any]) -> None:
    assert resolve(EFFORTS, **fields) == {"enable_thinking": False}


def test_a_switch_alone_picks_a_level() -> None:
    assert resolve(EFFORTS, enable_thinking=True) == {"enable_thinking": True, "reasoning_effort": "xhigh"}
    assert resolve(SWITCH, enable_thinking=True) == {"enable_thinking": True}
    assert resolve(OFF_BY_DEFAULT, thinking=True) == {"enable_thinking": True}
    assert resolve(ALWAYS, enable_thinking=True) == {"reasoning_effort": "high"}


def test_nothing_asked_leaves_the_template_alone() -> None:
    for controls in (EFFORTS, SWITCH, ALWAYS, NOTHING):
        assert resolve(controls) == {}


def test_a_model_without_controls_does_not_think() -> None:
    assert resolve(NOTHING, reasoning_effort="none") == {}
    assert resolve(NOTHING, enable_thinking=False, reasoning_effort="none") == {}


@pytest.mark.parametrize(
    ("controls", "fields", "code", "param"),
    [
        (EFFORTS, {"reasoning_effort": "high"}, "unsupported_reasoning_effort", "reasoning_effort"),
        (EFFORTS, {"thinking_level": "minimal"}, "unsupported_reasoning_effort", "thinking_level"),
        (EFFORTS, {"reasoning": {"effort": "on"}}, "unsupported_reasoning_effort", "reasoning.effort"),
        (NOTHING, {"reasoning_effort": "low"}, "thinking_unsupported", "reasoning_effort"),
        (NOTHING, {"enable_thinking": True}, "thinking_unsupported", "enable_thinking"),
        (ALWAYS, {"enable_thinking": False}, "thinking_unsupported", "enable_thinking"),
        (EFFORTS, {"reasoning_effort": "low", "thinking_level": "medium"}, "conflicting_thinking", "thinking_level"),
        (EFFORTS, {"enable_thinking": True, "thinking": False}, "conflicting_thinking", "thinking"),
        (EFFORTS, {"enable_thinking": False, "reasoning_effort": "low"}, "conflicting_thinking", "enable_thinking"),
        (EFFORTS, {"enable_thinking": True, "reasoning_effort": "none"}, "conflicting_thinking", "enable_thinking"),
        (EFFORTS, {"enable_thinking": "yes"}, "invalid_thinking", "enable_thinking"),
        (EFFORTS, {"enable_thinking": 1}, "invalid_thinking", "enable_thinking"),
        (EFFORTS, {"reasoning_effort": 80}, "invalid_thinking", "reasoning_effort"),
        (EFFORTS, {"thinking": {"type": "adaptive"}}, "invalid_thinking", "thinking"),
        (EFFORTS, {"thinking": {"type": ["enabled"]}}, "invalid_thinking", "thinking"),
        (EFFORTS, {"reasoning": "low"}, "invalid_thinking", "reasoning"),
        (EFFORTS, {"reasoning": {"summary": True}}, "invalid_thinking", "reasoning.summary"),
        (EFFORTS, {"chat_template_kwargs": []}, "invalid_thinking", "chat_template_kwargs"),
    ],
)
def test_refusals(controls: dict[str, Any], fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(controls, **fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert error.extra == {"levels": [item["id"] for item in controls["levels"]]}


def test_other_template_variables_are_refused_by_name() -> None:
    with pytest.raises(RequestError) as caught:
        resolve(EFFORTS, chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs.chat_template"


def test_raw_prompts_check_the_fields_but_have_no_template() -> None:
    def decode(**fields: Any) -> None:
        Completions().decode(json.dumps({"prompt": "x", **fields}).encode(), make_model(thinking=EFFORTS))

    decode(reasoning_effort="anything", enable_thinking=False)
    with pytest.raises(RequestError) as caught:
        decode(enable_thinking=1)
    assert caught.value.code == "invalid_thinking"
