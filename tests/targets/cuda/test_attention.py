"""Paged attention on cuda against attention in f64, and its two forms against each other bit by bit.

Kernels run in Triton's interpreter. What of a pool no token wrote is NaN in all these tests, and what of a page table no token
needs is far out of the pool.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flare.errors import InputError
from ignition.targets.cuda.kernels import attention_decode
from ignition.targets.cuda.kernels.attention import FEW_TOKENS, attention_launches, attention_workspace
from ignition.targets.cuda.launch import Pointer
from tests.targets.cuda.paged_pool import Place, Pool, exact, pool_of, shape_of

# Rows of a tile that no token uses are divided by a total of zero, and some tests are about what numpy tells of.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|overflow|All-NaN).*:RuntimeWarning")


def run_of(slot: int, first: int, stop: int) -> list[Place]:
    return [(slot, position) for position in range(first, stop)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def check(pool: Pool, places: list[Place]) -> torch.Tensor:
    """Runs both forms: they are equal, close to the truth, and zero for padding. Returns their output."""
    few, many = pool.attend(places, "few"), pool.attend(places, "many")
    assert same_bits(few, many)
    for place, row in zip(places, few, strict=True):
        if place[1] < 0:
            assert not row.any()
        else:
            truth, bound = exact(pool, place)
            assert (row.double() - truth).abs().max() <= bound
    return few


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "sm_90a", "element": "f16", "heads": 9, "kv_heads": 3, "head_dim": 80, "page_tokens": 64},
        {"architecture": "sm_100a", "heads": 1, "kv_heads": 1, "head_dim": 96, "window": 33, "page_tokens": 48},
        {"architecture": "sm_86", "element": "f16", "heads": 7, "kv_heads": 1, "head_dim": 256, "window": 70},
        {"architecture": "sm_120a", "heads": 20, "kv_heads": 1, "head_dim": 128, "page_tokens": 1024},
        {"architecture": "sm_90a", "heads": 3, "kv_heads": 1, "head_dim": 512, "page_tokens": 32},
        {"element": "f32", "heads": 2, "kv_heads": 1, "head_dim": 320, "window": 50},
        {"element": "f32", "heads": 17, "kv_heads": 1, "head_dim": 16, "window": 240},
        {"element": "f32", "heads": 2, "kv_heads": 2, "head_dim": 160, "page_tokens": 17, "window": 1},
    ],
    ids=lambda changes: f"{changes.get('architecture', 'sm_80')}-{changes.get('head_dim', 64)}",
)
def test_ragged_steps_of_all_sizes(changes: dict[str, object]) -> None:
    shape = shape_of(**changes)
    lengths, chunks = [258, 38, 1, 65], [3, 3, 1, 1]
    starts = [length - chunk for length, chunk in zip(lengths, chunks, strict=True)]
    first = [max(0, start - shape.window + 1) if shape.window else 0 for start in starts]
    pool = pool_of(shape, 4, 1).written(lengths, first)
    order = [1, 3, 0, 2]
    check(pool, [place for slot in order for place in run_of(slot, starts[slot], lengths[slot])] + [(0, -1)] * 2)


@pytest.mark.parametrize(("window", "seed"), [(0, 0), (70, 1)])
def test_a_token_gets_the_same_bits_in_any_step(window: int, seed: int) -> None:
    """Chunks of any size, beside others or alone, in either form and in any bucket: the bits are those of one by one."""
    rng = random.Random(seed)
    shape = shape_of(kv_heads=1, heads=3, window=window)
    pool = pool_of(shape, 3, seed)
    begin, end = [0, 252, 124], [7, 260, 131]
    whole = pool.written(end)
    alone = {
        place: whole.attend([place], "few")[0]
        for slot in range(3)
        for place in run_of(slot, begin[slot], end[slot])
        if rng.random() < 0.5 or place[1] in (0, 255, 256)
    }
    done = list(begin)
    while done != end:
        places = []
        for slot in rng.sample(range(3), 3):
            stop = rng.randint(done[slot], end[slot])
            places += run_of(slot, done[slot], stop)
            done[slot] = stop
        # What comes later is not written yet in this step.
        out = pool.written(done).attend(places + [(0, -1)] * rng.randint(1, 4), rng.choice(["few", "many"]))
        for place, row in zip(places, out, strict=False):
            assert place not in alone or same_bits(row, alone[place])


def test_splits_of_long_contexts_are_put_together_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(kv_heads=1, heads=2, max_context=1100, page_tokens=256, window=800)
    assert (shape.split, shape.splits) == (256, 5)
    pool = pool_of(shape, 1, 3).written([1030])
    places = [(0, 256), (0, 1023), (0, 1024), (0, 1029)]
    out = check(pool, places)
    monkeypatch.setattr(attention_decode, "PROGRAMS", 8)  # two lanes of splits
    assert same_bits(pool.attend(places, "few"), out)


def test_neighbours_of_different_slots_are_told_apart() -> None:
    pool = pool_of(shape_of(), 3, 11).written([6, 6, 8])
    check(pool, [(0, 4), (1, 5), (2, 6), (2, 7)])


@pytest.mark.parametrize("position", [351, 511])
def test_blocks_and_splits_that_a_token_does_not_see_leave_even_zeros_signs(position: int) -> None:
    """Tiny negative sums shrink to -0 in the second split and when it is merged; adding nothing behind would give 0. The tile
    of 5 tokens that holds this one goes on in the next block, or split."""
    shape = shape_of(element="f32", heads=3, kv_heads=1, scale=1.0, max_context=520)
    assert (shape.split, shape.tiles.block, shape.tiles.many.rows // 3) == (256, 32, 5)
    pool = pool_of(shape, 1, 12)
    pool.queries[:] = 1.0
    for first, key, value in ((0, 0.0, -1e-45), (256, 1.0, -1e-45), (position - 31, 2.0, -0.0)):
        pool.keys[0, first:], pool.values[0, first:] = key, value
    pool = pool.written([position + 2])
    places = [(0, position), (0, position + 1)]
    few = pool.attend(places, "few")
    assert few[0].view(torch.int32).eq(-(2**31)).all()  # the bits of -0.0
    assert same_bits(few, pool.attend(places, "many"))


@pytest.mark.parametrize("form", ["few", "many"])
def test_queries_and_outputs_of_other_elements(form: str) -> None:
    pool = pool_of(shape_of(), 1, 4).written([20])
    places = run_of(0, 17, 20)
    wide = pool.attend(places, form, q="f32", out="f32")
    assert same_bits(wide.bfloat16(), pool.attend(places, form))
    assert wide.dtype == torch.float32 and not torch.equal(wide, wide.bfloat16().float())


@pytest.mark.parametrize("form", ["few", "many"])
def test_one_key_gives_its_value_and_equal_values_give_themselves(form: str) -> None:
    pool = pool_of(shape_of(), 2, 5)
    pool.values[1] = pool.values[1, 0]
    out = pool.written([1, 300]).attend([(0, 0), (1, 298), (1, 299)], form)
    for row, slot in zip(out, (0, 1, 1), strict=True):
        assert torch.equal(row.view(4, 64), pool.values[slot, 0].repeat_interleave(2, dim=0))


@pytest.mark.parametrize(("window", "bad"), [(0, float("inf")), (5, float("nan")), (5, float("-inf"))])
def test_what_is_not_finite_reaches_nobody_who_does_not_see_it(window: int, bad: float) -> None:
    """A value of one token spoils the heads of its own KV head at its own and later positions, and nothing else."""
    pool = pool_of(shape_of(window=window), 2, 6)
    places = [*run_of(0, 63, 71), (1, 61)]
    good = pool.written([71, 62]).attend(places, "many")
    pool.values[0, 65, 1, 7] = bad
    spoiled = pool.written([71, 62])
    out = spoiled.attend(places, "many")
    assert same_bits(out, spoiled.attend(places, "few"))
    for place, before, row in zip(places, good.view(-1, 4, 64), out.view(-1, 4, 64), strict=True):
        sees = place[0] == 0 and place[1] >= 65 and (not window or place[1] < 65 + window)
        assert same_bits(row[:2], before[:2])
        assert row[2:].isnan().all() if sees else same_bits(row[2:], before[2:])


@pytest.mark.parametrize("form", ["few", "many"])
def test_a_value_that_is_not_finite_spoils_all_columns_wherever_it_lies(form: str) -> None:
    """In a block that every row sees all of, as in one at the end."""
    pool = pool_of(shape_of(heads=1, kv_heads=1), 2, 13)
    pool.values[0, 3, 0, 7] = pool.values[1, 70, 0, 7] = float("inf")
    out = pool.written([72, 72]).attend([(0, 2), (0, 71), (1, 69), (1, 71)], form)
    assert out.isnan().all(dim=1).tolist() == out.isnan().any(dim=1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("form", ["few", "many"])
def test_scores_below_all_numbers_weigh_nothing(form: str) -> None:
    """As softmax has it: they may come first, and where there are no others the result is NaN."""
    pool = pool_of(shape_of(element="f32", heads=1, kv_heads=1), 1, 14)
    pool.queries[:], pool.keys[0, :40] = 10.0, -1e38
    pool.keys[0, 40:] = 0.0
    out = pool.written([42]).attend([(0, 5), (0, 40), (0, 41)], form)
    assert out[0].isnan().all() and torch.equal(out[1], pool.values[0, 40, 0])
    assert torch.allclose(out[2], pool.values[0, 40:42, 0].mean(dim=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["few", "many"])
def test_keys_and_queries_that_are_not_finite_give_nan_and_not_zero(form: str) -> None:
    pool = pool_of(shape_of(), 2, 7)
    places = [(0, 8), (0, 9), (0, 10), (1, 3)]
    good = pool.written([11, 4]).attend(places, form)
    pool.queries[0, 8, 0, 0] = float("nan")
    pool.keys[0, 10, 1, 0] = float("nan")
    out = pool.written([11, 4]).attend(places, form).view(4, 4, 64)
    spoiled = torch.zeros(4, 4, dtype=torch.bool)
    spoiled[0, 0] = spoiled[2, 2:] = True
    assert torch.equal(out.isnan().all(dim=-1), spoiled)
    assert torch.equal(out[~spoiled], good.view(4, 4, 64)[~spoiled])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    pool = pool_of(shape_of(element="f32", scale=1e4, page_tokens=32), 1, 8).written([70])
    places = run_of(0, 66, 70)
    few = pool.attend(places, "few")
    assert same_bits(few, pool.attend(places, "many"))
    for place, row in zip(places, few, strict=True):
        assert torch.allclose(row.double(), exact(pool, place)[0], atol=1e-2)


def test_a_step_of_padding_alone_is_zero() -> None:
    pool = pool_of(shape_of(), 1, 9).written([0])
    assert not check(pool, [(0, -1)] * 3).any()


@pytest.mark.parametrize("form", ["few", "many"])
def test_pages_beyond_2_31_elements(form: str, tmp_path: Path) -> None:
    """The pool is a file with holes: only what is written of it takes room."""
    small = pool_of(shape_of(element="f16", kv_heads=1, heads=1, max_context=32), 1, 10)
    small = replace(small, table=torch.tensor([[2, 1]], dtype=torch.int32))
    places, stride, layer = run_of(0, 18, 20), 1 << 30, 2 * 16 * 64
    size = 2 * stride + stride // 2 + layer
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=size, dtype=torch.float16)
    for page, rows in ((2, slice(0, 16)), (1, slice(16, 20))):
        begin = page * stride + stride // 2
        for start, part in ((begin, small.keys[0, rows]), (begin + layer // 2, small.values[0, rows])):
            memory[start : start + part.numel()] = part.flatten()
    large = replace(small, shape=replace(small.shape, page_stride=stride), memory=memory)
    assert same_bits(large.attend(places, form), small.written([20]).attend(places, form))
    (tmp_path / "pool").unlink()


def pointers(element: str = "bf16") -> dict[str, Pointer]:
    whole = {name: Pointer("i32", name) for name in ("positions", "slots", "page_table")}
    return {name: Pointer(element, name) for name in ("q", "k", "v", "out")} | whole


def test_buckets_choose_the_form_and_its_workspace() -> None:
    shape = shape_of(heads=32, kv_heads=8, head_dim=128, max_context=8192)
    workspace = Pointer("f32", "workspace")
    few = attention_launches(shape, **pointers(), workspace=workspace, tokens=FEW_TOKENS, label="layer 3")
    assert [launch.kernel for launch in few] == [
        "attention_decode.attention_split",
        "attention_decode.attention_combine",
    ]
    assert attention_workspace(shape, FEW_TOKENS) == FEW_TOKENS * 32 * 32 * (128 + 8) * 4
    many = attention_launches(shape, **pointers(), workspace=None, tokens=FEW_TOKENS + 1, label="layer 3")
    assert [launch.kernel for launch in many] == ["attention_prefill.attention_tile"]
    assert attention_workspace(shape, FEW_TOKENS + 1) == 0


def test_constants_do_not_depend_on_the_bucket() -> None:
    shape = shape_of()
    for few in ((1, 7), (100, 5000)):
        one, other = (
            attention_launches(shape, **pointers(), workspace=Pointer("f32", "w"), tokens=tokens, label="x")
            for tokens in few
        )
        for a, b in zip(one, other, strict=True):
            assert replace(a, grid=b.grid) == b and a.grid != b.grid


def test_splits_are_64_at_most_and_run_side_by_side_in_small_steps() -> None:
    shape = shape_of(heads=32, kv_heads=8, max_context=100_000)
    assert (shape.split, shape.splits) == (2048, 49)
    workspace = Pointer("f32", "workspace")
    for tokens, lanes in ((1, 49), (4, 16), (64, 1)):
        split, _ = attention_launches(shape, **pointers(), workspace=workspace, tokens=tokens, label="x")
        assert split.grid == (tokens, 8, lanes)
    assert shape_of(max_context=400, window=400).narrow_window == shape_of(window=2**40).narrow_window == 0
    assert shape_of(max_context=400, window=399).narrow_window == 399


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "sm_75"}, "architecture is 'sm_75', must be one of sm_80, sm_86"),
        ({"element": "fp8"}, "the KV pool holds 'fp8', must be bf16, f16 or f32"),
        ({"kv_heads": 0}, "there are 0 KV heads"),
        ({"heads": 5}, "5 query heads are not a multiple of 2 KV heads"),
        ({"heads": 0}, "0 query heads are not"),
        ({"head_dim": 520}, "head_dim is 520, must be a multiple of 8 from 16 to 512"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"head_dim": 100}, "head_dim is 100"),
        ({"page_tokens": 8}, "a page has 8 tokens, must have 16 to 1024"),
        ({"page_tokens": 2048}, "a page has 2048 tokens"),
        ({"page_stride": 2047}, "page_stride is 2047 elements, must be 2048 or more and a multiple of 64 bytes"),
        ({"page_stride": 2049}, "page_stride is 2049 elements"),
        ({"max_context": 0}, "max_context is 0 tokens"),
        ({"max_context": 2**30 + 1}, "max_context is 1073741825 tokens, must be 1 to 1073741824"),
        ({"pages": 24}, "24 pages of 16 tokens hold less than max_context, 400 tokens"),
        ({"scale": 0.0}, "scale is 0.0, must be above 0 and finite"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"window": -1}, "window is -1, must be 0 (none) or more"),
        (
            {"heads": 16_384, "kv_heads": 16_384, "head_dim": 392},
            "the number of a token's programs is 65536, must be in [1, 65535]",
        ),
    ],
)
def test_sizes_that_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as refused:
        replace(shape_of(), **changes)
    assert str(refused.value).startswith(f"attention on cuda: {said}") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 0}, "a bucket of 0 tokens, must have 1 or more"),
        ({"k": Pointer("f16", "k")}, "k is f16, must be bf16, what the pool holds"),
        ({"v": Pointer("f32", "v")}, "v is f32, must be bf16"),
        ({"q": Pointer("i8", "q")}, "q is i8, must be bf16, f16 or f32"),
        ({"out": Pointer("u8", "out")}, "out is u8, must be bf16, f16 or f32"),
        ({"workspace": None}, "workspace is missing, must be f32 for a bucket of 4 tokens"),
        ({"workspace": Pointer("bf16", "w")}, "workspace is bf16, must be f32"),
    ],
)
def test_operands_that_are_refused(changes: dict[str, object], said: str) -> None:
    call = pointers() | {"workspace": Pointer("f32", "w"), "tokens": 4} | changes
    with pytest.raises(InputError) as refused:
        attention_launches(shape_of(), **call, label="x")
    assert str(refused.value).startswith(f"attention on cuda: {said}")
