"""What becomes of the projections of attention: norms of heads, rotation, and their places: queries in a buffer, keys and
values in the pages."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ignition.targets.cuda.kernels.checks import (
    FLOATS,
    GRID_LIMIT,
    Size,
    power_of_two,
    require,
    require_element,
    require_size,
    require_sizes,
)
from ignition.targets.cuda.kernels.programmatic import begin
from ignition.targets.cuda.launch import Launch, Pointer


@triton.jit
def heads(
    q,
    k,
    v,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slots,
    page_table,
    out,
    k_pages,
    v_pages,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    K_START: tl.constexpr,
    V_START: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr = False,
):
    """One program: one head of one token. First come the query heads, then the key heads, then the value heads.

    q, k, v: rows of projections, STRIDE elements apart, the first element of a token's k and v at START of its row. q_norm,
    k_norm [HEAD_DIM] f32; cos, sin [T, HEAD_DIM / 2] f32. out [T, HEADS * HEAD_DIM].
    """
    begin(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    if head < HEADS:
        first, second = turned(q + token * Q_STRIDE + head * HEAD_DIM, q_norm, cos, sin, token, eps, HEAD_DIM, BLOCK)
        place_halves(out + (token * HEADS + head) * HEAD_DIM, first, second, HEAD_DIM // 2, HEAD_DIM, BLOCK)
    else:
        # Tokens that only fill up the bucket have position -1 and no place in the pages.
        kept = tl.where(position >= 0, HEAD_DIM // 2, 0)
        slot = tl.load(slots + token).to(tl.int64)
        page = tl.load(page_table + slot * TABLE_STRIDE + tl.maximum(position, 0) // PAGE_TOKENS).to(tl.int64)
        kv_head = (head - HEADS) % KV_HEADS
        place = page * PAGE_STRIDE + (kv_head * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM
        source = token * K_STRIDE + K_START + kv_head * HEAD_DIM
        if head < HEADS + KV_HEADS:
            first, second = turned(k + source, k_norm, cos, sin, token, eps, HEAD_DIM, BLOCK)
            place_halves(k_pages + place, first, second, kept, HEAD_DIM, BLOCK)
        else:
            source = token * V_STRIDE + V_START + kv_head * HEAD_DIM
            first, second = halves(v + source, HEAD_DIM, BLOCK)
            place_halves(v_pages + place, first, second, kept, HEAD_DIM, BLOCK)


@triton.jit
def halves(head, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The two halves of a head, f32 [BLOCK] each, zeros behind HEAD_DIM / 2."""
    element = tl.arange(0, BLOCK)
    inside = element < HEAD_DIM // 2
    first = tl.load(head + element, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head + HEAD_DIM // 2 + element, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def turned(head, weight, cos, sin, token, eps, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """A head's two halves after its norm and its rotation, where there are any: element i turns with element i + HEAD_DIM/2."""
    element = tl.arange(0, BLOCK)
    inside = element < HEAD_DIM // 2
    first, second = halves(head, HEAD_DIM, BLOCK)
    if weight is not None:
        mean_square = tl.div_rn(tl.sum(first * first + second * second, 0), HEAD_DIM * 1.0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
        first = first * inverse * tl.load(weight + element, mask=inside, other=0.0)
        second = second * inverse * tl.load(weight + HEAD_DIM // 2 + element, mask=inside, other=0.0)
    if cos is not None:
        angle = token * (HEAD_DIM // 2) + element
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    return first, second


@triton.jit
def place_halves(head, first, second, kept, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the first `kept` elements of both halves of a head, rounded."""
    element = tl.arange(0, BLOCK)
    tl.store(head + element, first.to(head.dtype.element_ty), mask=element < kept)
    tl.store(head + HEAD_DIM // 2 + element, second.to(head.dtype.element_ty), mask=element < kept)


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's part of the pool, as the kernels see it. k, v: where its keys and values lie in page 0, [kv_heads,
    page_tokens, head_dim] each. page_stride: elements from a page to the next. table [slots, table_stride] i32: the pages of
    a slot, in order."""

    k: Pointer
    v: Pointer
    table: Pointer
    page_tokens: int
    page_stride: int
    table_stride: int


def page_size(elements: int) -> Size:
    """The elements from a page to the next, and how many the kernel takes: places inside a page are 32-bit."""
    return Size("page_stride", elements)


def head_sizes(heads: int, kv_heads: int, head_dim: int) -> list[Size]:
    """The sizes of a layer's heads, and which the kernel takes."""
    return [
        Size("heads and twice the KV heads together", heads + 2 * kv_heads, high=GRID_LIMIT),
        Size("head_dim", head_dim, 2, 2**14, multiple=2),
    ]


def heads_launch(
    projections: Pointer | tuple[Pointer, Pointer, Pointer],
    out: Pointer,
    pages: Pages,
    positions: Pointer,
    slots: Pointer,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    label: str,
    norms: tuple[Pointer, Pointer] | None = None,
    eps: float = 1e-6,
    angles: tuple[Pointer, Pointer] | None = None,
) -> Launch:
    """Queries -> out [tokens, heads * head_dim]; keys and values -> the pages, in the pages' type, but for padding tokens.

    projections: f32, bf16 or f16, one buffer [tokens, (heads + 2 * kv_heads) * head_dim] of q | k | v, or one for each.
    positions, slots [tokens] i32; a position of -1 is padding. norms: the weights [head_dim] f32 of queries' and keys' heads,
    normalised with `eps`. angles: cos and sin [tokens, head_dim / 2] f32, without which nothing is rotated.
    """
    joint = isinstance(projections, Pointer)
    q, k, v = (projections,) * 3 if joint else projections
    for name, pointer in (("q", q), ("k", k), ("v", v)):
        require_element("heads", name, pointer, FLOATS)
    require_element("heads", "out", out, FLOATS)
    require_element("heads", "the pages' k", pages.k, FLOATS)
    require_element("heads", "the pages' v", pages.v, (pages.k.element,))
    for name, pointer in (("positions", positions), ("slots", slots), ("the page table", pages.table)):
        require_element("heads", name, pointer, ("i32",))
    for name, pair in (("norms", norms), ("angles", angles)):
        for pointer in pair or ():
            require_element("heads", name, pointer, ("f32",))
    for name, value in (
        ("the number of tokens", tokens),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("page_tokens", pages.page_tokens),
        ("table_stride", pages.table_stride),
    ):
        require_size("heads", name, value)
    require_sizes("heads", page_size(pages.page_stride), *head_sizes(heads, kv_heads, head_dim))
    least = kv_heads * pages.page_tokens * head_dim
    require(pages.page_stride >= 2 * least, "heads", f"page_stride is {pages.page_stride}, must hold {2 * least}")
    require(norms is None or eps > 0, "heads", f"eps is {eps}, must be above 0")
    query, key = heads * head_dim, kv_heads * head_dim
    return Launch(
        kernel="heads.heads",
        args={
            "q": q,
            "k": k,
            "v": v,
            "q_norm": norms[0] if norms else None,
            "k_norm": norms[1] if norms else None,
            "cos": angles[0] if angles else None,
            "sin": angles[1] if angles else None,
            "positions": positions,
            "slots": slots,
            "page_table": pages.table,
            "out": out,
            "k_pages": pages.k,
            "v_pages": pages.v,
            "eps": float(eps),
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "Q_STRIDE": query + 2 * key if joint else query,
            "K_STRIDE": query + 2 * key if joint else key,
            "V_STRIDE": query + 2 * key if joint else key,
            "K_START": query if joint else 0,
            "V_START": query + key if joint else 0,
            "PAGE_TOKENS": pages.page_tokens,
            "PAGE_STRIDE": pages.page_stride,
            "TABLE_STRIDE": pages.table_stride,
            "BLOCK": power_of_two(head_dim // 2),
        },
        grid=(tokens, heads + 2 * kv_heads, 1),
        label=label,
        warps=1,
        stages=1,
    )
