"""The engines of a test, stopped at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.served import Served


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(**options: object) -> Served:
        made.append(Served(**options))
        made[-1].engine.start()
        return made[-1]

    yield make
    for served in made:
        served.stop()
