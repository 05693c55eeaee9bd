"""How much memory the KV pool may take: what is free on this machine, and the rule that picks the number of pages, here or on
a device."""

from __future__ import annotations

from pathlib import Path

from flare.config import MIB, MemorySize
from flare.errors import InputError, SettingError

HOST_SHARE = 0.5
DEVICE_SHARE = 0.9
"""Of what is free beside the weights, where no amount is given. A device's memory is for nothing else."""

CGROUP_ROOT = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP_ROOT) -> int:
    """Returns the bytes that can be allocated without swapping: MemAvailable, bounded by the control group's limit.

    File pages that the group could drop (`inactive_file`) count as free. Looks at the mounted root of the group tree,
    which inside a container is the container's own group.
    """
    available = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        for line in (cgroup / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        available = min(available, max(0, limit - used))
    except (OSError, ValueError):
        pass  # no limit ("max"), or no control groups
    return available


def check_reserved(reserved: int, free: int, where: str) -> None:
    """Raises InputError when the `free` bytes of `where`, a device by its name or this machine, do not hold the `reserved` ones
    of a core's weights and work areas: no amount of kv memory would help then."""
    if reserved > free:
        raise InputError(
            f"{where} has {free / MIB:.1f} MiB of memory free, the core's weights and work areas take "
            f"{reserved / MIB:.1f} MiB: free some memory, take something larger, or export the core in a smaller format "
            "(--weights)"
        )


def choose_kv_pages(
    wanted: MemorySize | None,
    *,
    where: str,
    free: int,
    reserved: int,
    default_share: float,
    page_bytes: int,
    page_tokens: int,
    slots: int,
    max_context: int,
) -> int:
    """Returns the number of pages of the KV pool.

    Never more than `slots` full contexts. A share is of the free memory that is left after `reserved` bytes (weights and work
    areas), `default_share` where nothing is `wanted`; a size is taken as given. Raises InputError as `check_reserved` does, and
    SettingError, naming `where`, when the pool would not hold one page for each of two requests, or when a size does not fit
    the free memory.
    """
    check_reserved(reserved, free, where)
    full = slots * -(-max_context // page_tokens)
    spare = free - reserved
    if wanted is not None and wanted.bytes is not None:
        budget = wanted.bytes
        if min(budget, full * page_bytes) > spare:
            text = f"{budget / MIB:.1f} MiB: {spare / MIB:.1f} MiB are free on {where} beside the weights; ask for less"
            raise SettingError("kv_memory", text)
    else:
        share = default_share if wanted is None or wanted.share is None else wanted.share
        budget = int(spare * share)
    pages = min(full, budget // page_bytes)
    least = min(full, 2)
    if pages < least:
        held = f"they hold {pages} pages of {page_bytes / MIB:.1f} MiB on {where}, at least {least} are needed"
        text = f"{budget / MIB:.1f} MiB: {held}"
        remedy = "ask for more" if least * page_bytes <= spare else f"{spare / MIB:.1f} MiB are free; free some memory"
        raise SettingError("kv_memory", f"{text}; {remedy}")
    return pages
