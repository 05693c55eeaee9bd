"""Which format each weight of a core is stored in, and its bytes.

Vectors and constants (norms, biases, rotary frequencies) are f32. A matrix keeps the precision of its checkpoint
(`--weights auto`) or takes the format that was asked for; whatever that format can hold without loss is converted without
loss. `--weights q4` stores embeddings and the output layer as q8, `--weights fp8` as bf16: they are read once a step, and
decide the answer directly. What a matrix's bytes are is its target's matter: its `Packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.interface import Checkpoint
from ignition.checkpoint.tensors import LazyTensor
from ignition.graph import Value
from ignition.quantize import GROUP, convert, decode, is_lossless, natural_format
from recipes import WeightSpec

OPTIONS = ("auto", "f32", "bf16", "q8", "q4", "fp8")
VECTOR = "vector"
QUANTISED_FORMATS = frozenset({"q8", "q4"})


class Packing(Protocol):
    """How a target lays out matrices: the module `ignition.targets.<target>.packing`."""

    def packed_bytes(self, format: str, rows: int, columns: int) -> int:
        """Returns the bytes of a packed matrix."""
        ...

    def pack_tensors(self, tensors: Sequence[LazyTensor], format: str) -> Iterator[np.ndarray]:
        """Yields the bytes of matrices joined along their rows, converted and packed. Raises InputError."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """One weight as the core stores it. `format` is f32, f16, bf16, q8, q4, fp8, or "vector" (plain f32, not packed)."""

    name: str
    spec: WeightSpec
    format: str
    tensors: tuple[LazyTensor, ...]

    def bytes(self, packing: Packing) -> int:
        """Packed bytes, without the padding between tensors."""
        if self.format == VECTOR:
            return 4 * int(np.prod(self.spec.shape))
        return packing.packed_bytes(self.format, *self.spec.shape)

    def pack(self, packing: Packing) -> bytes:
        """The weight's bytes in the core. Raises InputError for values that the format cannot hold."""
        if self.format == VECTOR:
            return self.values().astype("<f4").tobytes()
        return b"".join(piece.tobytes() for piece in packing.pack_tensors(self.tensors, self.format))

    def values(self) -> np.ndarray:
        """The float32 values that the kernels compute with, in the spec's shape."""
        if self.spec.value is not None:
            return np.asarray(self.spec.value, dtype=np.float32).reshape(self.spec.shape)
        if self.format == VECTOR:
            return np.concatenate([tensor.float32() for tensor in self.tensors]).reshape(self.spec.shape)
        return np.concatenate([decode(convert(tensor, self.format)) for tensor in self.tensors]).reshape(
            self.spec.shape
        )


def choose_storage(
    specs: Mapping[str, WeightSpec], matrices: Mapping[str, Value], checkpoint: Checkpoint, option: str
) -> tuple[dict[str, Stored], list[str]]:
    """The storage of every weight, in the recipe's order, and notices about what is requantised.

    `matrices` are the weights that kernels read packed. Raises InputError for a tensor that is missing
    or has another shape than the recipe wants, and a row length that q8 or q4 cannot hold.
    """
    stored: dict[str, Stored] = {}
    requantised: dict[tuple[str, str], int] = {}
    for name, spec in specs.items():
        tensors = tuple(checkpoint.tensor(source) for source in spec.sources)
        _check_shape(name, spec, tensors, checkpoint.source)
        format = VECTOR
        if name in matrices:
            format = _format(spec, tensors, option)
            if format in ("q8", "q4") and spec.shape[-1] % GROUP:
                raise InputError(
                    f"tensor {name}: rows of {spec.shape[-1]} are not whole groups of {GROUP}; use --weights bf16 or f32"
                )
            for tensor in tensors:
                if option == "auto" and not is_lossless(tensor.encoding, format):
                    requantised[tensor.encoding, format] = requantised.get((tensor.encoding, format), 0) + 1
        stored[name] = Stored(name, spec, format, tensors)
    notices = [
        f"{count} tensors stored as {old} are requantised to {new}" for (old, new), count in sorted(requantised.items())
    ]
    return stored, notices


def _format(spec: WeightSpec, tensors: tuple[LazyTensor, ...], option: str) -> str:
    if option == "auto":
        natural = {natural_format(tensor.encoding) for tensor in tensors}
        return natural.pop() if len(natural) == 1 else "f32"
    if spec.role == "embedding":
        return {"q4": "q8", "fp8": "bf16"}.get(option, option)
    return option


def _check_shape(name: str, spec: WeightSpec, tensors: tuple[LazyTensor, ...], source: str) -> None:
    if spec.value is not None:
        return
    rows = sum(tensor.rows for tensor in tensors)
    rest = {tensor.shape[1:] for tensor in tensors}
    if rows != spec.shape[0] or rest != {tuple(spec.shape[1:])}:
        found = " + ".join(str(list(tensor.shape)) for tensor in tensors)
        raise InputError(f"{source}: tensor {name} has shape {found}, the config wants {list(spec.shape)}")


def unused_tensors(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> Iterator[str]:
    """The checkpoint's tensors that no weight of the recipe names."""
    used = {source for spec in specs.values() for source in spec.sources}
    return (name for name in checkpoint.tensors if name not in used)
