"""kv_write and attention against plain attention over each slot's own keys, whatever the pages are."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import InputError
from ignition import ops

HEADS, KV_HEADS, HEAD_DIM, PAGES = 4, 2, 6, 24


def index(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float, window: int
) -> torch.Tensor:
    """One token's attention, in float64, one head and one key at a time."""
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        seen = [j for j in range(position + 1) if not window or j > position - window]
        scores = [scale * float(q[head].double() @ keys[j, kv_head].double()) for j in seen]
        weights = [math.exp(s - max(scores)) for s in scores]
        mixed = sum(w * values[j, kv_head].double() for w, j in zip(weights, seen, strict=True))
        out.append(mixed / sum(weights))
    return torch.cat(out)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), page_tokens=st.integers(1, 5), window=st.sampled_from([0, 1, 2, 5, 100]))
def test_attention_over_random_ragged_steps(seed: int, page_tokens: int, window: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [rng.randint(1, 9) for _ in range(3)]
    stride = -(-max(lengths) // page_tokens)
    pages = rng.sample(range(PAGES + 3 * stride), 3 * stride)
    table = index([pages[slot * stride : (slot + 1) * stride] for slot in range(3)])
    q, k, v = (torch.randn(3, max(lengths), h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    # What no token wrote is NaN: it must not reach any result.
    kv = torch.full((PAGES + 3 * stride, 2, KV_HEADS, page_tokens, HEAD_DIM), float("nan"))
    done = [0, 0, 0]
    while done != lengths:
        places: list[tuple[int, int]] = []
        for slot in rng.sample(range(3), 3):
            end = rng.randint(done[slot], lengths[slot])
            places += [(slot, position) for position in range(done[slot], end)]
            done[slot] = end
        if not places:
            continue
        slots, positions = (list(x) for x in zip(*places, strict=True))
        where = index(positions), index(slots), table
        ops.kv_write(kv, k[slots, positions].contiguous(), v[slots, positions].contiguous(), *where)
        out = ops.attention(q[slots, positions].contiguous(), kv, *where, 0.7, window)
        for (slot, position), found in zip(places, out, strict=True):
            expected = plain(q[slot, position], k[slot], v[slot], position, 0.7, window)
            assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_kv_write_touches_only_the_tokens_places() -> None:
    kv = torch.zeros(3, 2, 1, 2, 2)
    k, v = torch.full((2, 1, 2), 5.0), torch.full((2, 1, 2), 7.0)
    ops.kv_write(kv, k, v, index([1, 2]), index([0, 0]), index([[2, 0]]))
    assert kv[2, 0, 0, 1].tolist() == kv[0, 0, 0, 0].tolist() == [5.0, 5.0]
    assert kv[2, 1, 0, 1].tolist() == kv[0, 1, 0, 0].tolist() == [7.0, 7.0]
    assert kv.count_nonzero() == 8


def test_pages_before_the_window_need_not_exist() -> None:
    kv = torch.rand(1, 2, KV_HEADS, 4, HEAD_DIM)
    q = torch.rand(1, HEADS, HEAD_DIM)
    where = index([10]), index([0]), index([[-1, -1, 0]])
    assert ops.attention(q, kv, *where, 1.0, 3).isfinite().all()
    with pytest.raises(InputError, match="page_table has -1"):
        ops.attention(q, kv, *where, 1.0, 4)
