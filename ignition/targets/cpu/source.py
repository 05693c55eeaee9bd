"""The generated translation unit: one instantiation of every kernel that the graphs of a core use.

The dimensions of a model are constants of its kernels, so the compiler unrolls and vectorises for exactly them. One unit is
compiled once for each instruction set level (compile.py) into the libraries that a core carries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources


def qualified_type(kernel: str) -> str:
    """The C++ spelling of an instantiation, every name qualified."""
    return re.sub(r"\b([A-Z][A-Za-z0-9]*)\b", r"flare::\1", kernel)


def generate(kernels: Iterable[str], isa: str) -> str:
    """The translation unit for one instruction set level. `kernels` are C++ types; duplicates are dropped, order is kept.

    A kernel's name in the table, and so in graphs, is its type's text.
    """
    entries = dict.fromkeys(kernels)
    table = "\n".join(f'    flare::kernel<{qualified_type(kernel)}>("{kernel}"),' for kernel in entries)
    return (
        '#include "kernels.h"\n'
        '#include "runtime.h"\n\n'
        "static constexpr flare::Kernel kernels[] = {\n"
        f"{table}\n"
        "};\n\n"
        f'FLARE_LIBRARY("{isa}", kernels)\n'
    )


def headers() -> dict[str, str]:
    """The kernel headers shipped with the exporter: file name -> text, in name order."""
    folder = resources.files("ignition.targets.cpu") / "kernels"
    return {f.name: f.read_text() for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".h")}
