"""Causal attention over the paged KV pool: which kernels compute it for a bucket, and the memory they need between them."""

from __future__ import annotations

from flare.errors import InputError
from ignition.targets.cuda.kernels.attention_decode import attention_combine_launch, attention_split_launch
from ignition.targets.cuda.kernels.attention_prefill import attention_tile_launch
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.launch import Launch, Pointer

FEW_TOKENS = 64
"""Up to this many tokens a step is taken for one of decoding slots: each token on its own, its splits side by side."""


def attention_workspace(shape: PagedAttention, tokens: int) -> int:
    """Returns the bytes of partial results that attention over a bucket of `tokens` keeps between its kernels."""
    return 4 * tokens * shape.splits * shape.heads * shape.partial if tokens <= FEW_TOKENS else 0


def attention_launches(
    shape: PagedAttention,
    q: Pointer,
    k: Pointer,
    v: Pointer,
    positions: Pointer,
    slots: Pointer,
    page_table: Pointer,
    workspace: Pointer | None,
    out: Pointer,
    *,
    tokens: int,
    label: str,
) -> list[Launch]:
    """Returns what computes out [T, H * DH] = softmax(scale q k^T) v, in order.

    q [T, H, DH] and out: bf16, f16 or f32 each; k, v: of the pool's element, at the layer's offset in page 0; positions,
    slots [T] i32; page_table [slots, pages] i32; workspace: f32, of attention_workspace bytes, None where that is 0. A token at
    position -1 gets zeros and reads nothing. Raises InputError.
    """
    if tokens < 1:
        raise InputError(f"attention on cuda: a bucket of {tokens} tokens, must have 1 or more")
    for name, pointer in (("k", k), ("v", v)):
        if pointer.element != shape.element:
            raise InputError(
                f"attention on cuda: {name} is {pointer.element}, must be {shape.element}, what the pool holds"
            )
    for name, pointer in (("q", q), ("out", out)):
        if pointer.element not in ("bf16", "f16", "f32"):
            raise InputError(f"attention on cuda: {name} is {pointer.element}, must be bf16, f16 or f32")
    if tokens > FEW_TOKENS:
        return [attention_tile_launch(shape, q, k, v, positions, slots, page_table, out, tokens=tokens, label=label)]
    if workspace is None or workspace.element != "f32":
        seen = "missing" if workspace is None else workspace.element
        raise InputError(f"attention on cuda: workspace is {seen}, must be f32 for a bucket of {tokens} tokens")
    return [
        attention_split_launch(
            shape, q, k, v, positions, slots, page_table, workspace, tokens=tokens, label=f"{label}, splits"
        ),
        attention_combine_launch(shape, positions, workspace, out, tokens=tokens, label=label),
    ]
