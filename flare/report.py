"""Where the start's time went: laps that add up to the wall time since the process began."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field


def process_age() -> float:
    """Returns the seconds since the kernel started this process, to a clock tick (10 ms) exactly."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


@dataclass(slots=True)
class Laps:
    """Names for the stretches of one thread's time, and lines to be told with them. `last` is on the monotonic clock."""

    last: float = field(default_factory=time.monotonic)
    laps: list[tuple[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Ends the current stretch under this name; the next one begins."""
        now = time.monotonic()
        self.laps.append((name, now - self.last))
        self.last = now

    @classmethod
    def since_process_start(cls) -> Laps:
        """Laps whose first stretch, "python", is what came before this call: the interpreter and the first imports."""
        now, age = time.monotonic(), process_age()
        return cls(last=now, laps=[("python", age)])

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.laps)


def start_report(main: Laps, beside: Laps) -> list[str]:
    """Returns the report's lines: the main thread's laps add up to the total; `beside` ran at the same time.

    Milliseconds are rounded so that the printed laps add up to the printed total.
    """
    ends, elapsed = [0], 0.0
    for _, seconds in main.laps:
        elapsed += seconds
        ends.append(round(elapsed * 1e3))
    parts = [f"{name} {end - begin} ms" for (name, _), begin, end in zip(main.laps, ends, ends[1:], strict=False)]
    lines = [f"{', '.join(parts)}; ready in {ends[-1]} ms"]
    if beside.laps:
        loaded = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in beside.laps)
        lines.append(f"loaded beside the imports: {loaded}")
    return [*lines, *main.notes, *beside.notes]
