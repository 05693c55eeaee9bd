"""The cuda target's graphs for one architecture: the kernels, and for each bucket the nodes of a CUDA graph.

A kernel is a function of a cubin, a node launches it on pointers and scalars or copies or fills memory, and edges order the
nodes. A pointer is (segment, offset): the runtime adds where the segment lies. Offsets into `kv` count inside one page, so that
the number of pages can be chosen when the core is loaded. A tensor map is a recipe, of which the driver makes the map that a
kernel copies boxes by. The file `graphs/cuda-<architecture>.msgpack` is MessagePack.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec.structs import replace

from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS, Limits, Struct
from flare.errors import CoreError

CudaSegment = Literal["weights", "kv", "arena", "io", "host", "none"]

SAMPLE_PARAMS_BYTES = 88
"""Of a row's sampling parameters: `SampleParams` of the replay, which kernels read word by word."""

ROW_LOGPROBS_BYTES = 4 * (4 + 2 * MAX_ALTERNATIVES + MAX_EXPLICIT_IDS)
"""Of a row's log probabilities: `RowLogprobs` of the replay."""

DEVICE_ONLY = frozenset({"logits"})
"""Arrays without a twin on the host."""


class Pointer(Struct, tag_field="kind", tag="pointer", gc=False):
    """`bytes` bytes at `offset` of a segment; `host` is pinned memory, `none` a null pointer (offset and bytes 0)."""

    segment: CudaSegment
    offset: int
    bytes: int


class Scalar(Struct, tag_field="kind", tag="scalar", gc=False):
    """A number passed by value."""

    type: Literal["i32", "i64", "f32"]
    value: int | float


class TensorMap(Struct, tag_field="kind", tag="tensor_map", gc=False):
    """A tensor that a kernel copies boxes of; the kernel says which boxes. Elements behind an end of it are read as zeros.

    base: where it begins, and the bytes that it lies in. shape: elements in each dimension, the outermost first. strides: bytes
    from one element to the next in every dimension but the last, in which elements touch. A kernel has, behind the map itself,
    a parameter for each number of the shape (i32) and each stride in elements (i64, the last one 1).
    """

    base: Pointer
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Box(Struct, gc=False):
    """What a kernel's code copies at once by one of its tensor maps.

    shape: elements in each dimension, the outermost first. swizzle: bytes within which chunks of 16 change places in shared
    memory, 0 where they do not. Both are the compiler's choice. promotion: bytes that the L2 cache fetches at least, 0 for what
    is asked for.
    """

    shape: tuple[int, ...]
    swizzle: Literal[0, 32, 64, 128]
    promotion: Literal[0, 64, 128, 256]


class Kernel(Struct):
    """A function of a cubin.

    cubin: the core's file. name: the function's symbol. threads: of a block, all in x. shared: bytes of dynamic shared memory.
    boxes: by parameter that is a tensor map, what the code copies by it.
    source, signature, constants say what it was compiled from, so that tests can run it without a device: `source` is
    "module.function" of the exporter's kernels, `signature` maps each run-time parameter, in order, to its Triton type
    ("*bf16", "i32", "tensordesc<bf16[64,64]>"), `constants` each compile-time one to its value, but PROGRAMMATIC, which follows
    from the architecture.
    """

    cubin: str
    name: str
    threads: int
    shared: int
    source: str
    signature: dict[str, str]
    constants: dict[str, int | float | bool | str | None]
    boxes: dict[str, Box] = {}


class Edge(Struct, gc=False):
    """That a node waits for an earlier one of its bucket. A programmatic edge lets a kernel begin before the other has ended;
    the kernel itself then waits for that, in its code."""

    node: int
    programmatic: bool = False


class KernelNode(Struct, tag_field="kind", tag="kernel"):
    """One launch. `kernel` is an index into the file's kernels, `grid` the blocks in x, y, z; `args` are in the signature's
    order, then the two scratch pointers of Triton's calling convention, both null."""

    kernel: int
    grid: tuple[int, int, int]
    args: list[Pointer | Scalar | TensorMap]
    label: str
    after: list[Edge]


class CopyNode(Struct, tag_field="kind", tag="memcpy"):
    """Copies `source` to `target`, which have as many bytes."""

    source: Pointer
    target: Pointer
    label: str
    after: list[Edge]


class FillNode(Struct, tag_field="kind", tag="memset"):
    """Sets every byte of `target` to `value`."""

    target: Pointer
    value: int
    label: str
    after: list[Edge]


class HostRows(Struct, gc=False):
    """f32 values that go between the device and the host: `row_bytes` for each token ("T") or row ("R") of the step. `buffer`
    has room for all of the bucket's, one behind the other."""

    buffer: Pointer
    row_bytes: int
    count: Literal["T", "R"]


class HostCut(Struct):
    """A place where the host runs nodes that have no kernel here. Nodes from `at` on are the next piece of the step, and begin
    when all before are done and the host is.

    gives: what the piece before the cut made and the host reads, at any time. takes: what the host made and the piece behind
    the cut, or a later one, reads.
    """

    at: int
    gives: list[HostRows]
    takes: list[HostRows]


class Bucket(Struct, omit_defaults=True):
    """A graph for at most so many tokens and rows. Edges lead to earlier nodes only, of the same piece where a step has
    cuts."""

    tokens: int
    rows: int
    nodes: list[KernelNode | CopyNode | FillNode]
    host: list[HostCut] = []


class CudaGraphs(Struct):
    """All graphs for one architecture.

    step: by increasing tokens. sample, score: of no tokens, by increasing rows. io: where each named array lies, in `io`,
    and its twin "host.<name>" in `host`.
    """

    arch: str
    kernels: list[Kernel]
    step: list[Bucket]
    sample: list[Bucket]
    score: list[Bucket]
    io: dict[str, Pointer]

    def encode(self) -> bytes:
        """Returns the file's bytes."""
        return msgspec.msgpack.encode(self)


def pieces(bucket: Bucket) -> list[Bucket]:
    """Returns the bucket cut up: one more than it has cuts, each with edges among its own nodes."""
    found = []
    for begin, end in pairwise([0, *(cut.at for cut in bucket.host), len(bucket.nodes)]):
        nodes = [
            replace(node, after=[replace(edge, node=edge.node - begin) for edge in node.after])
            for node in bucket.nodes[begin:end]
        ]
        found.append(Bucket(tokens=bucket.tokens, rows=bucket.rows, nodes=nodes))
    return found


def decode_cuda_graphs(data: bytes, name: str) -> CudaGraphs:
    """Decodes a file of cuda graphs. Raises CoreError naming the file and the field when it is malformed."""
    try:
        return msgspec.msgpack.decode(data, type=CudaGraphs)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CoreError(f"{name}: {str(error).splitlines()[0][:200]}; export the core again") from None


def io_arrays(limits: Limits, vocabulary: int) -> Mapping[str, int]:
    """Returns the bytes of each named array of a core's graphs: words of 4 bytes, but `params` and `logprobs`."""
    rows, pages = limits.max_rows, -(-limits.max_context // limits.page_tokens)
    return {
        "tokens": 4 * limits.max_step_tokens,
        "positions": 4 * limits.max_step_tokens,
        "slots": 4 * limits.max_step_tokens,
        "rows": 4 * rows,
        "page_table": 4 * limits.slots * pages,
        "logits": 4 * rows * vocabulary,
        "params": SAMPLE_PARAMS_BYTES * rows,
        "history": 4 * rows * limits.max_context,
        "masks": 4 * rows * -(-vocabulary // 32),
        "explicit_ids": 4 * rows * MAX_EXPLICIT_IDS,
        "sampled": 4 * rows,
        "logprobs": ROW_LOGPROBS_BYTES * rows,
        "first": 4,
        "targets": 4 * rows,
        "wanted": 4 * rows,
    }
