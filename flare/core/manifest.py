"""`core.json`: what a core is, what it can serve, and the hash of every file it is made of.

The exporter fills these structs and the runtime decodes into them (`manifest_checks.py`). Field by field, for people:
`docs/core-format.md`.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from flare.core.architectures import Architecture

FORMAT_VERSION = 4
MANIFEST_FILE = "core.json"
MANIFEST_CHECKSUM_FILE = "core.sha256"
MAX_ALTERNATIVES = 20
"""Most natural alternatives to a token, with their log probabilities."""

MAX_EXPLICIT_IDS = 128
"""Most tokens that a request may name to have their log probabilities."""


class Struct(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of the manifest's parts."""


class Model(Struct):
    """What was exported. `id` is the name the server shows; `source` says which checkpoint it came from."""

    id: str
    recipe: str
    architecture: str
    source: str
    vocabulary: int
    layers: int
    hidden_size: int | None
    parameters: int


class Limits(Struct):
    """Capacities fixed at export, in tokens, slots or rows. The number of kv pages is chosen at load."""

    max_context: int
    slots: int
    page_tokens: int
    max_step_tokens: int
    max_rows: int


class Logprobs(Struct):
    """Which log probabilities the graphs give: the most natural alternatives of a token (0: none at all), the most ids
    asked for by name, and whether prompts can be scored, at a row of logits for each of their tokens."""

    alternatives: int
    explicit_ids: int
    prompt: bool


class CpuSegments(Struct):
    """Bytes of each memory segment. `weights_offset` is where the segment starts in the target's file of weights."""

    weights_bytes: int
    weights_offset: int
    arena_bytes: int
    io_bytes: int
    kv_page_bytes: int


class CudaSegments(Struct):
    """As `CpuSegments`, in device memory, and `host_bytes` of pinned memory, which is copied to and from `io`."""

    weights_bytes: int
    weights_offset: int
    arena_bytes: int
    io_bytes: int
    host_bytes: int
    kv_page_bytes: int


class Weights(Struct):
    """A target's weights. `file` holds them, `header_sha256` covers its safetensors header.

    `option` is what `--weights` said, `formats` maps a format to its bytes, `kv_format` is the element type of the kv pool,
    `decode_weight_bytes` what one decode step reads for one request.
    """

    file: str
    option: str
    formats: dict[str, int]
    kv_format: Literal["bf16", "f16", "f32"]
    decode_weight_bytes: int
    header_sha256: str


class KernelLibrary(Struct):
    """One compiled library: the instruction set it needs and what it was compiled with."""

    file: str
    isa: Literal["x86-64-v4", "x86-64-v3", "generic"]
    machine: str
    compiler: str
    flags: list[str]


class CpuTarget(Struct, tag_field="kind", tag="cpu"):
    """Graphs for the processor: `graphs` maps a graph's name to its file, `abi` is the libraries' interface version."""

    abi: int
    libraries: list[KernelLibrary]
    graphs: dict[str, str]
    segments: CpuSegments
    weights: Weights

    @property
    def decode_weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads for one request."""
        return self.weights.decode_weight_bytes

    @property
    def kv_page_bytes(self) -> int:
        """Bytes of a kv page."""
        return self.segments.kv_page_bytes

    @property
    def formats(self) -> set[str]:
        """What weights, keys and values are rounded to."""
        return {*self.weights.formats, self.weights.kv_format}


class HostPart(Struct):
    """Nodes of a cuda target's step that have no kernel there and run on the processor: `ops` are their numbers by op. The
    graph "step" of `program` has them, and a node for each piece of the step that the device runs between them."""

    ops: dict[str, int]
    program: CpuTarget


class CudaTarget(Struct, tag_field="kind", tag="cuda", omit_defaults=True):
    """Graphs for NVIDIA's devices: `architectures` maps each to its file of graphs, `compiler` a tool to its version.

    `compute_dtype` is what the inputs of linear layers are rounded to, and the element type of the kv pool. `host` is there
    where kernels do not do all.
    """

    architectures: dict[Architecture, str]
    compute_dtype: Literal["bf16", "f16", "f32"]
    compiler: dict[str, str]
    segments: CudaSegments
    weights: Weights
    host: HostPart | None = None

    @property
    def decode_weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads for one request, those of a host part included."""
        host = 0 if self.host is None else self.host.program.decode_weight_bytes
        return self.weights.decode_weight_bytes + host

    @property
    def kv_page_bytes(self) -> int:
        """Bytes of a kv page on the side, device or host part, where it is larger: memory for it is held against both."""
        host = 0 if self.host is None else self.host.program.kv_page_bytes
        return max(self.segments.kv_page_bytes, host)

    @property
    def formats(self) -> set[str]:
        """As `CpuTarget`'s, of a host part too; the inputs of linear layers are rounded as keys and values are."""
        host = set() if self.host is None else self.host.program.formats
        return {*self.weights.formats, self.weights.kv_format, *host}


class Tokens(Struct):
    """Special token ids as the checkpoint's files declare them."""

    bos: int | None
    eos: list[int]
    pad: int | None
    add_bos: bool


class Template(Struct):
    """The chat template and what probing it found. `facts` is the prober's table (docs/core-format.md)."""

    file: str | None
    source: str | None
    facts: dict[str, Any]


class Sampling(Struct):
    """Defaults of the sampling fields, where each came from, and their ranges ("open" or name -> [min, max])."""

    defaults: dict[str, Any]
    sources: dict[str, str]
    ranges: Literal["open"] | dict[str, Any]


class Oracle(Struct):
    """Which compiled results the oracle holds, by instruction set, and how far they were from the reference.

    Only results of the cpu target are held, since a device's cannot be had where cores are made; without any, `isas` is empty
    and what was found is null.
    """

    file: str
    isas: list[str]
    mean_kl: float | None
    max_logprob_error: float | None
    top1_agreement: float | None


class File(Struct):
    """A file of the core. `hash` is SHA-256 over all bytes, or the chunked form (checksums.py) where `chunked` is true."""

    bytes: int
    hash: str
    chunked: bool = False


class Manifest(Struct):
    """The whole of `core.json`. `targets` are what the core's graphs run on: one of each kind at most, the cpu first."""

    format: Literal["flare-core"]
    version: int
    exporter: dict[str, str]
    model: Model
    targets: list[CpuTarget | CudaTarget]
    limits: Limits
    logprobs: Logprobs
    tokens: Tokens
    template: Template
    sampling: Sampling
    oracle: Oracle
    files: dict[str, File]

    @property
    def cpu(self) -> CpuTarget | None:
        """The target of kind "cpu", if the core has it."""
        return next((target for target in self.targets if isinstance(target, CpuTarget)), None)

    @property
    def cuda(self) -> CudaTarget | None:
        """The target of kind "cuda", if the core has it."""
        return next((target for target in self.targets if isinstance(target, CudaTarget)), None)

    @property
    def parts(self) -> list[CpuTarget | CudaTarget]:
        """All that has weights and memory of its own: the targets, and the program of a host part."""
        host = None if self.cuda is None else self.cuda.host
        return [*self.targets, *([] if host is None else [host.program])]

    def encode(self) -> bytes:
        """Returns the canonical JSON bytes: sorted keys, two-space indent, a newline at the end."""
        plain = msgspec.to_builtins(self)
        return (json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
