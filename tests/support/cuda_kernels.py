"""The kernels of `cuda_cubins.py`; as a program, their compiler. Of them, `scale` waits where there are programmatic edges."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flare.core.architectures import ABILITIES
from ignition.targets.cuda.kernels.programmatic import begin
from tests.support.cuda_cubins import ARCHITECTURES, CONSTANTS, KERNELS, MAPPED, SIGNATURES, WARPS


@triton.jit
def scale(x, y, n, factor, N: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    begin(PROGRAMMATIC)
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, i < n) * factor, i < n)


@triton.jit
def dot(a, b, c, K: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * 64 + i[None, :])
    tl.store(c + i[:, None] * 64 + i[None, :], tl.dot(left, right))


@triton.jit
def take(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = a block of x, row by row: that of the program in x, from the first column on."""
    first = tl.program_id(0) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(y + row[:, None] * COLUMNS + column[None, :], x.load([first, 0]))


def main(folder: Path) -> None:
    for name in (*KERNELS, "take"):
        for architecture in MAPPED if name == "take" else ARCHITECTURES:
            function, signature, constants = globals()[name], SIGNATURES[name], CONSTANTS[name]
            if name == "scale":
                constants = constants | {"PROGRAMMATIC": ABILITIES[architecture].programmatic}
            places = {(function.arg_names.index(key),): value for key, value in constants.items()}
            source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), places, {})
            target = GPUTarget("cuda", int(architecture.strip("sm_a")), 32)
            kernel = triton.compile(source, target=target, options={"num_warps": WARPS[name]})
            facts = {key: getattr(kernel.metadata, key) for key in ("name", "num_warps", "shared", "tensordesc_meta")}
            (folder / f"{name}-{architecture}.cubin").write_bytes(kernel.asm["cubin"])
            (folder / f"{name}-{architecture}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
