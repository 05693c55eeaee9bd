"""What a check finds, and how a group's checks run: each by itself, told of before it begins and when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flare.errors import ReplayDead

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """figure: what was found, at most `bound` where it is good; both None where a check only measures. figures: what else was
    measured, by name with its unit. note: what the figure is, or what is wrong."""

    ok: bool
    figure: float | None = None
    bound: float | None = None
    note: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def at_most(figure: float, bound: float, note: str, **figures: Any) -> Finding:
    """Good where the figure is not above the bound; NaN is."""
    return Finding(bool(figure <= bound), figure, bound, note, figures)


def measured(note: str, **figures: Any) -> Finding:
    """Something without a bound."""
    return Finding(True, note=note, figures=figures)


class DeviceLost(Exception):
    """The process can use its device no more: the checks that follow need another one."""


class Checks:
    """Runs the checks of a group in a fixed order, but for the first `skip`, which ran in an earlier process."""

    def __init__(self, tell: Tell, skip: int) -> None:
        self._tell = tell
        self._skip = skip
        self._seen = 0

    def run(self, name: str, check: Callable[[], Finding]) -> bool:
        """Runs a check and returns whether it is good; whatever it raises is a failure of its own. Raises DeviceLost after a
        check that lost the device."""
        self._seen += 1
        if self._seen <= self._skip:
            return True
        self._tell({"begin": name})
        started, lost = time.perf_counter(), False
        try:
            finding = check()
        except Exception as error:
            lost = isinstance(error, ReplayDead)
            finding = Finding(False, note=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        seconds = round(time.perf_counter() - started, 3)
        self._tell({"end": name, "seconds": seconds} | {key: plain(value) for key, value in asdict(finding).items()})
        if lost:
            raise DeviceLost
        return finding.ok


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite become words."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
