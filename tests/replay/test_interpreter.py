"""The interpreter's ops against their torch references, and what it refuses before any memory is touched."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from flare.core.graph import Op, Tensor
from flare.errors import CoreError
from flare.fallbacks import Fallback, Fallbacks
from flare.replay.called_nodes import CalledNodes
from flare.replay.cpu import CpuArg
from flare.replay.interpreter import OPS, Interpreter, Pages, Sizes
from ignition import ops

HEADS, KV_HEADS, WIDTH, PAGE_TOKENS, PAGES = 4, 2, 6, 32, 12
KV = KV_HEADS * PAGE_TOKENS * WIDTH


def activations(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CASES: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "embed": ((activations(9, 5), np.array([3, 8, 0, 3], np.int32)), {}),
    "take_rows": ((activations(6, 5), np.array([5, 0, 5], np.int32)), {}),
    "rms_norm": ((activations(7, 96), activations(96, seed=1)), {"eps": 1e-5}),
    "rms_norm of heads": ((activations(7, 3, 16), activations(16, seed=1)), {"eps": 1e-3}),
    "linear": ((activations(5, 33), activations(7, 33, seed=1), None), {}),
    "linear with a bias": ((activations(1, 33), activations(7, 33, seed=1), activations(7, seed=2)), {}),
    "rope_angles": ((np.array([0, 1, 250], np.int32), np.float32([1.0, 0.1, 3e-4])), {"scale": 1.25}),
    "rope": ((activations(4, 3, 8), activations(4, 4, seed=1), activations(4, 4, seed=2)), {}),
    "silu_mul": ((np.float32([[-200, -3, 0, 3, 90]]), activations(1, 5)), {}),
    "add": ((activations(4, 5), activations(4, 5, seed=1)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_op_is_its_reference(case: str) -> None:
    name, (tensors, attrs) = case.partition(" ")[0], CASES[case]
    wanted = getattr(ops, name)(*(None if t is None else torch.from_numpy(t) for t in tensors), **attrs)
    with np.errstate(all="ignore"):
        found = OPS[name](*tensors, **attrs)
    wanted, found = ((x,) if not isinstance(x, tuple) else x for x in (wanted, found))
    for ours, reference in zip(found, wanted, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, reference.numpy(), rtol=2e-6, atol=2e-6)


def test_it_has_every_op_of_the_set() -> None:
    assert OPS.keys() == ops.FAMILIES.keys() == {case.partition(" ")[0] for case in CASES} | {"kv_write", "attention"}


class Pool:
    """A pool of pages that holds NaN, with one layer's keys at 64 of each page and its values behind them."""

    def __init__(self, kv_format: str) -> None:
        self.kind = np.dtype({"f32": "<f4", "f16": "<f2"}[kv_format])
        self.bytes = -(-KV * self.kind.itemsize // 64) * 64
        page_bytes = 64 + 2 * self.bytes
        self.memory = np.full(PAGES * page_bytes // self.kind.itemsize, np.nan, self.kind)
        self.keys = CpuArg("kv", 64, KV * self.kind.itemsize)
        self.values = CpuArg("kv", 64 + self.bytes, KV * self.kind.itemsize)
        self.sizes = sizes(kv_format=kv_format, kv_page_bytes=page_bytes)
        self.view = Pages(self.memory.ctypes.data, self.sizes, self.keys, self.values, (KV_HEADS, PAGE_TOKENS, WIDTH))


def sizes(**changes: Any) -> Sizes:
    given: dict[str, Any] = {
        "tokens": 8,
        "rows": 4,
        "kv_pages": PAGES,
        "kv_page_bytes": 4096,
        "page_tokens": PAGE_TOKENS,
        "page_stride": 4,
        "kv_format": "f32",
    }
    return Sizes(**(given | changes))


@pytest.mark.parametrize("kv_format", ["f32", "f16"])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_pages_are_written_and_attended_to(kv_format: str, window: int) -> None:
    """Two slots on scattered pages, in chunks: as the reference, with keys and values rounded to their format."""
    pool = Pool(kv_format)
    state = torch.full((PAGES, 2, KV_HEADS, PAGE_TOKENS, WIDTH), float("nan"))
    table = np.array([[7, 2, 9], [0, 11, 4]], np.int32)
    attrs = {"scale": 0.4, "window": window}
    done = [0, 0]
    for step, counts in enumerate([(3, 1), (30, 0), (1, 40), (35, 2), (1, 1)]):
        positions = np.concatenate([np.arange(d, d + n) for d, n in zip(done, counts, strict=True)]).astype(np.int32)
        slots = np.repeat([0, 1], counts).astype(np.int32)
        done = [d + n for d, n in zip(done, counts, strict=True)]
        where = positions, slots, table
        q = activations(len(slots), HEADS, WIDTH, seed=3 * step)
        k, v = (
            activations(len(slots), KV_HEADS, WIDTH, seed=3 * step + i).astype(pool.kind).astype(np.float32)
            for i in (1, 2)
        )
        OPS["kv_write"](pool.view, k, v, *where)
        ops.kv_write(state, torch.from_numpy(k), torch.from_numpy(v), *map(torch.from_numpy, where))
        found = OPS["attention"](q, pool.view, *where, **attrs)
        wanted = ops.attention(torch.from_numpy(q), state, *map(torch.from_numpy, where), **attrs)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)
        alone = [
            OPS["attention"](q[i : i + 1], pool.view, positions[i : i + 1], slots[i : i + 1], table, **attrs)
            for i in range(len(slots))
        ]
        assert np.concatenate(alone).tobytes() == found.tobytes()


@pytest.mark.parametrize("name", ["linear", "rms_norm"])
def test_what_sums_sums_each_token_for_itself(name: str) -> None:
    x = activations(11, 300)
    more = (activations(17, 300, seed=1), None) if name == "linear" else (activations(300, seed=1),)
    attrs = {} if name == "linear" else {"eps": 1e-5}
    whole = OPS[name](x, *more, **attrs)
    for begin, end in ((0, 1), (3, 9), (10, 11)):
        assert OPS[name](x[begin:end], *more, **attrs).tobytes() == whole[begin:end].tobytes()


ADD = Op(name="add", attrs={}, inputs=[Tensor(shape=["T", 4])] * 2, outputs=[Tensor(shape=["T", 4])])
ARGS = [CpuArg("arena", 0, 128), CpuArg("weights", 0, 128), CpuArg("io", 0, 128)]
STATE = Tensor(shape=["pages", 2, KV_HEADS, PAGE_TOKENS, WIDTH])
WRITE = Op(
    name="kv_write",
    attrs={},
    inputs=[
        STATE,
        *[Tensor(shape=["T", KV_HEADS, WIDTH])] * 2,
        Tensor(shape=["T"], input="positions"),
        Tensor(shape=["T"], input="slots"),
        Tensor(shape=["slots", "slot_pages"], input="page_table"),
    ],
    outputs=[],
)
KV_ARGS = [CpuArg("kv", 0, 4 * KV), CpuArg("kv", 0, 4 * KV), *[CpuArg("arena", 0, 8 * 4 * KV_HEADS * WIDTH)] * 2]


def with_parts(op: Op, **parts: Any) -> Op:
    return structs.replace(op, **parts)


def with_state(*shape: int | str) -> Op:
    return with_parts(WRITE, inputs=[Tensor(shape=list(shape)), *WRITE.inputs[1:]])


@pytest.mark.parametrize(
    ("op", "args", "says"),
    [
        (Op(name="mul", attrs={}, inputs=[], outputs=[]), [], "the interpreter has no such op; it has add, "),
        (ADD, ARGS[:2], "2 arguments are too few for its tensors"),
        (ADD, [*ARGS, ARGS[0]], "1 arguments belong to none of its tensors"),
        (ADD, [replace(ARGS[0], bytes=127), *ARGS[1:]], r"a tensor of \['T', 4\] does not fit its 127 bytes"),
        (ADD, [*ARGS[:2], replace(ARGS[2], bytes=64)], "does not fit its 64 bytes"),
        (ADD, [*ARGS[:2], ARGS[1]], "a tensor that is written is in segment weights"),
        (ADD, [CpuArg("none"), *ARGS[1:]], "a tensor that is read is in segment none"),
        (ADD, [CpuArg("kv", 0, 128), *ARGS[1:]], "a state is not "),
        (Op(name="add", attrs={}, inputs=[None], outputs=[]), [ARGS[0]], "a tensor that is absent has memory"),
        (
            Op(name="add", attrs={}, inputs=[], outputs=[Tensor(shape=["T"], input="rows")]),
            [],
            "it writes to the step's rows",
        ),
        (
            Op(name="add", attrs={}, inputs=[Tensor(shape=[], input="tokens")], outputs=[]),
            [],
            r"the step's tokens of \[\], wanted \['T'\]",
        ),
        (
            Op(name="add", attrs={}, inputs=[Tensor(shape=["X"], input="rows")], outputs=[]),
            [],
            r"the step's rows of \['X'\], wanted \['R'\]",
        ),
        (Op(name="add", attrs={}, inputs=[Tensor(shape=["X", 4])], outputs=[]), ARGS[:1], "does not fit"),
        (Op(name="add", attrs={}, inputs=[Tensor(shape=[-2, -4])], outputs=[]), ARGS[:1], "does not fit"),
        (Op(name="add", attrs={}, inputs=[Tensor(shape=[1 << 62, 4])], outputs=[]), ARGS[:1], "does not fit"),
        (with_state("T", *[1] * 8), KV_ARGS[:1], "a tensor of 9 dimensions, wanted at most 8"),
        (
            Op(name="add", attrs={}, inputs=[Tensor(shape=["X" * 999])], outputs=[]),
            ARGS[:1],
            r"of \['X{78} does not fit",
        ),
        (with_state("pages", 2, KV_HEADS, 16, WIDTH), KV_ARGS, "or pages of 32 tokens"),
        (with_state("pages", 2, KV_HEADS, PAGE_TOKENS, WIDTH + 1), KV_ARGS, "does not fit its memory"),
        (with_state("pages", 2, KV_HEADS, PAGE_TOKENS, "x"), KV_ARGS, "a state is not "),
        (with_state("pages", 2, -1, PAGE_TOKENS, -WIDTH), KV_ARGS, "does not fit its memory"),
        (WRITE, [KV_ARGS[0], *KV_ARGS[2:]], "a state is not "),
        (with_parts(ADD, inputs=ADD.inputs[:1]), ARGS[1:], "it has 1 inputs, wanted 2: a, b"),
        (with_parts(ADD, inputs=ADD.inputs * 2), ARGS[:1] * 5, "it has 4 inputs, wanted 2: a, b"),
        (
            with_parts(ADD, inputs=[ADD.inputs[0], None]),
            [ARGS[0], CpuArg("none"), ARGS[2]],
            "it has no b, which it needs",
        ),
        (with_parts(ADD, outputs=[]), ARGS[:2], "it has 0 outputs, wanted 1"),
        (with_parts(ADD, name="rope_angles", attrs={"scale": 1.0}), ARGS, "it has 1 outputs, wanted 2"),
        (with_parts(WRITE, outputs=ADD.outputs), [*KV_ARGS, ARGS[0]], "it has 1 outputs, wanted 0"),
        (with_parts(ADD, attrs={"eps": 1.0}), ARGS, "its attributes are eps, wanted none"),
        (with_parts(ADD, name="rms_norm"), ARGS, "its attributes are none, wanted eps"),
        (
            with_parts(ADD, name="rms_norm", attrs={"scale": 1, "eps": 1}),
            ARGS,
            "its attributes are eps, scale, wanted eps",
        ),
        (with_parts(ADD, name="rms_norm", attrs={"a" * 999: 1}), ARGS, "its attributes are a{80}, wanted eps"),
        (WRITE, [KV_ARGS[0], replace(KV_ARGS[1], bytes=4 * KV - 1), *KV_ARGS[2:]], "does not fit its memory"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(op: Op, args: list[CpuArg], says: str) -> None:
    with pytest.raises(CoreError, match=rf"^node 3 \(op '\w+'\): .*{says}.*; export the core again$"):
        Interpreter({3: (op, args)}, sizes(), Fallbacks())


def test_nodes_that_fit_are_taken() -> None:
    linear = with_parts(ADD, name="linear", inputs=[*ADD.inputs, None])
    Interpreter(
        {0: (ADD, ARGS), 1: (WRITE, KV_ARGS), 2: (linear, [*ARGS[:2], CpuArg("none"), ARGS[2]])}, sizes(), Fallbacks()
    )


def test_a_run_is_counted_and_its_failure_kept_for_the_end() -> None:
    fallbacks = Fallbacks(told=False)
    interpreter = Interpreter({0: (ADD, ARGS), 2: (ADD, ARGS)}, sizes(), fallbacks)
    (cause,) = interpreter.causes
    assert cause == "op add (2 nodes) is not run by a kernel of the cpu target, numpy interprets it"
    x = activations(3, 8, 4)
    addresses = (ctypes.c_uint64 * 3)(*(x[i].ctypes.data for i in range(3)))
    called = CalledNodes({0: interpreter.run, 2: interpreter.run})
    interpreter.begin(5, 0)
    called.begin()
    called.run(2, ctypes.addressof(addresses), 0)
    called.finish()
    assert np.array_equal(x[2, :5], x[0, :5] + x[1, :5]) and np.array_equal(x[2, 5:], activations(3, 8, 4)[2, 5:])
    called.begin()
    called.run(1, ctypes.addressof(addresses), 0)  # there is no such node
    called.run(0, ctypes.addressof(addresses), 0)  # not run any more
    with pytest.raises(KeyError):
        called.finish()
    called.finish()
    assert fallbacks.events == (Fallback(cause, 1),)
