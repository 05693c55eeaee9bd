"""What one test process makes and all of them use, for helpers that are no fixtures: `once` of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Once = Callable[[str, Callable[[Path], object]], Path]

_once: Once | None = None


def share(once: Once) -> None:
    """Says how things are shared in this session; tests/conftest.py does so before the first test."""
    global _once
    _once = once


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """Returns the path that `make` was given once in this test run, by the first of all processes to ask for that name."""
    assert _once is not None, "no test session runs in this process: pass what is shared to it"
    return _once(name, make)
