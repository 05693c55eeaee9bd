"""The cuda part of an export without a compiler: graphs and weights, with cubins that nobody can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flare.core.architectures import Architecture
from flare.core.cuda_graph import Box, CudaGraphs, decode_cuda_graphs
from flare.core.manifest import CudaTarget, Limits
from ignition.capture import capture
from ignition.checkpoint import open_checkpoint
from ignition.checkpoint.tensors import LazyTensor
from ignition.graph import Graph
from ignition.patterns import matrix_names
from ignition.progress import Progress
from ignition.reference import ReferenceModel
from ignition.targets.cuda.compile import KERNELS, Compiled, job
from ignition.targets.cuda.compile_worker import Cubin
from ignition.targets.cuda.export import CudaExport
from ignition.targets.cuda.graphs import all_launches
from ignition.targets.cuda.launch import TensorMap
from ignition.weights import VECTOR, Stored, choose_storage
from recipes import Recipe, dense
from tests.support.cuda_segments import Segments
from tests.support.odd_graphs import Change, Model, odd_recipe

LIMITS = Limits(max_context=64, slots=3, page_tokens=16, max_step_tokens=16, max_rows=3)


@dataclass
class Collected:
    """What an export wrote, by file."""

    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        assert name not in self.files
        self.files[name] = data

    def add_weights(self, name: str, header: bytes, tensors: Iterable[Callable[[], bytes]]) -> None:
        padded = [data + bytes(-len(data) % 64) for data in (make() for make in tensors)]
        self.add(name, header + b"".join(padded))


@dataclass(frozen=True)
class Exported:
    """An export for cuda: what it was made of, its parts, and the reference model over the same stored weights."""

    graph: Graph
    storage: dict[str, Stored]
    export: CudaExport
    target: CudaTarget
    files: dict[str, bytes]
    reference: ReferenceModel

    def graphs(self, architecture: Architecture = "sm_90a") -> CudaGraphs:
        name = self.target.architectures[architecture]
        return decode_cuda_graphs(self.files[name], name)

    def segments(self, pages: int, architecture: Architecture = "sm_90a") -> Segments:
        sizes = self.target.segments
        weights = self.files[self.target.weights.file][sizes.weights_offset :]
        assert len(weights) == sizes.weights_bytes
        by_name = {
            "arena": sizes.arena_bytes,
            "io": sizes.io_bytes,
            "host": sizes.host_bytes,
            "kv": sizes.kv_page_bytes,
        }
        return Segments(self.graphs(architecture), by_name, pages, weights)


def uncompiled(export: CudaExport) -> Compiled:
    """A cubin for every kernel, of bytes that tell kernels apart."""
    cubins: dict[str, dict[bytes, Cubin]] = {}
    for name, lowered in export.lowered.items():
        for launch in all_launches(lowered, export.limits, export.vocabulary):
            key = job(launch, name).key()
            boxes = {arg: box(value) for arg, value in launch.args.items() if isinstance(value, TensorMap)}
            cubins.setdefault(name, {})[key] = Cubin(
                key, launch.kernel, 32 * launch.warps, 0, {"triton": "none"}, 0.0, boxes
            )
    return Compiled(KERNELS, cubins)


def box(tensor: TensorMap) -> Box:
    """What a compiler would copy at once of a tensor of halves."""
    row = min(64, tensor.block[-1])
    return Box(shape=(*tensor.block[:-1], row), swizzle=2 * row, promotion=128)


def export_cuda(
    checkpoint: Path,
    weights: str = "auto",
    architectures: tuple[Architecture, ...] = ("sm_90a",),
    limits: Limits = LIMITS,
    kernels: Collection[str] | None = None,
) -> Exported:
    """The cuda part of an export of a tiny checkpoint, where these ops have kernels (None: all); a host part has no
    libraries."""
    opened = open_checkpoint(str(checkpoint))
    model = dense.configure(opened.config)
    graph = capture(dense.RECIPE, model)
    storage, _ = choose_storage(dense.weights(model), matrix_names(graph), opened, weights)
    export = CudaExport(graph, storage, limits, model.vocabulary, architectures, kernels=kernels)
    return _packed(dense.RECIPE, model, storage, graph, export, weights)


def export_odd(change: Change, names: str, *, states: bool = False, kernels: Collection[str] | None = None) -> Exported:
    """The cuda part of an export of a step that no recipe of ours writes, with random weights in f32, where these ops have
    kernels (None: all)."""
    recipe = odd_recipe(change, names, states=states)
    graph = capture(recipe, Model)
    matrices = matrix_names(graph)
    storage = {}
    for name, spec in recipe.weights(Model).items():
        values = np.random.default_rng(len(storage)).normal(size=spec.shape).astype(np.float32)
        tensor = LazyTensor(name, spec.shape, "f32", memoryview(values).cast("B"))
        storage[name] = Stored(name, spec, "f32" if name in matrices else VECTOR, (tensor,))
    export = CudaExport(graph, storage, LIMITS, Model.vocabulary, ("sm_90a",), kernels=kernels)
    return _packed(recipe, Model, storage, graph, export, "auto")


def _packed(
    recipe: Recipe, model: Any, storage: dict[str, Stored], graph: Graph, export: CudaExport, option: str
) -> Exported:
    export.compiled = uncompiled(export)
    written = Collected()
    target = export.pack(option, written, Progress())
    tensors: dict[str, Any] = {n: stored.values() for n, stored in storage.items() if stored.spec.value is None}
    reference = ReferenceModel(recipe, model, tensors, pages=12, page_tokens=export.limits.page_tokens)
    return Exported(graph, storage, export, target, written.files, reference)
