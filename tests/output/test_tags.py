"""What the formats of tags have in common: the bounds of a call, and work in proportion to the length of the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from flare.conversation import Tool, Tools
from flare.output import OutputSyntax
from tests.output.feeding import TAGS, feed

PROPERTIES = {"p": {"type": "string"}, "o": {"type": "object"}, "u": {"anyOf": [{"type": "array"}, {"type": "string"}]}}
TOOLS = Tools((Tool("f", parameters={"type": "object", "properties": PROPERTIES}), Tool("two words")))

WRITTEN: dict[str, Callable[[str, str], str]] = {
    "qwen": lambda key, value: (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ),
    "mimo": lambda key, value: f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>",
    "glm": lambda key, value: f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
}
FORMATS = pytest.mark.parametrize("format", WRITTEN)


def syntax(format: str) -> OutputSyntax:
    return OutputSyntax(tools=format, reasoning=TAGS)


def lines_run(pushed: str | Sequence[str], format: str, opens: bool) -> int:
    """How many lines of flare.output ran for an output: the work, without a clock."""
    count = 0

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return step

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return step if "/flare/output/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        feed(pushed, syntax=syntax(format), tools=TOOLS, opens=opens, natural=False)
    finally:
        sys.settrace(before)
    return count


HOSTILE = [
    "<tool_call>",
    "<tool_call> ",
    "<tool_call>\n<function=",
    "<tool_call>\n<function=f>",
    "<tool_call>\n<function=f>\n<parameter=",
    "<function=",
    "<function=f>",
    "<function=f>\n<parameter=p",
    "<function=f></function>",
    "<function=f><parameter=p>",
    "<parameter=",
    "</function>",
    "<tool_call>f",
    "<tool_call>two wor",
    "<tool_call>f<arg_key",
    "<tool_call>f</tool_call>",
    "<arg_key>",
    "<arg_key>k</arg_key>",
    "<arg_key>k</arg_key> <arg_val",
    "</arg_value",
    "<",
    "</",
    "a ",
    "\n",
    "[",
    '{"a":',
    "<think>",
]
PREFIXES = {
    "qwen": ["", "<tool_call>", "<tool_call><function=f><parameter=p>", "<tool_call><function=f><parameter=u>["],
    "glm": [
        "",
        "<tool_call>",
        "<tool_call>f<arg_key>p</arg_key><arg_value>",
        "<tool_call>f<arg_key>u</arg_key><arg_value>[",
    ],
}


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("format", PREFIXES)
def test_work_grows_with_the_length_alone(format: str, unit: str) -> None:
    for prefix in PREFIXES[format]:
        for opens in (False, True)[: 1 if prefix else 2]:
            for cut in (False, True):
                once, four = (
                    lines_run(list(text) if cut else text, format, opens)
                    for text in (prefix + unit * (times * 400 // len(unit)) for times in (1, 4))
                )
                assert four < 4.8 * once + 500, (prefix, opens, cut)
