"""What an engine does once it has been idle for a while: it says so, but only after it has worked."""

from __future__ import annotations

from queue import Empty
from typing import Any

import pytest

from flare.engine import Engine, EngineLimits
from flare.engine import engine as engines
from tests.support.scripted_replay import ScriptedReplay


class Quiet:
    """Commands of which none comes in time, and `last` after that."""

    def __init__(self, last: object) -> None:
        self.last = last
        self.waited: list[float | None] = []

    def get(self, timeout: float | None = None) -> object:
        self.waited.append(timeout)
        if timeout is not None:
            raise Empty
        return self.last


@pytest.mark.parametrize("steps", [0, 1])
def test_only_after_a_step(steps: int) -> None:
    told: list[int] = []
    engine: Any = Engine(ScriptedReplay(), EngineLimits(), lambda batch: None, lambda: told.append(1))
    engine._commands, engine._steps = Quiet("command"), steps
    assert engine._await_command() == "command"
    assert engine._commands.waited == [engines.SETTLED_S, None] and len(told) == steps
