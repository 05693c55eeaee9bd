"""The benchmark of outputs knows every format, and what it calls a call is one."""

from __future__ import annotations

import pytest

from benchmarks.outputs import PIECE, TAGS, TOOLS, WRITTEN, cut, hostile, run
from flare.output import FORMATS, OutputSyntax
from tests.output.feeding import feed


def test_every_format_is_measured() -> None:
    assert WRITTEN.keys() == FORMATS


@pytest.mark.parametrize("format", sorted(WRITTEN))
def test_what_is_measured_is_a_call(format: str) -> None:
    found = feed(WRITTEN[format].call, syntax=OutputSyntax(tools=format, reasoning=TAGS), tools=TOOLS)
    assert found.error is None and found.parts == [("call", "f", '{"p":"a city of some size"}')]
    for head, unit in hostile(WRITTEN[format]).values():
        assert unit and run(format, cut(head + unit * 20, PIECE)) >= 0
