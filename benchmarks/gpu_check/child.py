"""The process that runs one group's checks: `python -m benchmarks.gpu_check.child GROUP FOLDER SKIP`.

FOLDER holds the unpacked cores; the first SKIP checks ran before. What is found leaves on standard output, a line of JSON for
each beginning and end; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LOST = 3
"""Exit code of a process whose device was lost by the check that it told of last."""


def main(group: str, folder: Path, skip: int) -> int:
    """Runs the group; returns the exit code."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    if "tests" not in sys.modules:  # an installed package of that name would hide the folder, which is none
        tests = ModuleType("tests")
        tests.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
        sys.modules["tests"] = tests

    from benchmarks.gpu_check.findings import Checks, DeviceLost

    kind, _, name = group.partition(":")
    checks = Checks(tell, skip)
    try:
        if kind == "environment":
            from benchmarks.gpu_check.environment import check_environment

            check_environment(checks, folder)
        elif kind == "kernels":
            from benchmarks.gpu_check.kernels import check_kernels

            check_kernels(checks, folder / name)
        elif kind == "draws":
            from benchmarks.gpu_check.draws import check_draws

            check_draws(checks, folder / name)
        elif kind == "core":
            from benchmarks.gpu_check.cores import check_core

            check_core(checks, folder / name)
        else:
            from benchmarks.gpu_check.timing import check_timing

            check_timing(checks, folder / name)
    except DeviceLost:
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
