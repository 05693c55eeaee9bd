"""The process that compiles attention kernels for test_attention_compiled.py, which cannot, since it interprets kernels.

`python -m tests.targets.cuda.attention_compiler ARCHITECTURE ELEMENT HEAD_DIM FORM...` prints, as JSON, what is known of the
kernels without a device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

from ignition.targets.cuda.compile import job
from ignition.targets.cuda.compile_worker import build
from ignition.targets.cuda.kernels.attention_decode import attention_split_launch
from ignition.targets.cuda.kernels.attention_prefill import attention_tile_launch
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.launch import Launch, Pointer
from tests.support.cuda_cubins import before_the_wait

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def launch(form: str, architecture: str, element: str, head_dim: int) -> Launch:
    """The kernel that goes over the keys, for a layer of the usual kind."""
    shape = PagedAttention(architecture, element, 32, 8, head_dim, 64, 32 * 8 * 128 * head_dim, 128, 8192, 0.1)
    kv, table, partials = Pointer(element, "kv"), Pointer("i32", "index"), Pointer("f32", "partials")
    inputs = (kv, kv, kv, table, table, table)
    if form == "few":
        return attention_split_launch(shape, *inputs, partials, tokens=1, label=form)
    return attention_tile_launch(shape, *inputs, kv, tokens=128, label=form)


def compiled(launch: Launch, architecture: str) -> dict[str, Any]:
    """shared: bytes. registers: of a thread. products: every dot's instruction and what it multiplies, without the rows.
    local: loads and stores of local memory in the loop over blocks that all rows see, which copies them ahead. early: see
    before_the_wait."""
    kernel = build(job(launch, architecture))
    with NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage, code = tool("cuobjdump", "-res-usage", cubin.name), tool("nvdisasm", "-c", cubin.name)
        early = before_the_wait(Path(cubin.name))
    loop = min(loops(code), key=len)
    return {
        "shared": kernel.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "early": early,
        "products": products(kernel.asm["ttgir"]),
        "local": sum(line.split()[0] in ("LDL", "STL") or ".LDL" in line for line in loop),
    }


def tool(name: str, *arguments: str) -> str:
    """What one of the tools that Triton brings says."""
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[list[str]]:
    """The instructions between a label and a jump back to it, where copies to shared memory are among them."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    found = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(.*?);", line):
            lines.append(instruction[1])
            back = re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)
            if back and back[1] in labels and any("LDGSTS" in inside for inside in lines[labels[back[1]] :]):
                found.append(lines[labels[back[1]] :])
    return found


def products(ir: str) -> list[str]:
    """Every dot in Triton's representation for GPUs: the instruction's shape, and columns and depth of the product."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    found = set()
    for line in ir.splitlines():
        if not re.search(r"\b(tt\.dot|warp_group_dot|tc_gen5_mma) ", line):
            continue
        shapes = re.findall(r"(?:tensor|memdesc)<(\d+)x(\d+)x(\w+), (?:#ttg\.dot_op<[^>]*>|(#\w+))", line)
        (_, depth, element, _), (_, columns, _, _) = shapes[:2]
        instruction = re.search(r"versionMajor = \d|blockM = \d+", layouts[shapes[2][3]])[0]
        shape = re.search(r"instrShape = \[.*?\]", layouts[shapes[2][3]])
        found.add(f"{element} {columns} x {depth}: {instruction} {shape[0] if shape else ''}".strip())
    return sorted(found)


if __name__ == "__main__":
    architecture, element, head_dim, *forms = sys.argv[1:]
    print(
        json.dumps({form: compiled(launch(form, architecture, element, int(head_dim)), architecture) for form in forms})
    )
