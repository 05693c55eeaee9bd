"""The op set itself: what is registered, and that every op refuses what it does not take, with data or without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flare.errors import InputError
from ignition import ops


def f32(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def kv(pages: int = 3, heads: int = 2, page_tokens: int = 4, head_dim: int = 6) -> torch.Tensor:
    return torch.zeros(pages, 2, heads, page_tokens, head_dim)


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embed": lambda: (f32(9, 4), i32(5)),
    "take_rows": lambda: (f32(5, 4), i32(3)),
    "rms_norm": lambda: (f32(5, 2, 6), f32(6), 1e-5),
    "linear": lambda: (f32(5, 4), f32(7, 4), f32(7)),
    "rope_angles": lambda: (i32(5), f32(3), 1.0),
    "rope": lambda: (f32(5, 2, 6), f32(5, 3), f32(5, 3)),
    "kv_write": lambda: (kv(), f32(5, 2, 6), f32(5, 2, 6), i32(5), i32(5), i32(2, 3)),
    "attention": lambda: (f32(5, 4, 6), kv(), i32(5), i32(5), i32(2, 3), 0.5, 0),
    "silu_mul": lambda: (f32(5, 4), f32(5, 4)),
    "add": lambda: (f32(5, 4), f32(5, 4)),
}

REFUSED: list[tuple[str, int, Any, str]] = [
    ("embed", 0, f32(9), "table"),
    ("embed", 1, torch.zeros(5, dtype=torch.int64), "tokens"),
    ("take_rows", 0, f32(5, 4).double(), "x"),
    ("take_rows", 1, i32(3, 1), "rows"),
    ("rms_norm", 0, f32(6), "x"),
    ("rms_norm", 1, f32(5), "weight"),
    ("rms_norm", 2, 0.0, "eps"),
    ("rms_norm", 2, 1e39, "eps"),
    ("linear", 0, f32(5, 3), "w"),
    ("linear", 0, f32(4, 5).t(), "x"),
    ("linear", 1, i32(7, 4), "w"),
    ("linear", 2, f32(6), "bias"),
    ("rope_angles", 1, f32(3, 1), "inv_freq"),
    ("rope_angles", 2, -1.0, "scale"),
    ("rope_angles", 2, float("inf"), "scale"),
    ("rope", 0, f32(5, 2, 5), "x"),
    ("rope", 1, f32(5, 6), "cos"),
    ("rope", 2, f32(4, 3), "sin"),
    ("kv_write", 0, kv(heads=3), "k"),
    ("kv_write", 0, kv()[:, :1], "kv"),
    ("kv_write", 2, f32(5, 2, 4), "v"),
    ("kv_write", 3, i32(4), "positions"),
    ("kv_write", 5, i32(6), "page_table"),
    ("attention", 0, f32(5, 3, 6), "query heads"),
    ("attention", 0, f32(5, 4, 4), "q"),
    ("attention", 3, i32(4), "slots"),
    ("attention", 5, 0.0, "scale"),
    ("attention", 5, float("nan"), "scale"),
    ("attention", 5, 1e-40, "scale"),
    ("attention", 6, -1, "window"),
    ("silu_mul", 1, f32(5, 1), "up"),
    ("add", 1, f32(1, 4), "b"),
]


def call(op: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(ops, op)(*arguments)


def test_the_set_is_closed() -> None:
    assert set(ops.__all__) == set(ops.FAMILIES) == set(CALLS)
    for name in ops.__all__:
        assert callable(getattr(ops, name)) and hasattr(torch.ops.ignition, name)
    with pytest.raises(AttributeError, match="no op 'softmax'"):
        ops.softmax  # noqa: B018


def test_naming_the_op_set_does_not_load_torch() -> None:
    code = "import sys, ignition.ops, recipes; recipes.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("op", CALLS)
def test_shape_function_and_reference_agree(op: str) -> None:
    arguments = CALLS[op]()
    computed = call(op, arguments)
    with FakeTensorMode() as mode:
        faked = call(op, tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    computed, faked = (r if isinstance(r, tuple) else (r,) for r in (computed, faked))
    for real, fake in zip(computed, faked, strict=True):
        if real is None:
            assert fake is None
        else:
            assert (real.shape, real.dtype) == (fake.shape, fake.dtype) and real.is_contiguous()


@pytest.mark.parametrize("fake", [False, True], ids=["data", "fake"])
@pytest.mark.parametrize(("op", "index", "argument", "named"), REFUSED)
def test_what_an_op_does_not_take_is_named(op: str, index: int, argument: Any, named: str, fake: bool) -> None:
    good = CALLS[op]()
    arguments = (*good[:index], argument, *good[index + 1 :])
    with pytest.raises(InputError, match=f"^op {op}: .*\\b{named}\\b"):
        if not fake:
            call(op, arguments)
        with FakeTensorMode() as mode:
            call(op, tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))


@pytest.mark.parametrize(
    ("op", "index", "values", "named"),
    [
        ("embed", 1, [0, 0, 9, 0, 0], "tokens has 9"),
        ("embed", 1, [0, -1, 0, 0, 0], "tokens has -1"),
        ("take_rows", 1, [0, 5, 0], "rows has 5"),
        ("kv_write", 3, [0, 1, 2, 12, 3], "positions has 12"),
        ("kv_write", 4, [0, 0, 2, 0, 0], "slots has 2"),
        ("kv_write", 5, [[3, 0, 0], [0, 0, 0]], "page_table has 3"),
        ("attention", 3, [0, 0, 0, 0, 2], "slots has 2"),
        ("attention", 4, [[-1, 0, 0], [0, 0, 0]], "page_table has -1"),
    ],
)
def test_indices_are_checked_before_memory_is_touched(op: str, index: int, values: Any, named: str) -> None:
    arguments = list(CALLS[op]())
    arguments[index] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(InputError, match=named):
        call(op, tuple(arguments))
