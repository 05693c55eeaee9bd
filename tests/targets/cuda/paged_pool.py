"""A paged KV pool for tests of attention on cuda: slots' keys and values in scattered pages, everything else poison."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ignition.targets.cuda.kernels.attention import attention_workspace
from ignition.targets.cuda.kernels.attention_decode import attention_combine_launch, attention_split_launch
from ignition.targets.cuda.kernels.attention_prefill import attention_tile_launch
from ignition.targets.cuda.kernels.attention_shape import PagedAttention
from ignition.targets.cuda.launch import Launch, Pointer
from tests.support.triton_interpreter import run

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SENTINEL = 77.0
STALE = (-5, 10**9, -(2**31), 2**31 - 1)

Place = tuple[int, int]
"""A token's slot and position; position -1 for padding."""


def shape_of(**changes: object) -> PagedAttention:
    """A small layer, the second of two in its pages."""
    known = {
        "architecture": "sm_80",
        "element": "bf16",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "page_tokens": 16,
        "max_context": 400,
        "scale": 0.2,
    } | changes
    known["pages"] = -(-known["max_context"] // known["page_tokens"])
    layer = 2 * known["kv_heads"] * known["page_tokens"] * known["head_dim"]
    return PagedAttention(page_stride=2 * layer, **known)


@dataclass(frozen=True)
class Pool:
    """queries [slots, positions, H, DH], keys, values [slots, positions, KH, DH]: rounded to the pool's element. memory: the
    pool, flat. table [slots, pages]: with stale entries wherever a slot has no page."""

    shape: PagedAttention
    queries: Tensor
    keys: Tensor
    values: Tensor
    memory: Tensor
    table: Tensor

    def written(self, lengths: list[int], first: list[int] | None = None) -> Pool:
        """Returns the pool with the positions below `lengths` written, and pages with nothing from `first` on given up."""
        shape, memory, table = self.shape, torch.full_like(self.memory, float("nan")), self.table.clone()
        pages = memory.view(-1, shape.page_stride)
        kv = pages[:, shape.page_stride // 2 :].view(-1, 2, shape.kv_heads, shape.page_tokens, shape.head_dim)
        for slot, length in enumerate(lengths):
            position = torch.arange(length)
            page, offset = table[slot, position // shape.page_tokens].long(), position % shape.page_tokens
            kv[page, 0, :, offset] = self.keys[slot, :length]
            kv[page, 1, :, offset] = self.values[slot, :length]
            begin = 0 if first is None else first[slot] // shape.page_tokens
            for index in [*range(begin), *range(-(-length // shape.page_tokens), table.shape[1])]:
                table[slot, index] = STALE[index % len(STALE)]
        return replace(self, memory=memory, table=table)

    def attend(self, places: list[Place], form: str, *, q: str | None = None, out: str | None = None) -> Tensor:
        """Runs the kernels for steps of "few" or "many" tokens and returns [T, H * DH]; q, out: elements, where not the pool's.

        Raises AssertionError where they write beside their output or workspace.
        """
        shape, tokens = self.shape, len(places)
        query = torch.stack([self.queries[s, p] if p >= 0 else self.queries[0, 0] * torch.nan for s, p in places])
        slots, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*places, strict=True))
        rows = shape.heads * shape.head_dim
        result = torch.full(((tokens + 2) * rows,), SENTINEL, dtype=DTYPES[out or shape.element])
        room = attention_workspace(shape, tokens) // 4
        workspace = torch.full((room + 64,), SENTINEL)
        for launch in self.launches(query.to(DTYPES[q or shape.element]), positions, slots, workspace, result, form):
            run(launch)
        assert (result[tokens * rows :] == SENTINEL).all() and (workspace[room:] == SENTINEL).all()
        return result[: tokens * rows].view(tokens, rows)

    def launches(
        self, query: Tensor, positions: Tensor, slots: Tensor, workspace: Tensor, out: Tensor, form: str
    ) -> list[Launch]:
        """The launches of one form on these tensors."""
        shape, tokens = self.shape, len(positions)
        element = {dtype: name for name, dtype in DTYPES.items()}
        k = self.memory[shape.page_stride // 2 :]
        v = k[shape.kv_heads * shape.page_tokens * shape.head_dim :]
        where, result = Pointer("i32", positions), Pointer(element[out.dtype], out)
        inputs = (
            Pointer(element[query.dtype], query),
            Pointer(shape.element, k),
            Pointer(shape.element, v),
            where,
            Pointer("i32", slots),
            Pointer("i32", self.table),
        )
        partials = Pointer("f32", workspace)
        if form == "many":
            return [attention_tile_launch(shape, *inputs, result, tokens=tokens, label="attention")]
        return [
            attention_split_launch(shape, *inputs, partials, tokens=tokens, label="splits"),
            attention_combine_launch(shape, where, partials, result, tokens=tokens, label="attention"),
        ]


def pool_of(shape: PagedAttention, slots: int, seed: int) -> Pool:
    """A pool in which nothing is written yet, with random numbers for `slots` slots of a whole context each."""
    generator = torch.Generator().manual_seed(seed)
    dtype, context = DTYPES[shape.element], shape.max_context

    def random_of(heads: int) -> Tensor:
        return torch.randn(slots, context, heads, shape.head_dim, generator=generator).to(dtype)

    queries, keys, values = random_of(shape.heads), random_of(shape.kv_heads), random_of(shape.kv_heads)
    count = slots * shape.pages + 3
    table = torch.tensor(random.Random(seed).sample(range(count), slots * shape.pages), dtype=torch.int32)
    memory = torch.full((count * shape.page_stride,), float("nan"), dtype=dtype)
    return Pool(shape, queries, keys, values, memory, table.view(slots, shape.pages))


def exact(pool: Pool, place: Place) -> tuple[Tensor, float]:
    """Returns a token's output [H * DH] in f64, and how far off the rounded arithmetic of the kernels may be.

    Weights are rounded to the pool's element (f16 ones below 2^-14 by up to 2^-25), and are off by the error of their scores;
    sums of both, weighted and not, are off by as much relative to the largest value. The output is rounded again.
    """
    shape, (slot, position) = pool.shape, place
    first = max(0, position - shape.window + 1) if shape.window else 0
    group = shape.heads // shape.kv_heads
    query = pool.queries[slot, position].double()
    keys, values = (
        x[slot, first : position + 1].double().repeat_interleave(group, dim=1) for x in (pool.keys, pool.values)
    )
    scores = torch.einsum("hd,shd->hs", query, keys) * shape.scale
    out = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values).flatten()
    unit = {"bf16": 2.0**-9, "f16": 2.0**-11, "f32": 2.0**-24}[shape.element]
    magnitude = float(torch.einsum("hd,shd->hs", query.abs(), keys.abs()).max()) * shape.scale
    weight = unit + (shape.head_dim + 8) * 2.0**-24 * magnitude + (len(keys) + 16) * 2.0**-23
    tiny = len(keys) * 2.0**-25 if shape.element == "f16" else 0.0
    return out, (2.1 * (weight + tiny) + 1.1 * unit) * float(values.abs().max())
