"""Runs groups of checks in processes of their own, so that no fault, crash or endless kernel hides what else there is.

A check that takes its process with it is a failure; the group goes on behind it in a new process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "benchmarks.gpu_check.child")
PATIENCE_S = 120.0
"""Longest that one check may take, and the start of a process."""


def run_group(
    group: str,
    folder: Path,
    deadline: float,
    report: Callable[[dict[str, Any]], None],
    *,
    command: Sequence[str] = COMMAND,
    patience: float = PATIENCE_S,
) -> bool:
    """Runs a group's checks on the cores in `folder` and gives each to `report`: group, check, ok, and what it found.

    Returns False if it stopped at `deadline` (of time.monotonic), which may be in the middle of a check.
    """
    done = 0
    while time.monotonic() < deadline:
        child = _Child([*command, group, str(folder), str(done)])
        begun = ""
        try:
            while (message := child.read(min(time.monotonic() + patience, deadline))) is not None:
                begun = message.get("begin", "")
                if not begun:
                    done += 1
                    report({"group": group, "check": message.pop("end"), **message})
            code, problem = child.wait()
        except TimeoutError:
            child.kill()
            if time.monotonic() >= deadline:
                return False
            code, problem = -1, f"nothing was heard for {patience:g} s"
        finally:
            child.close()
        if not code:
            return True
        if begun or not child.heard:
            done += 1
            report(
                {"group": group, "check": begun or "start", "ok": False, "note": problem, "seconds": child.seconds()}
            )
            if not child.heard:
                return True  # it would not start a second time either
    return False


class _Child:
    """One process and the lines that it writes. heard: whether it wrote any."""

    def __init__(self, command: Sequence[str]) -> None:
        self.heard = False
        self._started = time.monotonic()
        self._rest = b""
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._output, self._errors = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._said = b""
        self._selector = selectors.DefaultSelector()
        for stream in (self._output, self._errors):
            self._selector.register(stream, selectors.EVENT_READ)

    def read(self, deadline: float) -> dict[str, Any] | None:
        """Returns the next message, None at the end. Raises TimeoutError."""
        while b"\n" not in self._rest:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if key.fd == self._errors:
                    self._said = (self._said + block)[-4096:]
                    if not block:
                        self._selector.unregister(key.fd)
                elif block:
                    self._rest += block
                else:
                    return None
        line, _, self._rest = self._rest.partition(b"\n")
        self.heard = True
        found: dict[str, Any] = json.loads(line)
        return found

    def wait(self) -> tuple[int, str]:
        """Returns the exit code and, in a line, how the process ended."""
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        lines = [line.strip() for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        how = f"the process ended by signal {-code}" if code < 0 else f"the process ended with exit code {code}"
        return code, ": ".join([how, *lines[-1:]])[:400]

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 3)
