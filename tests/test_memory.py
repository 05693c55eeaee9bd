"""How much memory is free, and how it is shared out between weights and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.config import MemorySize
from flare.errors import InputError, SettingError
from flare.memory import choose_kv_pages, free_memory

MIB = 1 << 20

GROUP = {
    "memory.max": f"{900 * MIB}",
    "memory.current": f"{500 * MIB}",
    "memory.stat": f"file 1\ninactive_file {100 * MIB}\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 600 * MIB),
        (GROUP, 500 * MIB),
        (GROUP | {"memory.max": "max"}, 600 * MIB),
        (GROUP | {"memory.current": f"{2000 * MIB}"}, 0),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], free: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       1024000 kB\nMemAvailable:   {600 * 1024} kB\n")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert free_memory(meminfo, tmp_path) == free


@pytest.mark.parametrize(
    ("wanted", "free", "pages"),
    [
        (None, 10_000 * MIB, 4 * 7),  # every slot's full context, no more
        (None, 60 * MIB, 20),  # half of what is left beside the weights
        (MemorySize(share=0.25), 60 * MIB, 10),
        (MemorySize(bytes=8 * MIB), 60 * MIB, 8),
        (MemorySize(bytes=8 * MIB + 5), 60 * MIB, 8),
        (MemorySize(bytes=999 * MIB), 60 * MIB, 28),  # bounded by what can be used, which fits
    ],
)
def test_pages_of_the_pool(wanted: MemorySize | None, free: int, pages: int) -> None:
    assert choose(wanted, free) == pages


def choose(wanted: MemorySize | None, free: int) -> int:
    return choose_kv_pages(
        wanted,
        where="this machine",
        free=free,
        reserved=20 * MIB,
        default_share=0.5,
        page_bytes=MIB,
        page_tokens=16,
        slots=4,
        max_context=100,
    )


@pytest.mark.parametrize(
    ("wanted", "free", "said"),
    [
        (
            None,
            20 * MIB,
            "0.0 MiB: they hold 0 pages of 1.0 MiB on this machine, at least 2 are needed; 0.0 MiB are free; free some memory",
        ),
        (
            MemorySize(bytes=MIB),
            60 * MIB,
            "1.0 MiB: they hold 1 pages of 1.0 MiB on this machine, at least 2 are needed; ask for more",
        ),
        (
            MemorySize(bytes=25 * MIB),
            40 * MIB,
            "25.0 MiB: 20.0 MiB are free on this machine beside the weights; ask for less",
        ),
    ],
)
def test_too_little_memory_is_told_with_the_side_that_is_short(wanted: MemorySize | None, free: int, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        choose(wanted, free)
    assert (caught.value.setting, str(caught.value)) == ("kv_memory", said)


@pytest.mark.parametrize("wanted", [None, MemorySize(share=0.9), MemorySize(bytes=MIB)])
def test_too_little_memory_for_the_weights_is_no_matter_of_the_pool(wanted: MemorySize | None) -> None:
    with pytest.raises(
        InputError, match=r"^this machine has 19\.0 MiB of memory free, .* take 20\.0 MiB: free some"
    ) as caught:
        choose(wanted, 19 * MIB)
    assert not isinstance(caught.value, SettingError) and "\n" not in str(caught.value)
