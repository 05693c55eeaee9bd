"""What `flare serve` and `flare chat` run with: their settings with units and defaults, and how sizes and keys are read.

`flare/settings.py` says how an operator gives each of them, and within which bounds.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flare.errors import InputError

MIB = 1 << 20
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": MIB,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
MAX_KEY_BYTES = 4096
MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class MemorySize:
    """An amount of memory: `bytes`, or a `share` (0 to 1) of what is free when the core is loaded."""

    bytes: int | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """How a core is loaded: `threads` counts kernel threads, `max_tokens` caps the tokens of one answer, `max_waiting`
    the requests that wait for a slot.

    `strict_tools`: a function schema with `strict: true` is refused, or taken as one without. `thinking_token_budget` caps
    the tokens of reasoning of conversations that name no budget. `temperature` is that of requests that name none.
    `check` replays the core's oracle before anything is served. `cpu_fallback`: what has no device or no kernel may run on the
    processor.
    """

    core: str
    threads: int
    kv_memory: MemorySize | None = None
    huge_pages: bool = False
    verify: bool = False
    aliases: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_waiting: int = 1024
    strict_tools: Literal["refuse", "relax"] = "refuse"
    thinking_token_budget: int | None = None
    temperature: float | None = None
    check: bool = False
    cpu_fallback: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the HTTP server listens and what it bounds.

    `max_body_bytes` holds for the body as sent and as decoded, `max_bodies_bytes` for all bodies, as sent, that are being
    read or decoded at a time. `max_requests` bounds the generation choices that are
    admitted at a time: running, queued, or finished and not yet read, `max_connections` the open connections, of which one
    is closed that has sent no whole head of a request for `keepalive_s` seconds. `frontend_threads` decode and tokenize.
    `body_silence_s` is how long a body may pause and `body_total_s` how long all of it may take before the request is
    refused, `keepalive_comment_s` how long a stream is silent before a comment is sent, `shutdown_s` how long the last
    bytes may take.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = field(default="", repr=False)
    max_body_bytes: int = 32 * MIB
    max_bodies_bytes: int = 256 * MIB
    max_requests: int = 1024
    max_connections: int = 2048
    frontend_threads: int = 2
    body_silence_s: float = 30.0
    body_total_s: float = 120.0
    keepalive_comment_s: float = 15.0
    keepalive_s: float = 75.0
    shutdown_s: float = 5.0


def parse_bytes(text: str) -> int:
    """Reads "2GiB", "1500MB" or "4096". Raises ValueError for anything else, and for less than one byte."""
    value = text.strip()
    number = value.rstrip("BKMGTIbkmgti ")
    amount = float(number) * UNITS.get(value[len(number) :].strip().upper(), 0)
    if not 1 <= amount < 2**48:
        raise ValueError
    return int(amount)


def parse_memory_size(text: str) -> MemorySize:
    """Reads a size as `parse_bytes` does, or "40%" of free memory, up to 95%. Raises InputError that shows the text."""
    value = text.strip()
    try:
        if not value.endswith("%"):
            return MemorySize(bytes=parse_bytes(value))
        share = float(value[:-1]) / 100
        if 0 < share <= 0.95:
            return MemorySize(share=share)
    except ValueError:
        pass
    raise InputError(f"{text[:60]!r} is not a size such as 2GiB or 800MB, or a percentage up to 95%")


def check_api_key(key: str) -> str:
    """Returns the key. Raises ValueError unless it is one word of printable ASCII, or empty: no key is asked for then."""
    if len(key) > MAX_KEY_BYTES or any(not "!" <= letter <= "~" for letter in key):
        raise ValueError
    return key


def read_trusted(path: Path, most: int, name: str, *, hint: str = "") -> bytes:
    """Returns the bytes of a file that decides what the server does.

    Raises InputError, which begins with `name`, when the file cannot be read, when every user of the machine may change
    it, or when it has more than `most` bytes; `hint` ends that last one.
    """
    try:
        if others_may(path, stat.S_IWOTH):
            raise InputError(f"{name}: every user of this machine may change it; chmod o-w it")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise InputError(f"{name}: longer than {most} bytes{hint}")
    return data


def read_api_key(path: Path, place: str) -> str:
    """Reads the serving key: the file's text without surrounding white space; empty means that no key is asked for.

    Raises InputError, which begins with `place`, when the file cannot be read, when every user of the machine may change
    it, or when it does not hold one line of printable ASCII.
    """
    data = read_trusted(path, MAX_KEY_BYTES, f"{place}: {path}", hint="; it holds nothing but the key")
    try:
        return check_api_key(data.strip().decode("ascii"))
    except ValueError:
        raise InputError(f"{place}: {path}: the key is one word of printable ASCII characters") from None


def others_may(path: Path, permission: int) -> bool:
    """Whether every user of the machine has a permission (`stat.S_IROTH`, `stat.S_IWOTH`) on an existing regular file.

    Raises OSError.
    """
    mode = path.stat().st_mode
    return stat.S_ISREG(mode) and bool(mode & permission)


def usable_cpus() -> int:
    """How many CPUs this process may keep busy: its affinity mask, bounded by the control group's quota."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no such file outside control groups
    return max(1, min(cpus, MAX_THREADS))
