"""Cubins with the names, parameters and blocks of a core's kernels, and nothing in them: the fake driver runs kernels from
their sources, so an export for it needs no compiler. All of an architecture's kernels are in one cubin.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flare.core.architectures import ABILITIES
from flare.core.cuda_graph import Box
from flare.core.tensor_maps import MAP_BYTES, MapType
from ignition.targets.cuda.compile import KERNELS, Compiled, job
from ignition.targets.cuda.compile_worker import Cubin, Job
from ignition.targets.cuda.launch import Launch, TensorMap
from tests.support.cuda_cubins import tool
from tests.support.cuda_exports import box

_HEAD = ".version 8.8\n.target {architecture}\n.address_size 64\n"
_ENTRY = ".visible .entry {name}({parameters}) .reqntid {threads} {{ {wait} ret; }}\n"
_TYPES = {4: ".b32", 8: ".b64", MAP_BYTES: ".align 64 .b8"}
_SIZES = {4: "", 8: "", MAP_BYTES: f"[{MAP_BYTES}]"}


def compile_stubs(
    launches: Mapping[str, Iterable[Launch]], advance: Callable[[int, int, str], None] = lambda *_: None
) -> Compiled:
    """In the place of `compile_launches`."""
    cubins: dict[str, dict[bytes, Cubin]] = {}
    for architecture, some in launches.items():
        boxes: dict[bytes, dict[str, Box]] = {}
        jobs: dict[bytes, Job] = {}
        for launch in some:
            item = job(launch, architecture)
            jobs[item.key()] = item
            boxes[item.key()] = {name: box(arg) for name, arg in launch.args.items() if isinstance(arg, TensorMap)}
        symbols = {key: f"{item.kernel.replace('.', '_')}_{number}" for number, (key, item) in enumerate(jobs.items())}
        data = _assemble(architecture, [_entry(symbols[key], item) for key, item in jobs.items()])
        cubins[architecture] = {
            key: Cubin(data, symbols[key], 32 * item.warps, 0, {"ptxas": "12.9"}, 0.0, boxes[key])
            for key, item in jobs.items()
        }
        advance(len(jobs), len(jobs), "stubs")
    return Compiled(KERNELS, cubins)


def _entry(name: str, item: Job) -> str:
    sizes: list[int] = []
    for kind in item.signature.values():
        mapped = MapType.read(kind)
        sizes += mapped.parameter_bytes() if mapped else [4 if kind in ("i32", "fp32") else 8]
    sizes += [8, 8]  # Triton's scratch
    parameters = ", ".join(f".param {_TYPES[size]} p{number}{_SIZES[size]}" for number, size in enumerate(sizes))
    wait = "griddepcontrol.wait;" if ABILITIES[item.architecture].programmatic else ""
    return _ENTRY.format(name=name, parameters=parameters, threads=32 * item.warps, wait=wait)


def _assemble(architecture: str, entries: Iterable[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "stubs.ptx", Path(folder) / "stubs.cubin"
        source.write_text(_HEAD.format(architecture=architecture) + "".join(entries))
        subprocess.run([tool("ptxas"), "-arch", architecture, str(source), "-o", str(output)], check=True)
        return output.read_bytes()
