"""Compiles the tiny core's kernels ahead, in a process of its own: one that interprets kernels cannot.

python -m tests.support.tiny_cuda.compile FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from tests.support.tiny_cuda.sizes import CONSTANTS, SIGNATURES

ARCH: Literal["sm_90a"] = "sm_90a"


def compile_kernels(folder: Path) -> None:
    """Writes the cubins, and what Triton says of them, in a process where Triton compiles."""
    folder.mkdir(parents=True)
    environment = os.environ | {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-m", __name__, str(folder)], check=True, env=environment)


def main(folder: Path) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.support.tiny_cuda import kernels

    found: dict[str, Any] = {}
    for name, signature in SIGNATURES.items():
        function = getattr(kernels, name)
        given = CONSTANTS[name] | ({"PROGRAMMATIC": True} if name == "gather" else {})
        types = signature | dict.fromkeys(given, "constexpr")
        constants = {(function.arg_names.index(key),): value for key, value in given.items()}
        options = {"num_warps": 1, "enable_fp_fusion": False}
        made = compile(ASTSource(function, types, constants), GPUTarget("cuda", 90, 32), options)
        cubin = made.asm["cubin"]
        digest = sha256(cubin).hexdigest()[:16]
        (folder / f"{digest}.cubin").write_bytes(cubin)
        found[name] = {"digest": digest, "symbol": made.metadata.name, "shared": made.metadata.shared}
    (folder / "kernels.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
