"""Cubins of small kernels, compiled ahead for several architectures, with what their compiler says of them.

`make(folder)` compiles in a process of its own, since a process that has imported Triton for its interpreter cannot compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
KERNELS = ("scale", "dot")
MAPPED = ("sm_90a", "sm_100a", "sm_120a")
"""Those of the architectures that have tensor maps, by which the kernel "take" reads."""

SIGNATURES = {
    "scale": {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32"},
    "dot": {"a": "*fp16", "b": "*fp16", "c": "*fp32"},
    "take": {"x": "tensordesc<bf16[16,128]>", "y": "*bf16"},
}
CONSTANTS = {"scale": {"N": 128}, "dot": {"K": 64}, "take": {"ROWS": 16, "COLUMNS": 128}}
WARPS = {"scale": 2, "dot": 4, "take": 1}

PTX = """.version 8.8
.target {architecture}
.address_size 64
.visible .entry plain(.param .u64 p, .param .u32 n, .param .u64 s, .param .u64 t) .reqntid {threads} {cluster}
{{
    .shared .align 8 .b8 buffer[100];
    .reg .b64 %r;
    .reg .b32 %a;
    {first}
    ld.param.u64 %r, [p];
    mov.u32 %a, buffer;
    st.global.u32 [%r], %a;
    ret;
}}
"""
"""A kernel with static shared memory, which Triton's have not, and parameters like theirs."""


@cache
def tool(name: str) -> str:
    """The path of a program that Triton brings."""
    import importlib.util

    package = importlib.util.find_spec("triton")
    assert package is not None and package.origin is not None, "the tests need triton: pip install '.[export-cuda]'"
    path = Path(package.origin).parent / "backends/nvidia/bin" / name
    assert path.is_file(), path
    return str(path)


def make(folder: Path) -> None:
    """Fills a folder with `<kernel>-<architecture>.cubin` and `.json` (Triton's metadata) of each kernel."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment |= {
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    subprocess.run([sys.executable, "-m", "tests.support.cuda_kernels", str(folder)], env=environment, check=True)


def assemble(
    folder: Path, assembler: str, architecture: str, cluster: str = "", threads: int = 64, first: str = ""
) -> bytes:
    """The cubin that an assembler of Triton's makes of PTX, with `first` as its first instructions."""
    source, output = folder / "plain.ptx", folder / "plain.cubin"
    source.write_text(PTX.format(architecture=architecture, cluster=cluster, threads=threads, first=first))
    subprocess.run([tool(assembler), "-arch", architecture, str(source), "-o", str(output)], check=True)
    return output.read_bytes()


def cubin(folder: Path, kernel: str, architecture: str) -> bytes:
    return (folder / f"{kernel}-{architecture}.cubin").read_bytes()


def before_the_wait(file: Path) -> list[str] | None:
    """By NVIDIA's disassembler, the names of the instructions that a cubin's only kernel runs before it waits for others; None
    where it does not."""
    text = subprocess.run([tool("nvdisasm"), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", text, re.MULTILINE)
    assert len(names) > 4
    return names[: names.index("ACQBULK")] if "ACQBULK" in names else None


def metadata(folder: Path, kernel: str, architecture: str) -> dict[str, Any]:
    """What Triton says of a kernel: name, num_warps, shared (bytes of dynamic shared memory), tensordesc_meta."""
    return json.loads((folder / f"{kernel}-{architecture}.json").read_bytes())
