"""Ends a server whose device does not answer any more.

CUDA cannot stop a kernel that does not end, and nobody can wake the thread that waits for it: every request would wait without
end, and `/health` know nothing of it. So the process ends, with a line, and whoever started it can start it again.

What is counted is turns of the event loop's clock, not the time of day: a process that is stopped and goes on later has missed
turns, not ended waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable

TURN_S = 5.0

SILENT_TURNS = 120
"""Turns that one wait may last, ten minutes. The slowest steps, long prompts in f32, should take a device seconds."""

SAYING_S = 5.0
"""How long the line may take to be written: nobody may read it."""

EXIT_CODE = 2
"""As for all that is wrong with the environment."""


class Silence:
    """Whether one wait for a device goes on and on. `waits` counts begins and ends of waits: it is odd while one is under
    way."""

    def __init__(self, waits: Callable[[], int]) -> None:
        self._waits = waits
        self._last = 0
        self._turns = 0

    def turn(self) -> bool:
        """Looks again, once a turn; returns whether the same wait was under way for SILENT_TURNS turns."""
        now = self._waits()
        self._turns = self._turns + 1 if now % 2 and now == self._last else 0
        self._last = now
        return self._turns >= SILENT_TURNS


async def end_when_silent(waits: Callable[[], int], device: str) -> None:
    """Ends the process at once, with a line on standard error, when a wait for the device has lasted too long."""
    silence = Silence(waits)
    while not silence.turn():
        await asyncio.sleep(TURN_S)
    # Whatever becomes of the line, the process ends.
    late = threading.Timer(SAYING_S, os._exit, [EXIT_CODE])
    late.daemon = True
    try:
        late.start()
        lasted = f"{SILENT_TURNS * TURN_S:g} s"
        print(
            f"flare: {device} has not answered for {lasted}: most likely a kernel does not end, and CUDA cannot stop one; the "
            "server ends, start it again",
            file=sys.stderr,
            flush=True,
        )
    finally:
        os._exit(EXIT_CODE)
