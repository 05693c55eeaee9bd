"""Cases of the kernels that know no pages: embeddings, norms, linear layers, and the small ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.packing_reference import (
    activation_row_bytes,
)
from tests.targets.cpu.kernel_operands import (
    EPS,
    EPSILON,
    NORM_EPS,
    RUNS,
    VOCABULARY,
    Case,
    PerRow,
    Shared,
    activations,
    check_float,
    check_quantised,
    head_normed,
    normal,
    product,
    ragged,
    rotated,
    silu,
    terms,
    weights,
)


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
    return Case(
        f"Linear<{count}, {fmt}, {k}, {n}, {flags}>",
        tokens,
        operands,
        4,
        check_float(want, tolerance),
        rows=count == "Rows",
    )


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


def elementwise(name: str, arity: int, n: int, want: Callable[..., np.ndarray], ulps: int) -> Case:
    tokens = ragged(RUNS)
    count = len(tokens.token)
    inputs = [normal(count, n, seed=30 + i) * np.float32(4) for i in range(arity)]
    result = want(*(x.astype(np.float64) for x in inputs))
    size = sum(np.abs(x) for x in inputs) if name.startswith("Add") else np.abs(result)
    return Case(
        name,
        tokens,
        [*map(PerRow, inputs), PerRow(np.zeros((count, n), np.float32))],
        arity,
        check_float(result, ulps * EPSILON * size),
    )


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
    return Case(f"HeadNorm<{h}, {dh}, {NORM_EPS}>", tokens, operands, 2, check_float(want, np.abs(want) * 16 * EPSILON))


def take_rows(d: int) -> Case:
    tokens = ragged(RUNS)
    x = normal(len(tokens.token), d)
    out = np.zeros((len(tokens.row), d), np.float32)
    return Case(f"TakeRows<{d}>", tokens, [Shared(x), PerRow(out)], 1, check_float(x[tokens.row], 0.0), rows=True)
