"""Every cpu kernel against float64, and bit for bit against itself: alone, batched, split, paged anew, v3 and v4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.packing_reference import (
    activation_row_bytes,
    from_bf16,
    pack_activations,
    pack_float,
    pack_q4,
    pack_q8,
    to_bf16,
    unpack_activations,
)
from tests.targets.cpu.kernel_harness import Library, Tokens, available_levels, build

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


# Cases.


def embed(fmt: str, d: int) -> Case:
    packed, value, _ = weights(fmt, VOCABULARY, d)
    tokens = ragged(RUNS)
    want = value[tokens.token].astype(np.float32)  # one rounding: exact

    def check(got: np.ndarray) -> None:
        assert (got == want).all()

    out = np.zeros((len(tokens.token), d), np.float32)
    return Case(f"Embed<{fmt}, {VOCABULARY}, {d}>", tokens, [Shared(packed), PerRow(out)], 1, check)


def angles(d2: int, scale: float, output: int) -> Case:
    tokens = ragged(RUNS)
    tokens.position = np.random.default_rng(5).integers(0, 1 << 20, len(tokens.position)).astype(np.int32)
    tokens.position[:3] = [0, 1, (1 << 20) - 1]
    frequency = (1e4 ** (-np.arange(d2) / d2)).astype(np.float32)
    angle = (tokens.position.astype(np.float32)[:, None] * frequency).astype(np.float64)
    want = (np.cos(angle), np.sin(angle))[output - 1]
    # Half a unit in the last place for the function and for its product with the scale, and a hundredth for the series.
    ulp, scaled_ulp = (np.spacing(np.abs(x).astype(np.float32)).astype(np.float64) for x in (want, want * scale))
    both = [PerRow(np.zeros((len(angle), d2), np.float32)) for _ in range(2)]
    name = f"RopeAngles<{d2}, {scale.hex()}f>"
    check = check_float(want * scale, 0.51 * ulp * scale + (0.5 * scaled_ulp if scale != 1 else 0))
    return Case(name, tokens, [Shared(frequency), *both], output, check)


def norm(count: str, d: int, out: str) -> Case:
    tokens = ragged(RUNS)
    rows = tokens.row if count == "Rows" else np.arange(len(tokens.token))
    x, weight = normal(len(tokens.token), d) * np.float32(3), normal(d)
    x[2] = 0
    picked = x[rows].astype(np.float64)
    want = picked / np.sqrt((picked**2).mean(axis=1, keepdims=True) + EPS) * weight
    relative = (d / 16 / 4 + 12) * EPSILON  # half of the sum's own error (it is under a root), and five roundings
    name = f"Norm<{count}, {d}, {NORM_EPS}, {out}>"
    source = Shared(x) if count == "Rows" else PerRow(x)
    if out == "ToQuant":
        output = np.zeros((len(rows), activation_row_bytes(d)), np.uint8)
        check = check_quantised(want, relative)
    else:
        output = np.zeros((len(rows), d), np.float32)
        check = check_float(want, np.abs(want) * relative)
    return Case(name, tokens, [source, Shared(weight), PerRow(output)], 2, check, rows=count == "Rows")


def quantize(d: int) -> Case:
    tokens = ragged(RUNS)
    x = normal(len(tokens.token), d)
    x[0, :32] = 0
    x[1, :32] = 1e-42  # its reciprocal overflows: taken for zero
    want = x.astype(np.float64)
    want[1, :32] = 0
    out = np.zeros((len(x), activation_row_bytes(d)), np.uint8)
    return Case(f"Quantize<Tokens, {d}>", tokens, [PerRow(x), PerRow(out)], 1, check_quantised(want, 0))


def linear(count: str, fmt: str, k: int, n: int, bias: bool, add: bool) -> Case:
    tokens = ragged(RUNS)
    length = len(tokens.row if count == "Rows" else tokens.token)
    packed, value, magnitude = weights(fmt, n, k)
    x, real = activations(fmt, length, k)
    want, tolerance = product(real, value, magnitude, terms(fmt, k))
    b, residual = normal(n), normal(length, n)
    want = want + b * bias + residual * add
    tolerance = tolerance + 4 * EPSILON * (np.abs(want) + np.abs(b) + np.abs(residual))
    out = np.zeros((length, n), np.float32)
    flags = f"{str(bias).lower()}, {str(add).lower()}"
    operands = [PerRow(x), Shared(packed), Shared(b if bias else None), PerRow(residual), PerRow(out)]
    return Case(f"Linear<{count}, {fmt}, {k}, {n}, {flags}>", tokens, operands, 4, check_float(want, tolerance),
                rows=count == "Rows")


def gate_up(gate: str, up: str, k: int, n: int, out: str) -> Case:
    tokens = ragged(RUNS)
    count = len(tokens.token)
    x, real = activations(gate, count, k)
    (w_gate, g, g_size), (w_up, u, u_size) = weights(gate, n, k, seed=6), weights(up, n, k, seed=7)
    g, g_error = product(real, g, g_size, terms(gate, k))
    u, u_error = product(real, u, u_size, terms(up, k))
    want = silu(g) * u
    # |silu'| <= 1.1; the exponential and four roundings add a few units in the last place.
    tolerance = 1.1 * g_error * (np.abs(u) + u_error) + np.abs(silu(g)) * u_error + 12 * EPSILON * np.abs(want)
    if out == "ToQuant":
        output = np.zeros((count, activation_row_bytes(n)), np.uint8)
        largest = np.abs(want).reshape(count, -1, 32).max(axis=2, keepdims=True)
        check = check_quantised(want, float((tolerance.reshape(count, -1, 32) / largest).max()))
    else:
        output = np.zeros((count, n), np.float32)
        check = check_float(want, tolerance)
    name = f"GateUp<{gate}, {up}, {k}, {n}, {out}>"
    return Case(name, tokens, [PerRow(x), Shared(w_gate), Shared(w_up), PerRow(output)], 3, check)


def rotated(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """x [T, H, DH]; cosine and sine [T, DH/2]."""
    a, b = np.split(x, 2, axis=2)
    c, s = cosine[:, None], sine[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=2)


def head_normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight


KIND = {"F16": np.float16, "F32": np.float32}


def page_layout(kv: str, heads: int, dh: int, page_tokens: int) -> tuple[int, int, int]:
    """Offsets of K and V in a page with something before, between and behind them, and the page's bytes."""
    region = heads * page_tokens * dh * KIND[kv]().itemsize
    region = (region + 63) // 64 * 64
    return 64, 128 + region, 192 + 2 * region


