"""The closed op set: everything that a recipe's step may compute.

An op is three things with one name: its torch reference here, its kernels in `ignition/targets/<target>/kernels`, and
its test in `tests/ops`. The reference is the definition: exact semantics in float32, one file a family. Each file
registers its ops with torch under the namespace `ignition` (schema, shape function, reference), so that capture sees a
call as one node, and defines the functions that recipes call:

    from ignition import ops
    h = ops.rms_norm(x, weights["norm.weight"], eps=1e-5)

T is the number of tokens of the step, R of the rows whose logits are wanted. Activations are float32, indices int32.
Weights may be float32, bfloat16 or float16; they are widened to float32 before any arithmetic. A shape or dtype that an
op does not take is an InputError that names the op and the argument.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignition.ops.elementwise import add, silu_mul
    from ignition.ops.embedding import embed, take_rows
    from ignition.ops.matrix import linear
    from ignition.ops.norm import rms_norm
    from ignition.ops.paged_attention import attention, kv_write
    from ignition.ops.rotary import rope, rope_angles

__all__ = [
    "add",
    "attention",
    "embed",
    "kv_write",
    "linear",
    "rms_norm",
    "rope",
    "rope_angles",
    "silu_mul",
    "take_rows",
]

FAMILIES = {
    "embed": "embedding",
    "take_rows": "embedding",
    "rms_norm": "norm",
    "linear": "matrix",
    "rope_angles": "rotary",
    "rope": "rotary",
    "kv_write": "paged_attention",
    "attention": "paged_attention",
    "silu_mul": "elementwise",
    "add": "elementwise",
}
"""Every op of the set, and the file that defines it."""


def __getattr__(name: str) -> Any:
    # The families import torch, so they load at the first use of one of their ops.
    if name not in FAMILIES:
        raise AttributeError(f"ignition.ops has no op {name!r}")
    return getattr(import_module(f"ignition.ops.{FAMILIES[name]}"), name)
