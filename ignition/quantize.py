"""Weight formats of a core, f32, f16, bf16, fp8, q8 and q4 (groups of 32 along the input dimension), and how values get in.

q8: value = scale * quant, quant int8. q4: value = scale * quant + minimum, quant 0..15. Scales and minimums are
float16. GGML's Q8_0, Q4_0 and Q4_1 blocks are these formats in another byte order, so they convert without loss.
fp8: value = scale * quant, with one float32 scale a row; quant is e4m3 as the OCP 8-bit floating point specification has it
(largest value 448, no infinities).

Everything works on row ranges: `convert` answers for any rows of a tensor, and rows never influence each other, so a
matrix of any size passes through in pieces. All results depend on the values alone: one fixed sequence of float32
operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.encodings import nibbles
from ignition.checkpoint.tensors import LazyTensor

GROUP = 32
FP8_LARGEST = 448.0
_LOSSLESS = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "q8", "q4_0": "q4", "q4_1": "q4"}
_CHUNK = 1 << 12  # groups quantised at a time: temporaries of 512 KiB stay in cache


@dataclass(frozen=True)
class Q8:
    """scale float16 [N, K/32], quant int8 [N, K]."""

    scale: np.ndarray
    quant: np.ndarray


@dataclass(frozen=True)
class Q4:
    """scale float16 [N, K/32], minimum float16 [N, K/32], quant uint8 0..15 [N, K]."""

    scale: np.ndarray
    minimum: np.ndarray
    quant: np.ndarray


@dataclass(frozen=True)
class Fp8:
    """scale float32 [N], quant uint8 [N, K]: the bits of e4m3."""

    scale: np.ndarray
    quant: np.ndarray


# float32 [N, K] for f32, float16 for f16, uint16 (the upper half of a float32) for bf16
Weights = Q8 | Q4 | Fp8 | np.ndarray


def natural_format(encoding: str) -> str:
    """The format that holds a stored encoding best: without loss where there is one, else q8."""
    return _LOSSLESS.get(encoding, "q8")


def is_lossless(encoding: str, format: str) -> bool:
    """Whether `convert` keeps every value exactly. float32 holds every encoding; its cost is memory."""
    return format == "f32" or _LOSSLESS.get(encoding) == format


def convert(tensor: LazyTensor, format: str, first: int = 0, last: int | None = None) -> Weights:
    """Rows [first, last) of a matrix [N, K] in a weight format; the lossless way wherever there is one.

    Raises InputError for values that the format cannot hold and for K that q8 and q4 cannot divide into groups.
    """
    last = tensor.rows if last is None else last
    if format in ("q8", "q4") and tensor.shape[-1] % GROUP:
        raise InputError(
            f"tensor {tensor.name}: rows of {tensor.shape[-1]} are not whole groups of {GROUP}; use "
            "--weights bf16 or f32"
        )
    if _LOSSLESS.get(tensor.encoding) == format:
        raw = np.frombuffer(tensor.raw(first, last), np.uint8)
        shape = (last - first, *tensor.shape[1:])
        if format in ("q8", "q4"):
            return from_blocks(raw, tensor.encoding, last - first, tensor.shape[-1], tensor.name)
        return raw.view({"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[format]).reshape(shape)
    values = tensor.float32(first, last)
    return encode(values, format, tensor.name)


def encode(values: np.ndarray, format: str, name: str = "weights") -> Weights:
    """float32 [N, K] in a weight format, rounded to nearest. Raises InputError naming `name`."""
    if format == "q8":
        return quantize_q8(values, name)
    if format == "q4":
        return quantize_q4(values, name)
    if format == "fp8":
        return quantize_fp8(values, name)
    if format == "f32":
        return values
    if format == "f16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise InputError(f"tensor {name}: holds values that float16 cannot; use --weights bf16 or f32")
        return halves
    assert format == "bf16", format
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def decode(weights: Weights) -> np.ndarray:
    """float32 [N, K]: the values that a kernel computes with."""
    if isinstance(weights, Q8):
        return _spread(weights.scale) * weights.quant.astype(np.float32)
    if isinstance(weights, Q4):
        values = _spread(weights.scale) * weights.quant.astype(np.float32)
        values += _spread(weights.minimum)
        return values
    if isinstance(weights, Fp8):
        return _E4M3[weights.quant] * weights.scale[:, None]
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << 16).view(np.float32)
    return weights.astype(np.float32)


def _spread(scale: np.ndarray) -> np.ndarray:
    """One number of each group for each of its 32 values."""
    return np.repeat(scale.astype(np.float32), GROUP, axis=-1)


# ---- from GGML blocks, exactly


def from_blocks(raw: np.ndarray, encoding: str, rows: int, columns: int, name: str = "weights") -> Q8 | Q4:
    """uint8 blocks of [rows, columns] values in Q8_0, Q4_0 or Q4_1 as quants and scales.

    `decode` of the result gives ggml's values bit for bit.
    """
    groups = (rows, columns // GROUP)
    blocks = raw.reshape(rows * groups[1], -1)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).reshape(groups)
    if encoding == "q8_0":
        return Q8(scale, np.ascontiguousarray(blocks[:, 2:]).view(np.int8).reshape(rows, columns))
    if encoding == "q4_0":
        with np.errstate(over="ignore"):
            minimum = scale * np.float16(-8)  # a power of two: exact unless it overflows
        if not np.isfinite(minimum).all():
            raise InputError(f"tensor {name}: a Q4_0 scale is above 8188 or not finite; use --weights f32")
        return Q4(scale, minimum, nibbles(blocks[:, 2:]).reshape(rows, columns))
    assert encoding == "q4_1", encoding
    minimum = np.ascontiguousarray(blocks[:, 2:4]).view(np.float16).reshape(groups)
    return Q4(scale, minimum, nibbles(blocks[:, 4:]).reshape(rows, columns))


# ---- from float32


def quantize_q8(values: np.ndarray, name: str = "weights") -> Q8:
    """float32 [N, K] to q8: scale = absmax / 127 as float16, quants rounded to nearest even against that scale."""
    rows, columns = values.shape
    groups = values.reshape(-1, GROUP)
    scale = np.empty(len(groups), np.float16)
    quant = np.empty((len(groups), GROUP), np.int8)
    for start in range(0, len(groups), _CHUNK):
        part = groups[start : start + _CHUNK]
        largest = np.maximum(part.max(axis=1), -part.min(axis=1))
        scale[start : start + _CHUNK] = rounded = _half_scale(largest, 127, name)
        steps = part * _inverse(rounded)[:, None]
        np.rint(steps, out=steps)
        np.clip(steps, -127, 127, out=steps)
        quant[start : start + _CHUNK] = steps
    return Q8(scale.reshape(rows, -1), quant.reshape(rows, columns))


def quantize_fp8(values: np.ndarray, name: str = "weights") -> Fp8:
    """float32 [N, K] to fp8: scale = absmax / 448 of each row, quotients rounded to nearest even."""
    largest = np.maximum(values.max(axis=1), -values.min(axis=1))
    if not np.isfinite(largest).all():
        raise InputError(f"tensor {name}: holds values that are not finite; use --weights f32")
    scale = largest / np.float32(FP8_LARGEST)
    divisor = np.where(scale > 0, scale, np.float32(1))  # a row of zeros, or of less than any quotient can be told from
    return Fp8(scale, to_e4m3(values / divisor[:, None]))


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of e4m3 (uint8), rounded to nearest, ties to even; beyond 448 becomes 448. No NaN."""
    size = np.minimum(np.abs(values), np.float32(FP8_LARGEST))
    exponent = np.maximum(np.frexp(np.where(size > 0, size, np.float32(2.0**-9)))[1] - 1, -6)  # of the leading 1, or -6
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int32)  # of 2 ** (exponent - 3); 16 carries by itself
    bits = 8 * (exponent + 7) + steps - 8
    return (bits | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def _e4m3_values() -> np.ndarray:
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + fraction, exponent - 10), np.ldexp(1.0 * fraction, -9))
    size[exponent * 8 + fraction == 127] = np.nan
    return np.where(bits & 0x80, -size, size).astype(np.float32)