def keys_of(page: np.ndarray, offset: int, kv: str, heads: int, dh: int, page_tokens: int) -> np.ndarray:
    """K of one page as a view [KH, PT/16, DH, 16]."""
    kind = KIND[kv]
    return page[offset : offset + heads * page_tokens * dh * kind().itemsize].view(kind).reshape(heads, -1, dh, 16)


def values_of(page: np.ndarray, offset: int, kv: str, heads: int, dh: int, page_tokens: int) -> np.ndarray:
    """V of one page as a view [KH, PT, DH]."""
    kind = KIND[kv]
    return page[offset : offset + heads * page_tokens * dh * kind().itemsize].view(kind).reshape(heads, -1, dh)


def check_pages(tokens: Tokens, kv: str, heads: int, dh: int, page_tokens: int, want: dict[str, np.ndarray],
                offsets: dict[str, int], tolerance: np.ndarray | float) -> Check:
    """`want["K"]` and `want["V"]` [T, KH, DH] lie at their tokens' positions, and nothing else was written."""
    storage = 2.0**-11 if kv == "F16" else 0.0  # the half ulp of storing f16; below 2^-14 it is absolute
    shape = (kv, heads, dh, page_tokens)

    def rows(pages: np.ndarray, part: str, t: int) -> np.ndarray:
        """A view of token t's key or value [KH, DH]."""
        page = pages[tokens.page_table[tokens.slot[t], tokens.position[t] // page_tokens]]
        inside = tokens.position[t] % page_tokens
        if part == "K":
            return keys_of(page, offsets[part], *shape)[:, inside // 16, :, inside % 16]
        return values_of(page, offsets[part], *shape)[:, inside]

    def check(got: np.ndarray) -> None:
        rest = got.copy()
        for t in range(len(tokens.token)):
            for part, values in want.items():
                limit = tolerance if np.isscalar(tolerance) else tolerance[t]
                close(rows(got, part, t), values[t], limit + np.abs(values[t]) * storage + 2.0**-25 * (storage > 0))
                untouched = np.full(1, 0xFFFFFFFF, np.uint32).view(KIND[kv])[0]
                rows(rest, part, t)[:] = untouched
        assert (rest == 0xFF).all(), "bytes outside the tokens' positions were written"

    return check


def heads(fmt: str, k: int, h: int, dh: int, bias: bool, normed: bool, rope: bool, dest: str, kv: str, pt: int) -> Case:
    key, value, page_bytes = page_layout(kv, h, dh, pt)
    tokens = ragged(RUNS, pt, page_bytes)
    count = len(tokens.token)
    packed, w, magnitude = weights(fmt, h * dh, k)
    x, real = activations(fmt, count, k)
    y, error = product(real, w, magnitude, terms(fmt, k))
    b, weight = normal(h * dh), normal(dh, seed=8)
    cosine, sine = np.cos(normal(count, dh // 2)), np.sin(normal(count, dh // 2))
    y = (y + b * bias).reshape(count, h, dh)
    error = error.reshape(count, h, dh).max(axis=2, keepdims=True) + 4 * EPSILON * np.abs(y).max(axis=2, keepdims=True)
    if normed:
        # The error of every element moves the root too: twice the error relative to the root.
        root = np.sqrt((y**2).mean(axis=2, keepdims=True) + EPS)
        y = head_normed(y, weight)
        error = np.abs(weight).max() * (error / root) * 4 + 16 * EPSILON * np.abs(y).max(axis=2, keepdims=True)
    if rope:
        y = rotated(y, cosine.astype(np.float64), sine.astype(np.float64))
        error = 2 * error + 4 * EPSILON * np.abs(y).max(axis=2, keepdims=True)
    error = np.broadcast_to(error, y.shape)
    name = (f"Heads<{fmt}, {k}, {h}, {dh}, {str(bias).lower()}, {NORM_EPS if normed else '-1.0f'}, "
            f"{str(rope).lower()}, {dest}, {kv}, {pt}>")
    operands = [PerRow(x), Shared(packed), Shared(b if bias else None), Shared(weight), PerRow(cosine), PerRow(sine)]
    if dest == "Query":
        out = np.zeros((count, h * dh), np.float32)
        check = check_float(y.reshape(count, -1), error.reshape(count, -1))
        return Case(name, tokens, [*operands, PerRow(out)], 6, check)
    part = dest[0]
    at = {"K": key, "V": value}[part]
    check = check_pages(tokens, kv, h, dh, pt, {part: y}, {part: at}, error)
    return Case(name, tokens, [*operands, Offset(at)], None, check)


def attention(h: int, kh: int, dh: int, kv: str, pt: int, window: int, out: str,
              runs: list[tuple[int, int, int]] = RUNS, order: int = 1) -> Case:
    key, value, page_bytes = page_layout(kv, kh, dh, pt)
    tokens = ragged(runs, pt, page_bytes, seed=order)
    count = len(tokens.token)
    scale = 0.15625
    q = normal(count, h * dh) * np.float32(2)
    want = np.zeros((count, h, dh))
    bound = np.zeros((count, h, 1))
    for slot, first, length in runs:
        total = first + length
        k, v = (normal(total, kh, dh, seed=seed + slot).astype(KIND[kv]) for seed in (10, 20))
        for p in range(total):
            page, inside = tokens.kv[tokens.page_table[slot, p // pt]], p % pt
            keys_of(page, key, kv, kh, dh, pt)[:, inside // 16, :, inside % 16] = k[p]
            values_of(page, value, kv, kh, dh, pt)[:, inside] = v[p]
        for t in np.flatnonzero(tokens.slot == slot):
            p = tokens.position[t]
            seen = slice(max(0, p - window + 1) if window else 0, p + 1)
            for head in range(h):
                keys = k[seen, head // (h // kh)].astype(np.float64)
                values = v[seen, head // (h // kh)].astype(np.float64)
                one = q[t, head * dh : (head + 1) * dh].astype(np.float64)
                scores = scale * (keys @ one)
                weight = np.exp(scores - scores.max())
                want[t, head] = weight / weight.sum() @ values
                # A score's error is a weight's relative error, twice (numerator and sum); additions round besides.
                score = scale * (dh + 4) * EPSILON * (np.abs(keys) @ np.abs(one)).max()
                bound[t, head] = (2 * score + (len(keys) + 16) * EPSILON) * np.abs(values).max()
    want, tolerance = want.reshape(count, -1), np.broadcast_to(bound, want.shape).reshape(count, -1)
    name = f"Attention<{h}, {kh}, {dh}, {kv}, {pt}, {scale.hex()}f, {window}, {out}>"
    if out == "ToQuant":
        output = np.zeros((count, activation_row_bytes(h * dh)), np.uint8)
        largest = np.abs(want).reshape(count, -1, 32).max(axis=2, keepdims=True)
        check = check_quantised(want, float((tolerance.reshape(count, -1, 32) / largest).max()))
    else:
        output = np.zeros((count, h * dh), np.float32)
        check = check_float(want, tolerance)
    return Case(name, tokens, [PerRow(q), Offset(key), Offset(value), PerRow(output)], 3, check)


def elementwise(name: str, arity: int, n: int, want: Callable[..., np.ndarray], ulps: int) -> Case:
    tokens = ragged(RUNS)
    count = len(tokens.token)
    inputs = [normal(count, n, seed=30 + i) * np.float32(4) for i in range(arity)]
    result = want(*(x.astype(np.float64) for x in inputs))
    size = sum(np.abs(x) for x in inputs) if name.startswith("Add") else np.abs(result)
    return Case(name, tokens, [*map(PerRow, inputs), PerRow(np.zeros((count, n), np.float32))], arity,
                check_float(result, ulps * EPSILON * size))


def rope(h: int, dh: int) -> Case:
    tokens = ragged(RUNS)
    count = len(tokens.token)
    x, cosine, sine = normal(count, h, dh), np.cos(normal(count, dh // 2)), np.sin(normal(count, dh // 2))
    want = rotated(*(a.astype(np.float64) for a in (x, cosine, sine)))
    tolerance = 4 * EPSILON * np.abs(x).max()
    operands = [*map(PerRow, (x, cosine, sine)), PerRow(np.zeros_like(x))]
    return Case(f"Rope<{h}, {dh}>", tokens, operands, 3, check_float(want, tolerance))


def head_norm(h: int, dh: int) -> Case:
    tokens = ragged(RUNS)
    x, weight = normal(len(tokens.token), h, dh), normal(dh)
    want = head_normed(x.astype(np.float64), weight)
    operands = [PerRow(x), Shared(weight), PerRow(np.zeros_like(x))]
    return Case(f"HeadNorm<{h}, {dh}, {NORM_EPS}>", tokens, operands, 2,
                check_float(want, np.abs(want) * 16 * EPSILON))


def kv_write(kh: int, dh: int, kv: str, pt: int) -> Case:
    key, value, page_bytes = page_layout(kv, kh, dh, pt)
    tokens = ragged(RUNS, pt, page_bytes)
    count = len(tokens.token)
    k, v = normal(count, kh, dh, seed=40), normal(count, kh, dh, seed=41)
    if kv == "F16":  # subnormals, the largest, the smallest and a tie of f16
        k[0, 0, :6] = [3e-6, -2e-5, 65504, 6e-8, 1 + 2**-11, -0.0]
    want = {"K": k.astype(np.float64), "V": v.astype(np.float64)}
    check = check_pages(tokens, kv, kh, dh, pt, want, {"K": key, "V": value}, 0.0)
    return Case(f"KvWrite<{kh}, {dh}, {kv}, {pt}>", tokens, [PerRow(k), PerRow(v), Offset(key), Offset(value)], None,
                check)


def take_rows(d: int) -> Case:
    tokens = ragged(RUNS)
    x = normal(len(tokens.token), d)
    out = np.zeros((len(tokens.row), d), np.float32)
    return Case(f"TakeRows<{d}>", tokens, [Shared(x), PerRow(out)], 1, check_float(x[tokens.row], 0.0), rows=True)


LONG = [(1, 0, 1), (3, 7, 280), (0, 200, 19)]  # enough tokens for the largest tiles

CASES = [
    *(embed(fmt, d) for fmt, d in [("F32", 72), ("F16", 72), ("BF16", 72), ("Q8", 96), ("Q4", 96)]),
    *(angles(20, scale, output) for scale in (1.0, 1.25) for output in (1, 2)),
    norm("Tokens", 70, "ToFloat"),
    norm("Tokens", 160, "ToQuant"),
    norm("Rows", 70, "ToFloat"),
    norm("Rows", 96, "ToQuant"),
    quantize(96),
    linear("Tokens", "Q8", 96, 100, True, True),
    linear("Tokens", "Q4", 160, 64, False, False),
    linear("Tokens", "Q4", 96, 40, False, True),
    linear("Rows", "Q8", 160, 50, False, False),
    linear("Tokens", "F32", 70, 100, True, True),
    linear("Tokens", "F16", 70, 60, False, True),
    linear("Tokens", "BF16", 71, 50, True, False),
    linear("Rows", "BF16", 70, 64, False, False),
    gate_up("Q4", "Q4", 96, 96, "ToQuant"),
    gate_up("Q8", "Q4", 96, 64, "ToQuant"),
    gate_up("Q4", "Q4", 96, 40, "ToFloat"),
    gate_up("F32", "F32", 70, 100, "ToFloat"),
    gate_up("BF16", "F16", 70, 40, "ToFloat"),
    heads("Q4", 96, 3, 32, False, False, True, "Query", "F16", 32),
    heads("Q8", 96, 2, 64, True, True, True, "Key", "F16", 32),
    heads("Q4", 96, 2, 32, False, False, False, "Value", "F16", 16),
    heads("BF16", 70, 3, 24, True, True, True, "Query", "F32", 16),
    heads("F32", 70, 3, 24, False, True, True, "Key", "F32", 48),
    heads("F16", 70, 3, 24, True, False, False, "Value", "F16", 16),
    attention(6, 2, 32, "F16", 16, 0, "ToQuant"),
    attention(6, 2, 32, "F16", 16, 0, "ToQuant", LONG),
    attention(4, 2, 24, "F32", 48, 0, "ToFloat"),
    attention(4, 2, 24, "F16", 32, 20, "ToFloat"),
    attention(4, 2, 24, "F16", 32, 20, "ToFloat", LONG),
    attention(2, 2, 96, "F16", 64, 0, "ToFloat", LONG),
    elementwise("SiluMul<100>", 2, 100, lambda g, u: silu(g) * u, 12),
    elementwise("Add<100>", 2, 100, np.add, 1),
    rope(3, 24),
    rope(2, 64),
    head_norm(3, 24),
    kv_write(2, 24, "F16", 32),
    kv_write(2, 24, "F32", 16),
    take_rows(70),
]


def case_name(case: Case) -> str:
    suffix = f"-{case.output}" if case.kernel.startswith("RopeAngles") else ""
    return f"{case.kernel.replace(' ', '')}-{len(case.tokens.token)}{suffix}"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    return build(list(dict.fromkeys(case.kernel for case in CASES)), tmp_path_factory.mktemp("kernels"))


each_level = pytest.mark.parametrize("level", LEVELS)
each_case = pytest.mark.parametrize("case", CASES, ids=case_name)


@each_level
@each_case
def test_agrees_with_float64(libraries: dict[str, Library], case: Case, level: str) -> None:
    case.check(case.run(libraries[level]))


@each_level
@each_case
def test_bits_do_not_depend_on_what_is_computed_together(libraries: dict[str, Library], case: Case, level: str) -> None:
    library = libraries[level]
    together = case.run(library)
    units = library.units(case.kernel, case.tokens)
    one_by_one = [(u, u + 1) for u in range(units)]
    third = max(1, units // 3)
    thirds = [(u, min(u + third, units)) for u in range(0, units, third)]
    for claims in (one_by_one, one_by_one[::-1], thirds[::-1]):
        assert case.run(library, claims).tobytes() == together.tobytes()
    assert case.run_alone(library).tobytes() == together.tobytes()


@each_case
def test_v3_and_v4_give_the_same_bits(libraries: dict[str, Library], case: Case) -> None:
    results = {case.run(library).tobytes() for level, library in libraries.items() if level != "generic"}
    assert len(results) <= 1


@each_case
def test_needs_are_the_sizes_of_the_operands(libraries: dict[str, Library], case: Case) -> None:
    """Every kernel states each argument's bytes: no fewer, or a core could lie; no more, or a good core is refused."""
    tokens, args = case.fresh()
    page_bytes = {o.bytes: 0 for o in case.operands if isinstance(o, Offset)}
    if page_bytes:
        name, inside = case.kernel.rstrip(">").split("<")
        p = [part.strip() for part in inside.split(",")]
        at = {"Attention": (1, 2, 3, 4), "KvWrite": (0, 1, 2, 3), "Heads": (2, 3, 8, 9)}[name]
        kh, dh, kv, pt = (p[i] for i in at)
        page_bytes = dict.fromkeys(page_bytes, int(kh) * int(dh) * int(pt) * KIND[kv]().itemsize)
    for library in libraries.values():
        needs = library.needs(case.kernel, len(tokens.token), len(tokens.row))
        written = set()
        for i, ((use, size), operand, arg) in enumerate(zip(needs, case.operands, args, strict=True)):
            if use == "unused":
                assert case.kernel.startswith(("Heads", "Linear")) and size == 0
                continue
            want = page_bytes[operand.bytes] if isinstance(operand, Offset) else arg.nbytes
            assert (size, use == "in_pages") == (want, isinstance(operand, Offset)), (i, use, size, want)
            written |= {i} if use == "writes" else set()
        outputs = {1, 2} if case.kernel.startswith("RopeAngles") else {case.output} - {None}
        assert written == outputs


POISONS = [np.nan, np.inf, -np.inf]


def poisoned(case: Case, operand: int, t: int, change: Callable[[np.ndarray], None]) -> Case:
    """The case with token t's row of an operand changed; nobody checks its values."""
    operands = list(case.operands)
    array = operands[operand].array.copy()
    change(array[t].reshape(-1))
    operands[operand] = PerRow(array)
    return Case(case.kernel, case.tokens, operands, case.output, lambda got: None, case.rows)


def outputs_of(case: Case, got: np.ndarray) -> np.ndarray:
    """What rows hold, [count, N], as its readers see it: the scale and sum of a quantised group stand for the group."""
    if got.dtype != np.uint8:
        return got.reshape(len(got), -1)
    family, _, inside = case.kernel.rstrip(">").partition("<")
    parts = inside.split(",")
    width = int(parts[0]) * int(parts[2]) if family == "Attention" else int(parts[3 if family == "GateUp" else 1])
    q, scale, sums, correction = unpack_activations(got, width)
    unknown = np.isnan(scale)
    assert (np.isnan(sums) == unknown).all() and (correction[unknown] == 0).all()
    assert (q.reshape(*scale.shape, 32)[unknown] == 0).all()
    return np.repeat(scale, 32, axis=1)


@each_level
@pytest.mark.parametrize("poison", POISONS)
def test_what_is_not_finite_makes_its_group_nan_when_quantised(
    libraries: dict[str, Library], level: str, poison: float
) -> None:
    clean = quantize(96)
    for element in (32, 47, 48, 63):
        case = poisoned(clean, 0, 5, lambda row, element=element: row.__setitem__(element, poison))
        found = outputs_of(case, case.run(libraries[level]))
        want = outputs_of(clean, clean.run(libraries[level])).copy()
        want[5, 32:64] = np.nan
        assert np.array_equal(found, want, equal_nan=True)


# Kernels whose outputs a row's values enter, but for norms of other tokens' rows.
REACHED = [
    case
    for case in CASES
    if case.kernel.split("<")[0] in ("Linear", "GateUp", "Attention", "Norm", "SiluMul")
    and isinstance(case.operands[0], PerRow)
]


@each_level
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("case", REACHED, ids=case_name)
def test_a_token_with_nan_or_infinity_ends_in_nan_and_harms_no_other(
    libraries: dict[str, Library], case: Case, level: str, poison: float
) -> None:
    """Every output that the value enters is NaN or infinite, in that row only, down to its head."""
    t, quantised = 2, case.operands[0].array.dtype == np.uint8

    def spoil(row: np.ndarray) -> None:
        if quantised:  # a group as put() writes it
            k = int(case.kernel.split(",")[2])
            row[32:64] = 0
            row[k:].view(np.float32)[[1, k // 32 + 1]] = np.nan
            row[k:].view(np.int32)[2 * (k // 32) + 1] = 0
        else:
            row[1] = poison

    bad = poisoned(case, 0, t, spoil)
    clean, found = (outputs_of(c, c.run(libraries[level])) for c in (case, bad))
    others = np.arange(len(clean)) != t
    assert np.array_equal(found[others], clean[others], equal_nan=True)
    family, _, inside = case.kernel.partition("<")
    if family == "Attention":
        head = int(inside.split(",")[2])
        reached = found[t, :head]
        rest, rest_clean = found[t, head:], clean[t, head:]
        assert np.array_equal(rest, rest_clean)
    elif family in ("SiluMul", "Norm"):
        reached = found[t, 1:2]
    else:
        reached = found[t]
    if family == "Attention" and poison == -np.inf:
        return  # a weight of nothing beside others is a number
    assert not np.isfinite(reached).any(), reached


ATTENTIONS = [case for case in CASES if case.kernel.startswith("Attention")]


@each_level
@pytest.mark.parametrize("case", ATTENTIONS, ids=case_name)
def test_attention_reads_nothing_beyond_a_token_position(
    libraries: dict[str, Library], case: Case, level: str
) -> None:
    """Prefill reads pages that hold later tokens, decode pages that hold leftovers: the bits are the same."""
    library, tokens = libraries[level], case.tokens
    prefill = case.run(library)
    h, kh, dh, kv, pt = (part.strip() for part in case.kernel.split("<")[1].split(",")[:5])
    shape = (kv, int(kh), int(dh), int(pt))
    key, value = case.operands[1].bytes, case.operands[2].bytes
    for t in range(0, len(tokens.token), 1 if len(tokens.token) < 64 else 23):
        pages = tokens.kv.copy()
        for p in range(tokens.position[t] + 1, tokens.page_table.shape[1] * int(pt)):
            page, inside = pages[tokens.page_table[tokens.slot[t], p // int(pt)]], p % int(pt)
            keys_of(page, key, *shape)[:, inside // 16, :, inside % 16] = np.nan if p % 2 else np.inf
            values_of(page, value, *shape)[:, inside] = np.nan if p % 2 else -np.inf
        step = Tokens(**{**vars(tokens.alone(t)), "kv": pages})
        out = case.fresh()[1][3][t]
        library.run(case.kernel, step, [case.operands[0].array[t], key, value, out])
        assert out.tobytes() == prefill[t].tobytes(), f"token {t} at position {tokens.position[t]}"


@each_level
def test_attention_does_not_depend_on_the_order_of_pages(libraries: dict[str, Library], level: str) -> None:
    first, second = (attention(6, 2, 32, "F16", 16, 0, "ToQuant", order=order) for order in (1, 2))
    assert (first.tokens.page_table != second.tokens.page_table).any()
    assert first.run(libraries[level]).tobytes() == second.run(libraries[level]).tobytes()
