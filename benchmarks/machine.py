"""The machine that figures come from: what it is, who else uses it, and processes ended on it. Linux only."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str]:
    """Name, size and software of this machine, as rows for a table."""
    with open("/proc/cpuinfo") as file:
        cpu = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].replace("\t", "").splitlines())
    flags = cpu.get("flags", "").split()
    useful = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8") if f in flags]
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) / 2**20
    name, family, model = (cpu.get(key, "?").strip() for key in ("model name", "cpu family", "model"))
    return {
        "Processor": f"{name} (family {family}, model {model}; {', '.join(useful)})",
        "Cores": str(len(os.sched_getaffinity(0))),
        "Memory": f"{memory:.0f} GiB",
        "System": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
    }


def tree(root: int) -> list[int]:
    """The ids of process `root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = stat_fields(int(name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [root]
    while todo:
        found.append(process := todo.pop())
        todo += children.get(process, [])
    return found


def stat_fields(process: int) -> list[str]:
    """/proc/PROCESS/stat from the state on (index 0), empty if the process is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def memory_mb(root: int) -> dict[str, float]:
    """Memory of a process tree in MiB: `pss` counts shared pages once, `peak` sums the highest resident sizes."""
    pss = peak = 0
    for process in tree(root):
        pss += kilobytes(f"/proc/{process}/smaps_rollup", "Pss:")
        peak += kilobytes(f"/proc/{process}/status", "VmHWM:")
    return {"pss_mb": pss / 1024, "peak_mb": peak / 1024}


def kilobytes(path: str, key: str) -> int:
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.startswith(key)), 0)
    except OSError:
        return 0


class ForeignLoad:
    """The share of all cores that processes outside our own tree used since this object was made, 0 to 1."""

    def __init__(self) -> None:
        self.started, self.busy, self.own = time.perf_counter(), busy_seconds(), own_seconds()

    def share(self) -> float:
        wall = time.perf_counter() - self.started
        foreign = busy_seconds() - self.busy - (own_seconds() - self.own)
        return max(0.0, foreign / (wall * (os.cpu_count() or 1)))


def busy_seconds() -> float:
    """Processor seconds that all processes, interrupts and other guests of the host have used since boot."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, interrupt, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + interrupt + soft + steal) / TICKS


def own_seconds() -> float:
    """Processor seconds of this process, its living descendants and the children that they have waited for."""
    used = (stat_fields(process)[11:15] for process in tree(os.getpid()))
    return sum(sum(map(int, fields)) for fields in used) / TICKS


def wait_for_quiet(limit_s: float = 20.0, share: float = 0.05) -> None:
    """Returns as soon as others have used less than `share` of the machine for half a second, or after `limit_s`."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        load = ForeignLoad()
        time.sleep(0.5)
        if load.share() < share:
            return


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """One other process that never sleeps runs meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], patience_s: float = 10.0) -> None:
    """Ends a process that we started and its descendants: SIGTERM to it, after `patience_s` SIGKILL to what is left."""
    members = tree(process.pid)
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in members[1:]:
        if stat_fields(member):
            os.kill(member, signal.SIGKILL)
