"""Runs launches of the cuda kernels on torch tensors, in Triton's interpreter, made right and reproducible.

As it comes, the interpreter computes on the raw bits of bf16, cuts f32 to bf16 instead of rounding, and leaves the order of a
dot's sum to the matrix library, so that a row's result would depend on how many rows there are. Here bf16 rounds to nearest
even, arithmetic on bf16 is an error (kernels widen first), and a dot adds its products one by one, in order, in f32.
What it works out anew for every value, though it is the same, is kept: types of blocks and their shapes, formats of numpy.

`TRITON_INTERPRET=1` must be set before Triton is imported for the first time (tests/conftest.py does); a process that
interprets kernels cannot compile them. Programs run one after another: races between them stay unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from ignition.targets.cuda.launch import Launch, Pointer, TensorMap

if not knobs.runtime.interpret:
    raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
Semantic = type(interpreter.interpreter_semantic)


def run(launch: Launch) -> None:
    """Runs a launch whose pointers' operands are torch tensors, which it writes to. Tensor maps are the interpreter's: zeros
    behind an end, no shared memory."""
    file, _, function = launch.kernel.rpartition(".")
    kernel = getattr(import_module(f"ignition.targets.cuda.kernels.{file}"), function)
    args: dict[str, Any] = {}
    for name, value in launch.args.items():
        match value:
            case Pointer(operand=operand):
                args[name] = operand
            case TensorMap(pointer=pointer, shape=shape, block=block):
                args[name] = TensorDescriptor.from_tensor(pointer.operand.view(shape), list(block))
            case _:
                args[name] = value
    kernel[launch.grid](**args, **launch.constants)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 -> f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 -> uint16 bits of bf16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(dtype: Any) -> bool:
    return dtype.scalar == tl.bfloat16


_cast, _binary, _fp_to_fp = Builder.cast_impl, Builder.binary_op, Builder.create_fp_to_fp


def _cast_impl(self: Any, source: Any, target: Any) -> Any:
    if _is_bf16(source.dtype):
        source = Handle(from_bf16(source.data), tl.float32)
    if _is_bf16(target):
        widened = source if source.dtype.scalar == tl.float32 else _cast(self, source, tl.float32)
        return Handle(to_bf16(widened.data), tl.bfloat16)
    return source if source.dtype.scalar == target.scalar else _cast(self, source, target)


def _create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
    if _is_bf16(source.dtype) or _is_bf16(target):
        if source.dtype.primitive_bitwidth == 8:
            source = _fp_to_fp(self, source, tl.float32, rounding)
        return _cast_impl(self, source, target)
    return _fp_to_fp(self, source, target, rounding)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if _is_bf16(left.dtype) and not isinstance(left.dtype, tl.pointer_type):
        raise TypeError("arithmetic on bf16: widen to f32 first")
    return _binary(self, left, right, op)


def _create_dot(self: Any, a: Any, b: Any, into: Any, precision: Any, imprecise: Any) -> Any:
    left, right = (_widened(self, handle) for handle in (a, b))
    total = into.data.astype(np.float32 if left.dtype != np.int32 else np.int32)
    for k in range(left.shape[-1]):
        total = total + left[..., :, k, None] * right[..., None, k, :]
    return Handle(total.astype(into.data.dtype), into.dtype.scalar)


def _widened(self: Any, handle: Any) -> np.ndarray:
    if handle.dtype.scalar.is_int():
        return handle.data.astype(np.int32)
    if _is_bf16(handle.dtype):
        return from_bf16(handle.data)
    if handle.dtype.primitive_bitwidth == 8:
        return _fp_to_fp(self, handle, tl.float32, None).data
    return handle.data.astype(np.float32)


for _name in ("cast_impl", "create_fp_ext", "create_fp_trunc"):
    setattr(Builder, _name, _cast_impl)
Builder.create_fp_to_fp = _create_fp_to_fp
Builder.binary_op = _binary_op
Builder.create_dot = _create_dot
Semantic.binary_op_sanitize_overflow_impl = lambda *_: None  # conditions of assertions that are off


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


_block_type, _tensor, _equal = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
_numpy = interpreter._get_np_dtype
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_formats: dict[str, np.dtype[Any]] = {}


def _init_block_type(self: Any, element: Any, shape: Sequence[Any]) -> None:
    if isinstance(element, tl.pointer_type):  # its name does not say all
        return _block_type(self, element, shape)
    key = (element.name, *[size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _blocks:
        _block_type(self, element, shape)
        _blocks[key] = self.__dict__.copy()
    self.__dict__.update(_blocks[key])


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    shape = tuple(kind.shape) if kind.is_block() else ()
    if shape not in _shapes:
        _tensor(self, handle, kind)
        _shapes[shape] = (self.shape, self.numel)
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shapes[shape]


def _numpy_format(kind: Any) -> np.dtype[Any]:
    name = kind.scalar.name
    if name not in _formats:
        _formats[name] = _numpy(kind)
    return _formats[name]


tl.block_type.__init__ = _init_block_type
tl.tensor.__init__ = _init_tensor
tl.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)
interpreter._get_np_dtype = _numpy_format


# As it comes, the language is patched anew whenever a kernel calls a function, tl.sum and the like included: most of the time.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter.InterpretedFunction.__call__ = _call
