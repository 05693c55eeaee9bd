"""Which row of a probed table a request selects, where the endpoint takes the nearest one, and how the reply opens."""

from __future__ import annotations

from typing import Any

import pytest

from flare.conversation import Thinking
from flare.errors import RequestError
from flare.thinking import EFFORTS, NO_THINKING, opens_reasoning, selected_level, template_variables


def table(*ids: str, default: str, opens: bool = True) -> dict[str, Any]:
    levels = [
        {
            "id": id,
            "enable_thinking": id != "none",
            "reasoning_effort": None if id in ("none", "on") else id,
            "opens_reasoning": opens and id != "none",
            "default": id == default,
        }
        for id in ids
    ]
    return NO_THINKING | {
        "supported": True,
        "toggle": "enable_thinking",
        "effort": "reasoning_effort",
        "levels": levels,
    }


QWEN = table("none", "xhigh", "medium", "low", default="xhigh")
SWITCH = table("none", "on", default="on")
OFF = table("none", "on", default="none")
ALWAYS = table("high", "low", default="high")
OWN_NAMES = table("deep", "brief", default="brief")


def selected(controls: dict[str, Any], **asked: Any) -> str | None:
    level = selected_level(Thinking(**asked), controls)
    return None if level is None else level["id"]


@pytest.mark.parametrize(
    ("controls", "asked", "level"),
    [
        (QWEN, "none", "none"),
        (QWEN, "minimal", "low"),  # some thinking does not become none
        (QWEN, "low", "low"),
        (QWEN, "high", "xhigh"),  # as far from medium: the greater one
        (QWEN, "max", "xhigh"),
        (SWITCH, "none", "none"),
        (SWITCH, "minimal", "on"),
        (SWITCH, "max", "on"),
        (OFF, "low", "on"),
        (ALWAYS, "none", "low"),
        (ALWAYS, "medium", "high"),
        (ALWAYS, "max", "high"),
        (OWN_NAMES, "high", "brief"),
        (OWN_NAMES, "deep", "deep"),
        (NO_THINKING, "max", None),
        (NO_THINKING, "none", None),
    ],
)
def test_the_nearest_level(controls: dict[str, Any], asked: str, level: str | None) -> None:
    assert selected(controls, level=asked, nearest=True) == level


def test_every_effort_finds_a_level_and_more_never_finds_less() -> None:
    for controls in (QWEN, SWITCH, ALWAYS):
        ranks = []
        for effort in EFFORTS:
            found = selected(controls, level=effort, nearest=True)
            assert found is not None
            ranks.append({"on": 1}.get(found, EFFORTS.index(found) if found in EFFORTS else -1))
        assert ranks == sorted(ranks)


def test_a_switch_takes_the_nearest_too() -> None:
    assert selected(ALWAYS, switch=False, nearest=True) == "low"
    assert selected(OWN_NAMES, switch=False, nearest=True) == "brief"
    assert selected(OFF, switch=True, nearest=True) == "on"
    assert selected(QWEN, switch=False, nearest=True) == "none"
    assert selected(NO_THINKING, switch=True, nearest=True) is None


def test_what_the_nearest_does_not_excuse() -> None:
    for asked, code in (
        ({"level": "ultra"}, "unsupported_reasoning_effort"),
        ({"level": "none", "switch": True}, "conflicting_thinking"),
        ({"level": "low", "switch": False}, "conflicting_thinking"),
    ):
        with pytest.raises(RequestError) as caught:
            selected(QWEN, nearest=True, **asked)
        assert caught.value.code == code and caught.value.extra == {"levels": ["none", "xhigh", "medium", "low"]}
        assert "\n" not in str(caught.value)


def test_where_the_reply_begins() -> None:
    assert opens_reasoning(Thinking(), QWEN) and not opens_reasoning(Thinking(switch=False), QWEN)
    assert not opens_reasoning(Thinking(), OFF) and opens_reasoning(Thinking(switch=True), OFF)
    assert not opens_reasoning(Thinking(), table("none", "on", default="on", opens=False))
    assert not opens_reasoning(Thinking(), NO_THINKING)
    assert opens_reasoning(Thinking(), NO_THINKING, otherwise=True)
    assert not opens_reasoning(Thinking(switch=False), QWEN, otherwise=True)


def test_the_variables_are_those_of_the_nearest_level() -> None:
    asked = Thinking(level="high", nearest=True)
    assert template_variables(asked, QWEN) == {"enable_thinking": True, "reasoning_effort": "xhigh"}
    assert template_variables(asked, NO_THINKING) == {}
    assert template_variables(Thinking(switch=False, nearest=True), ALWAYS) == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }
