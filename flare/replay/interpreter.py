"""Runs ops with numpy: nodes of a step that no kernel of the core's target runs. Right, and slow.

An op here is what its torch reference in `ignition/ops` computes, in f32. As with kernels, a token's results depend neither on
the other tokens of a step nor on where its pages lie: whatever sums, sums each token for itself, in the same order.
"""

from __future__ import annotations

import ctypes
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import numpy as np

from flare.core.graph import MAX_DIMENSIONS, Op, Tensor, elements, without_kernel
from flare.errors import CoreError
from flare.fallbacks import Fallbacks

Array = np.ndarray[Any, Any]
RUN = 16
"""Positions that the keys of a page are transposed in: docs/core-format.md, Graphs."""

_INPUTS: Mapping[str, list[int | str]] = {
    "tokens": ["T"],
    "positions": ["T"],
    "slots": ["T"],
    "page_table": ["slots", "slot_pages"],
    "rows": ["R"],
}
"""The shapes of the arrays of a step, as nodes give them."""

_KV_TYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}


class Arg(Protocol):
    """A node's argument; see `CpuArg`."""

    segment: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step of a core may have: the most tokens and rows, and the kv pool with the pages of a slot."""

    tokens: int
    rows: int
    kv_pages: int
    kv_page_bytes: int
    page_tokens: int
    page_stride: int
    kv_format: str


class Pages:
    """A layer's keys [pages, KV heads, runs, head size, 16] and values [pages, KV heads, page_tokens, head size] in the pool,
    which is all at `address`."""

    def __init__(self, address: int, sizes: Sizes, keys: Arg, values: Arg, shape: Sequence[int]) -> None:
        heads, self.page_tokens, width = shape
        pages, page_bytes, kind = sizes.kv_pages, sizes.kv_page_bytes, _KV_TYPES[sizes.kv_format]
        item = kind.itemsize
        pool = (ctypes.c_char * (pages * page_bytes)).from_address(address)
        runs = self.page_tokens // RUN
        inner = (width * self.page_tokens * item, RUN * width * item, RUN * item, item)
        self.keys: Array = np.ndarray((pages, heads, runs, width, RUN), kind, pool, keys.offset, (page_bytes, *inner))
        inner = (width * self.page_tokens * item, width * item, item)
        self.values: Array = np.ndarray(
            (pages, heads, self.page_tokens, width), kind, pool, values.offset, (page_bytes, *inner)
        )

    def write(self, page: Array, at: Array, k: Array, v: Array) -> None:
        """Stores k, v [T, KV heads, head size] at positions `at` [T] of pages `page` [T]."""
        self.keys[page, :, at // RUN, :, at % RUN] = k
        self.values[page, :, at] = v

    def read(self, pages: Array) -> tuple[Array, Array]:
        """Returns the keys and values of pages in their order, each f32 [KV heads, positions, head size]."""
        keys, values = self.keys[pages], self.values[pages]
        heads, width = values.shape[1], values.shape[3]
        keys = keys.transpose(1, 0, 2, 4, 3).reshape(heads, -1, width)
        return keys.astype(np.float32), values.transpose(1, 0, 2, 3).reshape(heads, -1, width).astype(np.float32)


def embed(table: Array, tokens: Array) -> Array:
    return table[tokens]


def take_rows(x: Array, rows: Array) -> Array:
    return x[rows]


def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    mean = np.square(x).mean(axis=-1, keepdims=True)
    return weight * (x / np.sqrt(mean + np.float32(eps)))


def linear(x: Array, w: Array, bias: Array | None) -> Array:
    # A product with several rows at once may sum in another order than with one.
    out = np.stack([w @ row for row in x]) if len(x) else np.empty((0, len(w)), np.float32)
    return out if bias is None else out + bias


def rope_angles(positions: Array, inv_freq: Array, *, scale: float) -> tuple[Array, Array]:
    angles = positions.astype(np.float32)[:, None] * inv_freq
    return np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def silu_mul(gate: Array, up: Array) -> Array:
    return gate / (np.float32(1) + np.exp(-gate)) * up


def add(a: Array, b: Array) -> Array:
    return a + b


def kv_write(kv: Pages, k: Array, v: Array, positions: Array, slots: Array, page_table: Array) -> tuple[()]:
    page = page_table[slots, positions // kv.page_tokens]
    kv.write(page, positions % kv.page_tokens, k, v)
    return ()


def attention(
    q: Array, kv: Pages, positions: Array, slots: Array, page_table: Array, *, scale: float, window: int
) -> Array:
    tokens, heads, width = q.shape
    out = np.empty((tokens, heads * width), np.float32)
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        first = max(0, position - window + 1) if window else 0
        page = first // kv.page_tokens
        keys, values = kv.read(page_table[slot, page : position // kv.page_tokens + 1])
        seen = slice(first - page * kv.page_tokens, position + 1 - page * kv.page_tokens)
        keys, values = keys[:, seen], values[:, seen]
        query = q[token].reshape(len(keys), -1, width)
        scores = np.einsum("kgd,ksd->kgs", query, keys) * np.float32(scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[token] = np.einsum("kgs,ksd->kgd", weights, values).reshape(-1)
    return out


OPS: Mapping[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (embed, take_rows, rms_norm, linear, rope_angles, rope, silu_mul, add, kv_write, attention)
}
"""Every op of the set, with the arguments of its reference: tensors in their order, scalars by name."""


class Interpreter:
    """Runs a step's nodes that have an op. One step at a time; its nodes may run on several threads.

    `causes` says which ops these are, in sentences. Raises CoreError for a node that does not fit its op or its memory.
    """

    def __init__(self, nodes: Mapping[int, tuple[Op, Sequence[Arg]]], sizes: Sizes, fallbacks: Fallbacks) -> None:
        self._sizes = sizes
        self._fallbacks = fallbacks
        self._nodes = dict(nodes)
        counts = Counter(op.name for op, _ in nodes.values())
        self._causes = {
            name: f"{without_kernel(name, count, 'cpu')}, numpy interprets it" for name, count in counts.items()
        }
        self._inputs: dict[str, Array] = {}
        self._tokens = self._rows = 0
        for index, (op, args) in nodes.items():
            problem = _problem(op, args, sizes)
            if problem:
                raise CoreError(f"node {index} (op {op.name[:40]!r}): {problem}; export the core again")

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(self._causes.values())

    def attach(self, tokens: Any, positions: Any, slots: Any, page_table: Any, rows: Any) -> None:
        """Takes the arrays of the steps, int32, which their caller fills before each."""
        given = {"tokens": tokens, "positions": positions, "slots": slots, "rows": rows, "page_table": page_table}
        self._inputs = {name: np.frombuffer(array, np.int32) for name, array in given.items()}
        self._inputs["page_table"] = self._inputs["page_table"].reshape(-1, self._sizes.page_stride)

    def begin(self, tokens: int, rows: int) -> None:
        """Tells how many tokens and rows the next step has."""
        self._tokens, self._rows = tokens, rows

    def run(self, index: int, arguments: int, kv: int) -> None:
        """Runs a node, as `flare.replay.called_nodes.Run` says."""
        op, args = self._nodes[index]
        self._fallbacks.record(self._causes[op.name])
        with np.errstate(all="ignore"):
            self._run(op, args, (ctypes.c_uint64 * len(args)).from_address(arguments), kv)

    def _run(self, op: Op, args: Sequence[Arg], addresses: Sequence[int], kv: int) -> None:
        bound = iter(zip(args, addresses, strict=True))

        def take(tensor: Tensor | None) -> Any:
            if tensor is None:
                next(bound)
                return None
            if tensor.input:
                whole = self._inputs[tensor.input]
                return whole[: self._dimension(tensor.shape[0])] if tensor.input != "page_table" else whole
            arg, address = next(bound)
            if arg.segment == "kv":
                values, _ = next(bound)
                return Pages(kv, self._sizes, arg, values, _page_shape(tensor))
            shape = tuple(self._dimension(dim) for dim in tensor.shape)
            return np.ndarray(shape, np.float32, (ctypes.c_float * math.prod(shape)).from_address(address))

        inputs = [take(tensor) for tensor in op.inputs]
        outputs = [take(tensor) for tensor in op.outputs]
        found = OPS[op.name](*inputs, **op.attrs)
        for target, value in zip(outputs, found if isinstance(found, tuple) else (found,), strict=True):
            target[...] = value.reshape(target.shape)

    def _dimension(self, dim: int | str) -> int:
        return dim if isinstance(dim, int) else {"T": self._tokens, "R": self._rows}[dim]


def _page_shape(tensor: Tensor) -> list[int]:
    """KV heads, page_tokens and head size of a state [pages, 2, KV heads, page_tokens, head size]."""
    return [int(tensor.shape[index]) for index in (2, 3, 4)]


def _problem(op: Op, args: Sequence[Arg], sizes: Sizes) -> str | None:
    """Says what is wrong with a node: whatever could make it touch memory that is not its own, or be called wrongly."""
    if op.name not in OPS:
        return f"the interpreter has no such op; it has {', '.join(sorted(OPS))}"
    most = {"T": sizes.tokens, "R": sizes.rows}
    left = list(args)
    for tensor, written in [*((t, False) for t in op.inputs), *((t, True) for t in op.outputs)]:
        if tensor is not None and tensor.input:
            if written:
                return f"it writes to the step's {tensor.input}"
            if tensor.shape != _INPUTS[tensor.input]:
                return f"the step's {tensor.input} of {str(tensor.shape)[:80]}, wanted {_INPUTS[tensor.input]}"
            continue
        if not left:
            return f"{len(args)} arguments are too few for its tensors"
        arg = left.pop(0)
        if tensor is None:
            if arg.segment != "none":
                return "a tensor that is absent has memory"
            continue
        if len(tensor.shape) > MAX_DIMENSIONS:
            return f"a tensor of {len(tensor.shape)} dimensions, wanted at most {MAX_DIMENSIONS}"
        dims = [dim if isinstance(dim, int) else most.get(dim, -1) for dim in tensor.shape]
        if arg.segment == "kv":
            numbers = len(dims) == 5 and all(isinstance(dim, int) for dim in tensor.shape[2:])
            if written or not numbers or not left or left[0].segment != "kv":
                return "a state is not [pages, 2, KV heads, page_tokens, head size] of keys and values in kv pages"
            heads, page_tokens, width = _page_shape(tensor)
            needed = heads * page_tokens * width * _KV_TYPES[sizes.kv_format].itemsize
            if min(heads, width) < 1 or page_tokens != sizes.page_tokens or min(arg.bytes, left.pop(0).bytes) < needed:
                return f"a state of {tensor.shape[2:]} does not fit its memory, or pages of {sizes.page_tokens} tokens"
            continue
        if arg.segment == "none" or (written and arg.segment == "weights"):
            return f"a tensor that is {'written' if written else 'read'} is in segment {arg.segment}"
        if not elements(dims, arg.bytes // 4):
            return f"a tensor of {str(tensor.shape)[:80]} does not fit its {arg.bytes} bytes"
    return f"{len(left)} arguments belong to none of its tensors" if left else _wrong_call(op)


def _wrong_call(op: Op) -> str | None:
    """Says how a node's tensors and scalars differ from what its op takes and returns, by the op's signature."""
    function = OPS[op.name]
    parameters = inspect.signature(function).parameters.values()
    attrs = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    tensors = [each.name for each in parameters if each.name not in attrs]
    types = get_type_hints(function)
    outputs = len(get_args(types["return"])) if get_origin(types["return"]) is tuple else 1
    if len(op.inputs) != len(tensors):
        return f"it has {len(op.inputs)} inputs, wanted {len(tensors)}: {', '.join(tensors)}"
    for name, tensor in zip(tensors, op.inputs, strict=True):
        if tensor is None and type(None) not in get_args(types[name]):
            return f"it has no {name}, which it needs"
    if len(op.outputs) != outputs:
        return f"it has {len(op.outputs)} outputs, wanted {outputs}"
    if op.attrs.keys() != attrs:
        found, wanted = (", ".join(sorted(names)) or "none" for names in (op.attrs, attrs))
        return f"its attributes are {found[:80]}, wanted {wanted}"
    return None
