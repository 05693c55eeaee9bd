"""A small file of cuda graphs over really compiled cubins, and a manifest that it belongs to.

The step scales what lies in the arena into the logits behind a product, a draw copies nonsense out: what it computes means
nothing, but every rule of the format is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from flare.core.architectures import Architecture
from flare.core.checksums import sha256_bytes, sha256_chunked
from flare.core.cuda_graph import (
    DEVICE_ONLY,
    Box,
    Bucket,
    CopyNode,
    CudaGraphs,
    Edge,
    FillNode,
    Kernel,
    KernelNode,
    Pointer,
    Scalar,
    TensorMap,
    io_arrays,
)
from flare.core.manifest import (
    FORMAT_VERSION,
    CudaSegments,
    CudaTarget,
    File,
    Limits,
    Logprobs,
    Manifest,
    Model,
    Oracle,
    Sampling,
    Template,
    Tokens,
    Weights,
)
from ignition.pack import lay_out_weights
from tests.support.cuda_cubins import CONSTANTS, KERNELS, SIGNATURES, WARPS, cubin, metadata

LIMITS = Limits(max_context=64, slots=2, page_tokens=16, max_step_tokens=4, max_rows=2)
VOCABULARY = 40
WEIGHTS_BYTES, ARENA_BYTES, KV_PAGE_BYTES = 16384, 32768, 8192
NULL = Pointer(segment="none", offset=0, bytes=0)
SCRATCH = [NULL, NULL]


def file_of(architecture: str) -> str:
    return f"graphs/cuda-{architecture}.msgpack"


def place(limits: Limits, vocabulary: int) -> tuple[dict[str, Pointer], int, int]:
    """Places the named arrays one behind the other; returns them and the bytes of io and host."""
    io, ends = {}, {"io": 0, "host": 0}
    for name, size in io_arrays(limits, vocabulary).items():
        for segment in ("io",) if name in DEVICE_ONLY else ("io", "host"):
            io[name if segment == "io" else f"host.{name}"] = Pointer(segment=segment, offset=ends[segment], bytes=size)
            ends[segment] += -(-size // 64) * 64
    return io, ends["io"], ends["host"]


def make_kernel(folder: Path, name: str, architecture: Architecture) -> Kernel:
    """One of the kernels of `cuda_cubins.make`, as a graph file has it."""
    data, facts = cubin(folder, name, architecture), metadata(folder, name, architecture)
    return Kernel(
        cubin=f"kernels/{architecture}/{sha256_bytes(data)[:16]}.cubin",
        name=facts["name"],
        threads=32 * WARPS[name],
        shared=facts["shared"],
        source=f"cuda_kernels.{name}",
        signature=SIGNATURES[name],
        constants=dict(CONSTANTS[name]),
        boxes={"x": Box(shape=(16, 64), swizzle=128, promotion=128)} if name == "take" else {},
    )


def with_map(
    folder: Path, graphs: CudaGraphs, cubins: dict[str, bytes], shape: tuple[int, int] = (100, 72)
) -> tuple[CudaGraphs, dict[str, bytes]]:
    """The same graphs with one more kernel, and at the end of each step its launch, which takes a bf16 tensor of `shape` from
    the weights to the arena."""
    kernel = make_kernel(folder, "take", graphs.arch)
    base = Pointer(segment="weights", offset=0, bytes=2 * shape[0] * shape[1])
    whole = TensorMap(base=base, shape=shape, strides=(2 * shape[1],))
    programs = -(-shape[0] // 16)
    args = [whole, Pointer(segment="arena", offset=0, bytes=programs * 16 * 128 * 2), *SCRATCH]
    step = []
    for bucket in graphs.step:
        last = Edge(node=len(bucket.nodes) - 1)
        take = KernelNode(kernel=len(graphs.kernels), grid=(programs, 1, 1), args=args, label="take", after=[last])
        step.append(replace(bucket, nodes=[*bucket.nodes, take]))
    return replace(graphs, kernels=[*graphs.kernels, kernel], step=step), cubins | {
        kernel.cubin: cubin(folder, "take", graphs.arch)
    }


def make_graphs(
    folder: Path, architecture: Architecture, limits: Limits = LIMITS, vocabulary: int = VOCABULARY
) -> tuple[CudaGraphs, dict[str, bytes]]:
    """Graphs for an architecture and their cubins by file; `folder` is that of `cuda_cubins.make`."""
    io, _, _ = place(limits, vocabulary)
    cubins, kernels = {}, []
    for name in KERNELS:
        kernels.append(make_kernel(folder, name, architecture))
        cubins[kernels[-1].cubin] = cubin(folder, name, architecture)

    def at(segment: Any, offset: int, size: int) -> Pointer:
        return Pointer(segment=segment, offset=offset, bytes=size)

    def scale(source: Pointer, target: Pointer, count: int, *after: int) -> KernelNode:
        args = [source, target, Scalar(type="i32", value=count), Scalar(type="f32", value=0.5), *SCRATCH]
        return KernelNode(
            kernel=0, grid=(-(-count // 128), 1, 1), args=args, label="scale", after=[Edge(node=n) for n in after]
        )

    def copy(name: str, inward: bool, *after: int) -> CopyNode:
        ends = [io[f"host.{name}"], io[name]] if inward else [io[name], io[f"host.{name}"]]
        return CopyNode(source=ends[0], target=ends[1], label=name, after=[Edge(node=n) for n in after])

    def step(tokens: int, rows: int) -> Bucket:
        inputs = [
            copy(name, True, *([i - 1] if i else [])) for i, name in enumerate(("tokens", "positions", "slots", "rows"))
        ]
        fill = FillNode(target=at("arena", 0, 4096), value=0, label="clear", after=[])
        args = [at("weights", 0, 8192), at("kv", 0, 8192), at("arena", 0, 16384), *SCRATCH]
        dot = KernelNode(kernel=1, grid=(1, 1, 1), args=args, label="dot", after=[Edge(node=3), Edge(node=4)])
        logits = replace(io["logits"], bytes=4 * rows * vocabulary)
        count = min(rows * vocabulary, 4096)
        return Bucket(
            tokens=tokens, rows=rows, nodes=[*inputs, fill, dot, scale(at("arena", 0, 4 * count), logits, count, 5)]
        )

    def sample(rows: int) -> Bucket:
        args = [io["logits"], io["sampled"], io["logprobs"], *SCRATCH]
        draw = KernelNode(kernel=1, grid=(1, 1, 1), args=args, label="draw", after=[])
        return Bucket(tokens=0, rows=rows, nodes=[draw, copy("sampled", False, 0), copy("logprobs", False, 1)])

    def score(rows: int) -> Bucket:
        return Bucket(tokens=0, rows=rows, nodes=[scale(io["logits"], io["logprobs"], rows * vocabulary)])

    top = limits.max_rows
    return (
        CudaGraphs(
            arch=architecture,
            kernels=kernels,
            step=[step(1, 1), step(limits.max_step_tokens, top)],
            sample=[sample(1), sample(top)] if top > 1 else [sample(1)],
            score=[score(top)],
            io=io,
        ),
        cubins,
    )


def make_target(
    architectures: list[Architecture], limits: Limits = LIMITS, vocabulary: int = VOCABULARY, **weights: Any
) -> CudaTarget:
    """The target that `make_graphs` fits."""
    _, io_bytes, host_bytes = place(limits, vocabulary)
    return CudaTarget(
        architectures={name: file_of(name) for name in architectures},
        compute_dtype="f16",
        compiler={"triton": "3.9.0"},
        segments=CudaSegments(
            weights_bytes=WEIGHTS_BYTES,
            weights_offset=4096,
            arena_bytes=ARENA_BYTES,
            io_bytes=io_bytes,
            host_bytes=host_bytes,
            kv_page_bytes=KV_PAGE_BYTES,
        ),
        weights=Weights(
            **{
                "file": "weights-cuda.safetensors",
                "option": "auto",
                "formats": {"f16": WEIGHTS_BYTES},
                "kv_format": "f16",
                "decode_weight_bytes": WEIGHTS_BYTES,
                "header_sha256": "0" * 64,
            }
            | weights
        ),
    )


def make_manifest(*architectures: Architecture) -> Manifest:
    """A manifest of such a target alone."""
    target = make_target(list(architectures))
    files = ["tokenizer.json", "oracle.msgpack", target.weights.file, *target.architectures.values()]
    return Manifest(
        format="flare-core",
        version=FORMAT_VERSION,
        exporter={},
        model=Model(
            id="tiny",
            recipe="dense",
            architecture="llama",
            source="tests",
            vocabulary=VOCABULARY,
            layers=1,
            hidden_size=64,
            parameters=1,
        ),
        targets=[target],
        limits=LIMITS,
        logprobs=Logprobs(alternatives=20, explicit_ids=128, prompt=False),
        tokens=Tokens(bos=None, eos=[], pad=None, add_bos=False),
        template=Template(file=None, source=None, facts={}),
        sampling=Sampling(defaults={}, sources={}, ranges="open"),
        oracle=Oracle(file="oracle.msgpack", isas=[], mean_kl=None, max_logprob_error=None, top1_agreement=None),
        files={name: File(bytes=0, hash="0" * 64) for name in files},
    )


def add_cuda_target(core: Path, folder: Path, *architectures: Architecture) -> None:
    """Gives an exported core a cuda target as well: graphs and cubins for each architecture, and weights that are zeros."""
    manifest = msgspec.json.decode((core / "core.json").read_bytes(), type=Manifest)
    limits, vocabulary = manifest.limits, manifest.model.vocabulary
    _, header = lay_out_weights({"zeros": WEIGHTS_BYTES})
    weights = core / "weights-cuda.safetensors"
    weights.write_bytes(header + bytes(WEIGHTS_BYTES))
    entry = File(bytes=weights.stat().st_size, hash=sha256_chunked(weights), chunked=True)
    files = {**manifest.files, weights.name: entry}
    for architecture in architectures:
        graphs, cubins = make_graphs(folder, architecture, limits, vocabulary)
        for name, data in {**cubins, file_of(architecture): graphs.encode()}.items():
            (core / name).parent.mkdir(exist_ok=True)
            (core / name).write_bytes(data)
            files[name] = File(bytes=len(data), hash=sha256_bytes(data))
    target = make_target(list(architectures), limits, vocabulary, header_sha256=sha256_bytes(header))
    data = replace(manifest, targets=[*manifest.targets, target], files=files).encode()
    (core / "core.json").write_bytes(data)
    (core / "core.sha256").write_text(f"{sha256_bytes(data)}  core.json\n")
