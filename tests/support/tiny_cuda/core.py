"""The tiny cuda core: graphs made by hand over really compiled cubins, and a file of weights."""

from __future__ import annotations

import ctypes
import json
from ctypes import sizeof
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from flare.core.cuda_graph import Bucket, CopyNode, CudaGraphs, Edge, FillNode, Kernel, KernelNode, Pointer, Scalar
from flare.core.directory import Core
from flare.core.manifest import CudaSegments, CudaTarget, File, Limits
from flare.replay.cuda_program import CudaProgram
from tests.support.cuda_graphs import make_manifest, place
from tests.support.tiny_cuda.compile import ARCH
from tests.support.tiny_cuda.sizes import CONSTANTS, CONTEXT, PAGE_BYTES, PT, ROWS, SIGNATURES, SLOTS, STRIDE, TOKENS, V

PACKAGE = "tests.support.tiny_cuda"
WEIGHTS_OFFSET = 4096
SCALE = 0.5

LIMITS = Limits(max_context=CONTEXT, slots=SLOTS, page_tokens=PT, max_step_tokens=TOKENS, max_rows=ROWS)
IO, IO_BYTES, HOST_BYTES = place(LIMITS, V)
WEIGHTS = Pointer(segment="weights", offset=0, bytes=4 * V)
POOL = Pointer(segment="kv", offset=0, bytes=4 * PT)
VALUES = Pointer(segment="arena", offset=64, bytes=4 * TOKENS)
NULL = Pointer(segment="none", offset=0, bytes=0)
_STRIDE = Scalar(type="i32", value=STRIDE)
_NAMES = list(SIGNATURES)


def after(*nodes: int) -> list[Edge]:
    return [Edge(node=node) for node in nodes]


def launch(name: str, grid: int, args: list[Pointer | Scalar], edges: list[Edge]) -> KernelNode:
    return KernelNode(
        kernel=_NAMES.index(name), grid=(grid, 1, 1), args=[*args, NULL, NULL], label=f"tiny {name}", after=edges
    )


def copy(source: str, target: str, edges: list[Edge]) -> CopyNode:
    return CopyNode(source=IO[source], target=IO[target], label=f"copy {source}", after=edges)


def step(tokens: int) -> Bucket:
    end = IO["rows"].offset + IO["rows"].bytes  # they lie one behind the other, in io as on the host
    inputs = CopyNode(
        source=Pointer(segment="host", offset=0, bytes=end),
        target=Pointer(segment="io", offset=0, bytes=end),
        label="inputs",
        after=[],
    )
    places = [IO["positions"], IO["slots"], IO["page_table"]]
    nodes = [
        inputs,
        FillNode(target=VALUES, value=0, label="values", after=[]),
        launch("write", tokens, [IO["tokens"], *places, WEIGHTS, POOL, _STRIDE], after(0)),
        launch(
            "gather",
            tokens,
            [*places, POOL, VALUES, Scalar(type="f32", value=SCALE), _STRIDE],
            [*after(1), Edge(node=2, programmatic=True)],
        ),
        launch("project", ROWS, [VALUES, IO["rows"], WEIGHTS, IO["logits"]], after(3)),
    ]
    return Bucket(tokens=tokens, rows=ROWS, nodes=nodes)


def sample(rows: int) -> Bucket:
    names = ("logits", "params", "history", "masks", "explicit_ids", "sampled", "logprobs")
    nodes = [
        launch("pick", rows, [IO[name] for name in names], []),
        copy("sampled", "host.sampled", after(0)),
        copy("logprobs", "host.logprobs", after(0)),
    ]
    return Bucket(tokens=0, rows=rows, nodes=nodes)


def score(rows: int) -> Bucket:
    names = ("logits", "first", "targets", "wanted", "logprobs")
    return Bucket(tokens=0, rows=rows, nodes=[launch("grade", rows, [IO[name] for name in names], [])])


def tiny_graphs(folder: Path) -> tuple[CudaGraphs, dict[str, bytes]]:
    """The graphs and the cubins of what `compile_kernels` left in a folder."""
    compiled: dict[str, Any] = json.loads((folder / "kernels.json").read_text())
    kernels, cubins = [], {}
    for name, made in compiled.items():
        file = f"kernels/{ARCH}/{made['digest']}.cubin"
        cubins[file] = (folder / f"{made['digest']}.cubin").read_bytes()
        kernels.append(
            Kernel(
                cubin=file,
                name=made["symbol"],
                threads=32,
                shared=made["shared"],
                source=f"kernels.{name}",
                signature=SIGNATURES[name],
                constants=CONSTANTS[name],
            )
        )
    graphs = CudaGraphs(
        arch=ARCH,
        kernels=kernels,
        step=[step(4), step(TOKENS)],
        sample=[sample(1), sample(ROWS)],
        score=[score(2), score(ROWS)],
        io=IO,
    )
    return graphs, cubins


def tiny_core(folder: Path, path: Path, values: list[float] | None = None) -> Core:
    """A core over the kernels in `folder`, with its weights (f32 [V], 1 to V by default) at `path`."""
    graphs, cubins = tiny_graphs(folder)
    data = (ctypes.c_float * V)(*(values or range(1, V + 1)))
    manifest = make_manifest(ARCH)
    target = manifest.targets[0]
    assert isinstance(target, CudaTarget)
    segments = CudaSegments(
        weights_bytes=sizeof(data),
        weights_offset=WEIGHTS_OFFSET,
        arena_bytes=64 + VALUES.bytes,
        io_bytes=IO_BYTES,
        host_bytes=HOST_BYTES,
        kv_page_bytes=PAGE_BYTES,
    )
    manifest = structs.replace(
        manifest,
        model=structs.replace(manifest.model, vocabulary=V),
        limits=LIMITS,
        targets=[structs.replace(target, segments=segments)],
        files=manifest.files | {file: File(bytes=len(cubin), hash="0" * 64) for file, cubin in cubins.items()},
    )
    path.mkdir(exist_ok=True)
    (path / target.weights.file).write_bytes(bytes(WEIGHTS_OFFSET) + bytes(data))
    return Core(path, manifest, "", {target.architectures[ARCH]: graphs.encode(), **cubins})


def tiny_program(folder: Path, path: Path, values: list[float] | None = None, **changes: Any) -> CudaProgram:
    """The program of `tiny_core`, with some of its fields changed."""
    return replace(CudaProgram.open(tiny_core(folder, path, values), ARCH), **changes)