_E4M3 = _e4m3_values()


# Ranges tried for each group: the parts of [minimum, maximum] cut off below and above. Cutting a little clips one
# value by less than a step and makes the steps of the other 31 finer; on normally distributed weights this takes 15%
# off the squared error.
_RANGES = ((0.0, 0.0), (0.02, 0.0), (0.0, 0.02), (0.04, 0.0), (0.0, 0.04))


def quantize_q4(values: np.ndarray, name: str = "weights") -> Q4:
    """float32 [N, K] to q4: of a few ranges for each group the one with least squared error, the first of equals."""
    rows, columns = values.shape
    groups = values.reshape(-1, GROUP)
    scale = np.empty(len(groups), np.float16)
    minimum = np.empty(len(groups), np.float16)
    quant = np.empty((len(groups), GROUP), np.uint8)
    for start in range(0, len(groups), _CHUNK):
        part = slice(start, start + _CHUNK)
        scale[part], minimum[part] = _best_range(groups[part], name)
        quant[part] = _steps(groups[part], scale[part], minimum[part])[1]
    return Q4(scale.reshape(rows, -1), minimum.reshape(rows, -1), quant.reshape(rows, columns))


def _best_range(groups: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """float16 scale and minimum [n] for float32 [n, 32]."""
    low, high = groups.min(axis=1), groups.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        width = high - low
    if not np.isfinite(width).all():
        raise _no_scale(name)
    best_scale, best_minimum = np.zeros(len(groups), np.float16), np.zeros(len(groups), np.float16)
    least = np.full(len(groups), np.inf, np.float32)
    for below, above in _RANGES:
        minimum = _half(low + np.float32(below) * width, name)
        top = high - np.float32(above) * width
        scale = _half_scale(np.maximum(top - minimum.astype(np.float32), 0), 15, name)
        steps, nearest = _steps(groups, scale, minimum)
        steps -= nearest
        error = np.einsum("ij,ij->i", steps, steps) * np.square(scale.astype(np.float32))
        better = error < least
        best_scale[better], best_minimum[better], least[better] = scale[better], minimum[better], error[better]
    return best_scale, best_minimum


def _steps(groups: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value's exact place on its group's scale, and the nearest of the sixteen steps; both float32 [n, 32]."""
    steps = groups - minimum.astype(np.float32)[:, None]
    steps *= _inverse(scale)[:, None]
    nearest = np.rint(steps)
    np.clip(nearest, 0, 15, out=nearest)
    return steps, nearest


def _half(values: np.ndarray, name: str) -> np.ndarray:
    """float16, nearest even. Raises InputError for what is not finite there."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise _no_scale(name)
    return halves


def _no_scale(name: str) -> InputError:
    return InputError(
        f"tensor {name}: holds values that are not finite or too large for a float16 scale; use --weights f32"
    )


def _half_scale(extent: np.ndarray, steps: int, name: str) -> np.ndarray:
    """extent / steps as float16, one unit higher where rounding would leave the extent more than half a step outside.

    That happens only among subnormal scales, whose steps are coarse.
    """
    halves = _half(extent / np.float32(steps), name)
    short = extent > halves.astype(np.float32) * np.float32(steps + 0.5)
    if short.any():
        halves[short] = np.nextafter(halves[short], np.float16(np.inf))
    return halves


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32, 0 for 0."""
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
