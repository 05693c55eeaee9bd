"""Cases of the kernels that write to or read the pages of keys and values."""

from __future__ import annotations

import numpy as np

from tests.support.packing_reference import (
    activation_row_bytes,
)
from tests.targets.cpu.kernel_harness import Tokens
from tests.targets.cpu.kernel_operands import (
    EPS,
    EPSILON,
    NORM_EPS,
    RUNS,
    Case,
    Check,
    Offset,
    PerRow,
    Shared,
    activations,
    check_float,
    check_quantised,
    close,
    head_normed,
    normal,
    product,
    ragged,
    rotated,
    terms,
    weights,
)

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


def check_pages(
    tokens: Tokens,
    kv: str,
    heads: int,
    dh: int,
    page_tokens: int,
    want: dict[str, np.ndarray],
    offsets: dict[str, int],
    tolerance: np.ndarray | float,
) -> Check:
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
    name = (
        f"Heads<{fmt}, {k}, {h}, {dh}, {str(bias).lower()}, {NORM_EPS if normed else '-1.0f'}, "
        f"{str(rope).lower()}, {dest}, {kv}, {pt}>"
    )
    operands = [PerRow(x), Shared(packed), Shared(b if bias else None), Shared(weight), PerRow(cosine), PerRow(sine)]
    if dest == "Query":
        out = np.zeros((count, h * dh), np.float32)
        check = check_float(y.reshape(count, -1), error.reshape(count, -1))
        return Case(name, tokens, [*operands, PerRow(out)], 6, check)
    part = dest[0]
    at = {"K": key, "V": value}[part]
    check = check_pages(tokens, kv, h, dh, pt, {part: y}, {part: at}, error)
    return Case(name, tokens, [*operands, Offset(at)], None, check)


def attention(
    h: int,
    kh: int,
    dh: int,
    kv: str,
    pt: int,
    window: int,
    out: str,
    runs: list[tuple[int, int, int]] = RUNS,
    order: int = 1,
) -> Case:
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


def kv_write(kh: int, dh: int, kv: str, pt: int) -> Case:
    key, value, page_bytes = page_layout(kv, kh, dh, pt)
    tokens = ragged(RUNS, pt, page_bytes)
    count = len(tokens.token)
    k, v = normal(count, kh, dh, seed=40), normal(count, kh, dh, seed=41)
    if kv == "F16":  # subnormals, the largest, the smallest and a tie of f16
        k[0, 0, :6] = [3e-6, -2e-5, 65504, 6e-8, 1 + 2**-11, -0.0]
    want = {"K": k.astype(np.float64), "V": v.astype(np.float64)}
    check = check_pages(tokens, kv, kh, dh, pt, want, {"K": key, "V": value}, 0.0)
    return Case(
        f"KvWrite<{kh}, {dh}, {kv}, {pt}>", tokens, [PerRow(k), PerRow(v), Offset(key), Offset(value)], None, check
    )
