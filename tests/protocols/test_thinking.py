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
NATIVE = table("thinking", "thinking_effort", [level("none", False, None), level("big", True, "BIG", True)])
MODE = table(
    None,
    "thinking_mode",
    [level("none", False, "disabled"), level("on", True, "enabled", True), level("auto", None, "auto")],
)
VARIABLES = frozenset({"enable_thinking", "reasoning_effort", "today", "persona"})


def resolve(controls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The template variables that a chat request with these fields gets."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    (prompt,) = ChatCompletions().decode(body, make_model(thinking=controls, variables=VARIABLES)).generation.prompts
    return prompt.variables | template_variables(prompt.thinking, controls)


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
        (NATIVE, {"chat_template_kwargs": {"thinking": "on"}}, "invalid_thinking", "chat_template_kwargs.thinking"),
        (
            NATIVE,
            {"chat_template_kwargs": {"thinking_effort": ["BIG"]}},
            "invalid_thinking",
            "chat_template_kwargs.thinking_effort",
        ),
        (
            NATIVE,
            {"chat_template_kwargs": {"thinking_effort": "small"}},
            "unsupported_reasoning_effort",
            "chat_template_kwargs.thinking_effort",
        ),
        (
            MODE,
            {"reasoning_effort": "on", "chat_template_kwargs": {"thinking_mode": "disabled"}},
            "conflicting_thinking",
            "chat_template_kwargs.thinking_mode",
        ),
    ],
)
def test_refusals(controls: dict[str, Any], fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(controls, **fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert error.extra == {"levels": [item["id"] for item in controls["levels"]]}


LEVELS = "none, xhigh, medium, low"


@pytest.mark.parametrize(
    ("controls", "fields", "text"),
    [
        (EFFORTS, {"reasoning_effort": 80}, f"80 is not a string, the name of a level: {LEVELS}"),
        (NOTHING, {"reasoning_effort": 80}, "80 is not a string, the name of a level"),
        (
            EFFORTS,
            {"thinking": {"type": "enabled", "budget_tokens": 100}},
            '{"type":"enabled","budget_tokens":100} is not true or false, nor {type} of enabled or disabled alone; '
            "for a budget send thinking_token_budget",
        ),
        (EFFORTS, {"enable_thinking": "yes"}, '"yes" is not true or false'),
        (
            EFFORTS,
            {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
            "asks for thinking, which contradicts reasoning_effort 'none'; send one of them",
        ),
        (
            EFFORTS,
            {"enable_thinking": False, "reasoning_effort": "low"},
            "asks for no thinking, which contradicts reasoning_effort 'low'; send one of them",
        ),
        (EFFORTS, {"enable_thinking": True, "thinking": False}, "disagrees with enable_thinking; send one of them"),
        (NOTHING, {"enable_thinking": True}, "this model's chat template has no thinking controls; leave it out"),
        (ALWAYS, {"enable_thinking": False}, "this model's chat template cannot switch thinking off; leave it out"),
    ],
)
def test_refusals_show_the_value_and_a_way_out(controls: dict[str, Any], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(controls, **fields)
    assert str(caught.value) == f"{caught.value.param}: {text}"
    with pytest.raises(RequestError) as caught:
        resolve(EFFORTS, thinking={"type": "x" * 5000})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("controls", "kwargs", "variables"),
    [
        (NATIVE, {"thinking": False}, {"thinking": False}),
        (NATIVE, {"thinking": True}, {"thinking": True, "thinking_effort": "BIG"}),
        (NATIVE, {"thinking_effort": "BIG"}, {"thinking": True, "thinking_effort": "BIG"}),
        (NATIVE, {"thinking_effort": "BIG", "reasoning_effort": "big"}, {"thinking": True, "thinking_effort": "BIG"}),
        (NATIVE, {"enable_thinking": False, "thinking": False}, {"thinking": False}),
        (MODE, {"thinking_mode": "disabled"}, {"thinking_mode": "disabled"}),
        (MODE, {"thinking_mode": "auto", "reasoning_effort": "auto"}, {"thinking_mode": "auto"}),
        (MODE, {"enable_thinking": True}, {"thinking_mode": "enabled"}),
    ],
)
def test_the_templates_own_names_and_words(
    controls: dict[str, Any], kwargs: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert resolve(controls, chat_template_kwargs=kwargs) == variables


def test_a_second_name_that_the_template_reads_is_a_spelling_too() -> None:
    variables = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_effort"})

    def asked(controls: dict[str, Any], kwargs: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs, **fields})
        model = make_model(thinking=controls, variables=variables)
        (prompt,) = ChatCompletions().decode(body.encode(), model).generation.prompts
        return prompt.variables | template_variables(prompt.thinking, controls)

    assert asked(EFFORTS, {"thinking": False}) == {"enable_thinking": False}
    assert asked(EFFORTS, {"thinking": True}, enable_thinking=True) == asked(EFFORTS, {"enable_thinking": True})
    assert asked(EFFORTS, {"thinking_effort": "low"}) == {"enable_thinking": True, "reasoning_effort": "low"}
    # A variable that has nothing to do with the switch is one like any other.
    assert asked(EFFORTS, {"thinking": "aloud"}) == {"thinking": "aloud"}
    assert asked(ALWAYS, {"thinking": False}) == {"thinking": False}
    assert asked(SWITCH, {"thinking_effort": "low"}) == {"thinking_effort": "low"}
    for kwargs, fields in (
        ({"thinking": False}, {"enable_thinking": True}),
        ({"thinking": False, "enable_thinking": True}, {}),
        ({"thinking": False}, {"reasoning_effort": "low"}),
        ({"thinking_effort": "low"}, {"reasoning_effort": "medium"}),
        ({"thinking_effort": "low"}, {"enable_thinking": False}),
    ):
        with pytest.raises(RequestError) as caught:
            asked(EFFORTS, kwargs, **fields)
        assert caught.value.code == "conflicting_thinking", kwargs


def test_further_variables_of_the_template() -> None:
    given = {"today": "1 May", "persona": {"name": "é", "traits": [1, None, [True]]}}
    assert resolve(NOTHING, chat_template_kwargs=given) == given
    assert resolve(NOTHING, chat_template_kwargs={"today": None, "unknown": None}) == {}
    asked = {**given, "enable_thinking": False}
    assert resolve(SWITCH, chat_template_kwargs=asked) == asked
    deep: Any = 1
    for _ in range(8):
        deep = [deep]
    assert resolve(NOTHING, chat_template_kwargs={"today": deep}) == {"today": deep}
    size = 4096 - len('{"today":""}')
    assert resolve(NOTHING, chat_template_kwargs={"today": "x" * size})
    for kwargs, param, said in (
        (
            {"chat_template": "{{ 1 }}"},
            "chat_template",
            "unknown field; it can hold enable_thinking, persona, reasoning_ef",
        ),
        ({"todaay": 1}, "todaay", "did you mean 'today'?"),
        ({"today": [deep]}, "today", "nests deeper than 8 levels"),
    ):
        with pytest.raises(RequestError, match=said) as caught:
            resolve(NOTHING, chat_template_kwargs=kwargs)
        assert caught.value.param == f"chat_template_kwargs.{param}"
    with pytest.raises(RequestError, match="4097 bytes of JSON") as caught:
        resolve(NOTHING, chat_template_kwargs={"today": "x" * (size + 1)})
    assert caught.value.param == "chat_template_kwargs"


def test_raw_prompts_check_the_fields_but_have_no_template() -> None:
    def decode(**fields: Any) -> None:
        Completions().decode(json.dumps({"prompt": "x", **fields}).encode(), make_model(thinking=EFFORTS))

    decode(reasoning_effort="anything", enable_thinking=False)
    with pytest.raises(RequestError) as caught:
        decode(enable_thinking=1)
    assert caught.value.code == "invalid_thinking"
