"""Compiles instantiations of kernel templates for one instruction set and runs them from numpy."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KERNELS = Path(__file__).resolve().parents[3] / "ignition" / "targets" / "cpu" / "kernels"
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC"]
LEVELS = {
    "generic": [],
    "x86-64-v3": ["-march=x86-64-v3"],
    "x86-64-v4": ["-march=x86-64-v4", "-mavx512vnni"],
}
NEEDS = {
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
}


def available_levels() -> list[str]:
    """The instruction sets that this machine can run."""
    if platform.machine() != "x86_64":
        return ["generic"]
    text = Path("/proc/cpuinfo").read_text()
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    return [level for level in LEVELS if NEEDS.get(level, set()) <= flags]


class Step(ctypes.Structure):
    """flare::Step of kernel.h."""

    _fields_ = [
        ("tokens", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("page_stride", ctypes.c_int32),
        ("row", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("kv_page_bytes", ctypes.c_size_t),
    ]


@dataclass
class Tokens:
    """The ragged part of a step: int32 vectors, and the pages."""

    token: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    page_table: np.ndarray
    kv: np.ndarray
    kv_page_bytes: int

    def alone(self, index: int) -> Tokens:
        """The step that holds only token `index` (and its first wanted row only)."""
        one = slice(index, index + 1)
        return Tokens(
            self.token[one],
            self.position[one],
            self.slot[one],
            self.row[:1] * 0,
            self.page_table,
            self.kv,
            self.kv_page_bytes,
        )

    def only_row(self, index: int) -> Tokens:
        """The same tokens, with only wanted row `index`."""
        return Tokens(
            self.token,
            self.position,
            self.slot,
            self.row[index : index + 1],
            self.page_table,
            self.kv,
            self.kv_page_bytes,
        )

    def struct(self) -> Step:
        """The C structure; it borrows these arrays."""
        return Step(
            len(self.token),
            len(self.row),
            self.token.ctypes.data,
            self.position.ctypes.data,
            self.slot.ctypes.data,
            self.page_table.ctypes.data,
            self.page_table.shape[1],
            self.row.ctypes.data,
            self.kv.ctypes.data,
            self.kv_page_bytes,
        )


class Library:
    """Kernels compiled for one level."""

    def __init__(self, level: str, path: Path, names: Sequence[str]) -> None:
        self.level = level
        self._index = {name: i for i, name in enumerate(names)}
        self._library = ctypes.CDLL(str(path))
        for function in ("units", "scratch"):
            getattr(self._library, f"harness_{function}").restype = ctypes.c_int64
        self._library.harness_need.restype = ctypes.c_uint64
        self._library.harness_need.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        self._library.harness_run.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        ]

    def units(self, name: str, tokens: Tokens) -> int:
        """How many units a kernel has for a step."""
        step = tokens.struct()
        return self._library.harness_units(self._index[name], ctypes.byref(step))

    def needs(self, name: str, tokens: int, rows: int) -> list[tuple[str, int]]:
        """For each argument what the kernel does with it and how many bytes of it, for such steps at most."""
        index, kind, needs = self._index[name], ctypes.c_int(), []
        for arg in range(self._library.harness_args(index)):
            size = self._library.harness_need(index, arg, tokens, rows, ctypes.byref(kind))
            needs.append((("unused", "reads", "writes", "in_pages")[kind.value], size))
        return needs

    def run(
        self,
        name: str,
        tokens: Tokens,
        args: Sequence[np.ndarray | int | None],
        claims: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Runs a kernel over `claims`, ranges of units in the order in which they are claimed; default all at once.

        An argument is an array (its memory is passed), a page offset, or None (a null pointer).
        """
        index = self._index[name]
        assert self._library.harness_args(index) == len(args), name
        values = (ctypes.c_uint64 * len(args))(*(a.ctypes.data if isinstance(a, np.ndarray) else a or 0 for a in args))
        step = tokens.struct()
        size = self._library.harness_scratch(index)
        # Scratch holds NaN before every claim: nothing may be expected of it.
        memory = np.full(size + 64, 0xFF, np.uint8)
        scratch = memory.ctypes.data + -memory.ctypes.data % 64
        for begin, end in claims if claims is not None else [(0, self.units(name, tokens))]:
            memory[:] = 0xFF
            self._library.harness_run(index, ctypes.byref(step), values, scratch, begin, end)


def build(names: Sequence[str], folder: Path) -> dict[str, Library]:
    """Compiles the instantiations for every level of this machine, all levels at the same time."""
    entries = "\n".join(f'    flare::kernel<{name}>("{i}"),' for i, name in enumerate(names))
    source = folder / "kernels.cc"
    source.write_text(
        f'#include "kernels.h"\nusing namespace flare;\nstatic constexpr Kernel table[] = {{\n{entries}\n'
        '};\n#include "kernel_harness.h"\n'
    )
    running = {}
    for level in available_levels():
        command = [
            "g++",
            *FLAGS,
            *LEVELS[level],
            f"-I{KERNELS}",
            f"-I{Path(__file__).parent}",
            "-o",
            str(folder / f"{level}.so"),
            str(source),
        ]
        running[level] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for level, process in running.items():
        message = process.communicate()[1]
        assert process.returncode == 0, f"{level}: {message}"
    return {level: Library(level, folder / f"{level}.so", names) for level in running}
