"""What a kernel test is made of: operands, a case that runs a kernel on them, random data, and checks of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.packing_reference import (
    from_bf16,
    pack_activations,
    pack_float,
    pack_q4,
    pack_q8,
    to_bf16,
    unpack_activations,
)
from tests.targets.cpu.kernel_harness import Library, Tokens, available_levels

EPSILON = 2.0**-24  # half a unit in the last place of f32, relative
EPS = 2.0**-17  # the norms' eps; a power of two is exact in the template argument
NORM_EPS = "0x1p-17f"
LEVELS = available_levels()
Check = Callable[[np.ndarray], None]


# Operands of a kernel call.


@dataclass
class PerRow:
    """An input or output with one row for every token (or wanted row) that the kernel counts."""

    array: np.ndarray


@dataclass
class Shared:
    """An input that all tokens share: weights, or all activations where the kernel picks rows itself."""

    array: np.ndarray | None


@dataclass
class Offset:
    """An offset inside each page."""

    bytes: int


@dataclass
class Case:
    """One kernel with its operands; `check` compares what it wrote (the output, or the pages) with the reference."""

    kernel: str
    tokens: Tokens
    operands: list[Any]
    output: int | None  # index of the output operand; None: the pages
    check: Check
    rows: bool = False  # counts wanted rows instead of tokens

    def run(self, library: Library, claims: list[tuple[int, int]] | None = None) -> np.ndarray:
        """The output after one call over all tokens."""
        tokens, args = self.fresh()
        library.run(self.kernel, tokens, args, claims)
        return self._result(tokens, args)

    def run_alone(self, library: Library) -> np.ndarray:
        """The output after one call for each token (or wanted row)."""
        tokens, args = self.fresh()
        for i in range(len(tokens.row if self.rows else tokens.token)):
            step = tokens.only_row(i) if self.rows else tokens.alone(i)
            single = [a[i:] if isinstance(o, PerRow) else a for o, a in zip(self.operands, args, strict=True)]
            library.run(self.kernel, step, single)
        return self._result(tokens, args)

    def fresh(self) -> tuple[Tokens, list[Any]]:
        """Copies of what a call writes to, the output filled with a pattern."""
        tokens = Tokens(**{**vars(self.tokens), "kv": self.tokens.kv.copy()})
        args = [o.bytes if isinstance(o, Offset) else o.array for o in self.operands]
        if self.output is not None:
            args[self.output] = np.full_like(args[self.output], 0x55 if args[self.output].dtype == np.uint8 else -7)
        return tokens, args

    def _result(self, tokens: Tokens, args: list[Any]) -> np.ndarray:
        return tokens.kv if self.output is None else args[self.output]


# A step of 37 tokens in five slots: prefills and decodes, at borders of runs, pages and chunks.

RUNS = [(2, 5, 20), (0, 63, 1), (3, 0, 1), (1, 50, 14), (4, 64, 1)]  # slot, first position, tokens
SLOTS, CAPACITY, VOCABULARY = 5, 96, 50


def ragged(runs: list[tuple[int, int, int]], page_tokens: int = 16, page_bytes: int = 64, seed: int = 1) -> Tokens:
    """A step's tokens with shuffled pages, all bytes of which are 0xFF: NaN in f16 and f32."""
    random = np.random.default_rng(seed)
    capacity = max(CAPACITY, *(first + count for _, first, count in runs))
    stride = -(-capacity // page_tokens)
    position = np.concatenate([np.arange(first, first + count) for _, first, count in runs])
    slot = np.concatenate([np.full(count, slot) for slot, _, count in runs])
    return Tokens(
        token=random.integers(0, VOCABULARY, len(position)).astype(np.int32),
        position=position.astype(np.int32),
        slot=slot.astype(np.int32),
        row=np.array([0, len(position) - 1, 7, 7], np.int32),
        page_table=random.permutation(SLOTS * stride).reshape(SLOTS, stride).astype(np.int32),
        kv=np.full((SLOTS * stride, page_bytes), 0xFF, np.uint8),
        kv_page_bytes=page_bytes,
    )


# Weights: packed bytes, their values, and for each value the size of the terms that make it up.


def weights(fmt: str, n: int, k: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed bytes, values f64 [N, K], magnitudes f64 [N, K]."""
    random = np.random.default_rng([seed, n, k])
    if fmt == "Q8":
        q = random.integers(-128, 128, (n, k)).astype(np.int8)
        scale = random.uniform(0.5e-2, 2e-2, (n, k // 32)).astype(np.float16)
        value = q * np.repeat(scale.astype(np.float64), 32, axis=1)
        return pack_q8(q, scale), value, np.abs(value)
    if fmt == "Q4":
        nibbles = random.integers(0, 16, (n, k)).astype(np.uint8)
        scale = random.uniform(0.05, 0.2, (n, k // 32)).astype(np.float16)
        minimum = random.uniform(-1.5, 0.1, (n, k // 32)).astype(np.float16)
        product = nibbles * np.repeat(scale.astype(np.float64), 32, axis=1)
        least = np.repeat(minimum.astype(np.float64), 32, axis=1)
        return pack_q4(nibbles, scale, minimum), product + least, product + np.abs(least)
    weight = random.normal(size=(n, k)).astype(np.float32)
    if fmt == "BF16":
        bits = to_bf16(weight)
        packed, value = pack_float(bits), from_bf16(bits).astype(np.float64)
    else:
        stored = weight.astype(np.float16 if fmt == "F16" else np.float32)
        packed, value = pack_float(stored), stored.astype(np.float64)
    return packed, value, np.abs(value)


def activations(fmt: str, count: int, k: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """What a linear kernel of this weight format reads, [T, ...], and its values f64 [T, K]."""
    random = np.random.default_rng([seed, count, k])
    if fmt in ("Q8", "Q4"):
        q = random.integers(-127, 128, (count, k)).astype(np.int8)
        q[0, :32] = 127  # the largest sums, of both signs
        q[1, :32] = -127
        scale = random.uniform(0.5e-2, 2e-2, (count, k // 32)).astype(np.float32)
        return pack_activations(q, scale), q * np.repeat(scale.astype(np.float64), 32, axis=1)
    x = random.normal(size=(count, k)).astype(np.float32)
    return x, x.astype(np.float64)


def normal(*shape: int, seed: int = 4) -> np.ndarray:
    """f32 normal numbers."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def close(got: np.ndarray, want: np.ndarray, tolerance: np.ndarray | float) -> None:
    """Asserts |got - want| <= tolerance, elementwise; NaN fails."""
    error = np.abs(got.astype(np.float64) - want)
    worst = np.nanmax(error / np.maximum(tolerance, 1e-300))
    assert (error <= tolerance).all(), f"the error is {worst:.3g} times the tolerance"


def check_float(want: np.ndarray, tolerance: np.ndarray | float) -> Check:
    return lambda got: close(got, want, tolerance)


def check_quantised(want: np.ndarray, tolerance: float) -> Check:
    """Rows hold `want`, quantised; `tolerance` is the error of the numbers before quantisation, relative to absmax."""

    def check(got: np.ndarray) -> None:
        count, k = want.shape
        q, scale, sums, correction = unpack_activations(got, k)
        groups = want.reshape(count, -1, 32)
        absmax = np.abs(groups).max(axis=2)
        close(scale, absmax / 127, absmax / 127 * (tolerance + 4 * EPSILON) + 1e-38)
        with np.errstate(invalid="ignore", divide="ignore"):
            steps = np.where(absmax[:, :, None] > 0, groups * 127 / absmax[:, :, None], 0)
        close(q.reshape(groups.shape), steps, 0.5 + 127 * (2 * tolerance + 8 * EPSILON))
        total = q.reshape(groups.shape).sum(axis=2, dtype=np.int32)
        assert (correction == -128 * total).all()
        assert (sums == scale * total.astype(np.float32)).all()

    return check


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def product(x: np.ndarray, w: np.ndarray, magnitude: np.ndarray, terms: int) -> tuple[np.ndarray, np.ndarray]:
    """x w^T and a bound of its f32 error: each of `terms` additions and products rounds a partial sum once or twice."""
    return x @ w.T, (2 * terms + 8) * EPSILON * (np.abs(x) @ magnitude.T)


def terms(fmt: str, k: int) -> int:
    """Float additions along K: integer dots are exact, so quantised formats have two a group of 32."""
    return 2 * k // 32 if fmt in ("Q8", "Q4") else k


def rotated(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """x [T, H, DH]; cosine and sine [T, DH/2]."""
    a, b = np.split(x, 2, axis=2)
    c, s = cosine[:, None], sine[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=2)


def head_normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight
