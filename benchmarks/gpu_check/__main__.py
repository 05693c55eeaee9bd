"""Checks the cuda target on this machine's device, by the cores of a bundle, and writes what was found as JSON:

    python -m benchmarks.gpu_check [--bundle gpu-check] [--out gpu-check.json] [--only PATTERN]... [--seconds 450]

Needs torch, numpy and cuda-bindings; msgspec comes with the bundle where it is missing. Exits with 1 if a check failed or
time ran out, with 2 where there is nothing to run. It always ends, and writes what it has, in a few seconds more
than it was given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.children import COMMAND, run_group
from benchmarks.gpu_check.plan import core_names, groups, unpack

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "flare-gpu-check"


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    """Runs the check; `command` runs a group. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Checks the cuda target on this machine's device, by the cores of a bundle.",
    )
    parser.add_argument(
        "--bundle", type=Path, default=ROOT / "gpu-check", help="folder that gpu-bundle made (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check.json"), help="file for what is found (default: %(default)s)"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="groups to run, such as 'kernels:*' (repeatable; default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=450.0, help="time after which nothing more is begun (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    names = core_names(options.bundle)
    if not names:
        return _refuse(
            f"--bundle {options.bundle}: no cores there; make it with `make gpu-bundle` where the exporter is"
        )
    chosen = groups(names, options.only)
    if not chosen:
        return _refuse(f"--only {', '.join(options.only)}: no group matches; there are {', '.join(groups(names, []))}")
    brought = _brought(options.bundle)
    if missing := [str(path) for path in brought if not path.is_dir()]:
        here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return _refuse(
            f"msgspec is not installed for {here}, and there is no {missing[0]}; install it, or use another Python"
        )
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *brought, *_inherited()]))
    return run(options.bundle, options.out, names, chosen, options.seconds, command)


def run(bundle: Path, out: Path, names: list[str], chosen: list[str], seconds: float, command: Sequence[str]) -> int:
    """Runs groups and writes the result after each of them; returns the exit code."""
    started = time.monotonic()
    deadline = started + seconds
    checks: list[dict[str, Any]] = []
    not_run = list(chosen)

    def report(check: dict[str, Any]) -> None:
        checks.append(check)
        print(line(check, time.monotonic() - started), flush=True)

    def write() -> bool:
        good = bool(checks) and not not_run and all(check["ok"] for check in checks)
        result = {
            "format": FORMAT,
            "version": 1,
            "ok": good,
            "seconds": round(time.monotonic() - started, 1),
            "bundle": _about(bundle),
            "not_run": not_run,
            "checks": checks,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
        return good

    write()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        folder = Path(temporary)
        unpack(bundle, names, folder)
        for group in chosen:
            if time.monotonic() >= deadline:
                break
            if run_group(group, folder, deadline, report, command=command):
                not_run.remove(group)
            write()
    good = write()
    failed = sum(not check["ok"] for check in checks)
    print(f"{len(checks)} checks, {failed} failed, {len(not_run)} groups without an end: {out}")
    return 0 if good else 1


def _refuse(problem: str) -> int:
    print(problem, file=sys.stderr)
    return 2


def line(check: dict[str, Any], seconds: float) -> str:
    """A check in a line."""
    figure = (
        "" if check.get("figure") is None else f" {check['figure']:.4g}" if _number(check) else f" {check['figure']}"
    )
    bound = "" if check.get("bound") is None else f" (at most {check['bound']:g})"
    said = "ok    " if check["ok"] else "FAILED"
    return (
        f"{seconds:6.1f} s {said} {check['group']}: {check['check']}:{figure}{bound} {check.get('note', '')}".rstrip()
    )


def _number(check: dict[str, Any]) -> bool:
    return isinstance(check["figure"], int | float)


def _about(bundle: Path) -> dict[str, Any]:
    """What the bundle says of itself."""
    file = bundle / "bundle.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _brought(bundle: Path) -> list[Path]:
    """Folders of the bundle that make up for what is not installed."""
    if importlib.util.find_spec("msgspec") is not None:
        return []
    return [bundle / f"site-cp{sys.version_info.major}{sys.version_info.minor}"]


def _inherited() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


if __name__ == "__main__":
    sys.exit(main())
