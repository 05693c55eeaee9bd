"""Progress of an export: one line a stage, with a bar where the stage counts bytes or files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

WIDTH = 24


class Progress:
    """Records the seconds of every stage in `stages`, in order; shows nothing. Subclasses show."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage. A stage that raises is not recorded."""
        self.current = name
        begin = time.perf_counter()
        self.advance(0, 0)
        yield
        self.stages[name] = time.perf_counter() - begin
        self.finished(name, self.stages[name])

    def advance(self, done: int, total: int, note: str = "") -> None:
        """Called as a stage goes on: `done` of `total` units (bytes, files or prompts; 0 when it has no count)."""

    def finished(self, name: str, seconds: float) -> None:
        """Called when a stage has ended."""

    def notice(self, line: str) -> None:
        """Called for what the user should know although the export goes on."""


class ConsoleProgress(Progress):
    """Shows stages on a stream: a moving bar on a terminal, one line per finished stage elsewhere."""

    def __init__(self, stream: TextIO | None = None, total_stages: int = 8) -> None:
        super().__init__()
        self.stream = stream or sys.stderr
        self.moving = self.stream.isatty()
        self.total_stages = total_stages
        self.shown = 0.0

    def advance(self, done: int, total: int, note: str = "") -> None:
        now = time.perf_counter()
        if not self.moving or (done and done < total and now - self.shown < 0.05):
            return
        self.shown = now
        filled = WIDTH * done // total if total else 0
        share = f"{100 * done // total:3d}%" if total else "    "
        bar = "█" * filled + "·" * (WIDTH - filled)
        self.stream.write(f"\r\x1b[K{self._head()} {bar} {share} {note}")
        self.stream.flush()

    def finished(self, name: str, seconds: float) -> None:
        self.stream.write(f"{self._start()}{self._head(1)} {seconds:8.2f} s\n")
        self.stream.flush()

    def notice(self, line: str) -> None:
        self.stream.write(f"{self._start()}notice: {line}\n")
        self.stream.flush()

    def _start(self) -> str:
        return "\r\x1b[K" if self.moving else ""

    def _head(self, ended: int = 0) -> str:
        number = len(self.stages) + 1 - ended
        return f"[{number}/{self.total_stages}] {self.current:<10}"
