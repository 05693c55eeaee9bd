"""CudaReplay with a host part: the tiny core, whose values go by way of the processor, and whose logits may be made there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flare.core.cuda_graph import Bucket, HostCut, HostRows
from flare.core.graph import DEVICE, INTERPRETED, Op, Tensor
from flare.errors import CoreError, InputError, ReplayDead, RequestError
from flare.fallbacks import Fallback, Fallbacks
from flare.replay.cpu import CpuArg, CpuNode
from flare.replay.cuda import CudaReplay
from flare.replay.cuda_driver import DeviceError, open_device
from flare.replay.cuda_host import HostProgram
from flare.replay.cuda_program import CudaProgram
from tests.replay.test_cuda import expected, fill
from tests.support.fake_cuda.library import FakeCuda
from tests.support.fake_library import program as host_program
from tests.support.tiny_cuda.core import IO, SCALE, VALUES, tiny_program
from tests.support.tiny_cuda.sizes import CONTEXT, PT, ROWS, SLOTS, TOKENS, V

OPS = {"add": 1}
CAUSE = "op add (1 node) is not run by a kernel of the cuda target, the processor runs it"
NUMPY = "op add (1 node) is not run by a kernel of the cpu target, numpy interprets it"
SUM = Tensor(shape=["T", 1])
LOGITS = Tensor(shape=["R", V])


def values(bucket: Bucket) -> HostRows:
    return HostRows(buffer=structs.replace(VALUES, bytes=4 * bucket.tokens), row_bytes=4, count="T")


def logits(bucket: Bucket) -> HostRows:
    return HostRows(buffer=structs.replace(IO["logits"], bytes=4 * V * bucket.rows), row_bytes=4 * V, count="R")


def device(piece: int, phase: int, args: list[CpuArg], takes: list[Tensor], gives: list[Tensor]) -> CpuNode:
    return CpuNode(DEVICE, phase, tuple(args), Op(name=DEVICE, attrs={"piece": piece}, inputs=takes, outputs=gives))


def arena(offset: int, size: int = 4 * TOKENS) -> CpuArg:
    return CpuArg("arena", offset, size)


def cut_bucket(bucket: Bucket, *, logits_here: bool) -> Bucket:
    """The inputs, the values and the logits are a piece each; what is doubled, or the logits, come from the host."""
    inputs, fill_values, write, gather, project = bucket.nodes
    nodes = [inputs, fill_values, write, structs.replace(gather, after=[])]
    nodes += [] if logits_here else [structs.replace(project, after=[])]
    takes = [logits(bucket) if logits_here else values(bucket)]
    cuts = [HostCut(at=3, gives=[], takes=[]), HostCut(at=4, gives=[values(bucket)], takes=takes)]
    return structs.replace(bucket, nodes=nodes, host=cuts)


def doubling() -> list[CpuNode]:
    """Adds the values to themselves."""
    add = Op(name="add", attrs={}, inputs=[SUM, SUM], outputs=[SUM])
    return [
        device(0, 0, [], [], []),
        device(1, 1, [arena(0)], [], [SUM]),
        CpuNode(INTERPRETED, 2, (arena(0), arena(0), arena(64)), add),
        device(2, 3, [arena(64)], [SUM], []),
    ]


def projecting() -> list[CpuNode]:
    """Makes the logits: the wanted rows' values by the weights 16 to 79."""
    take = Op(
        name="take_rows",
        attrs={},
        inputs=[SUM, Tensor(shape=["R"], input="rows")],
        outputs=[Tensor(shape=["R", 1])],
    )
    linear = Op(
        name="linear",
        attrs={},
        inputs=[Tensor(shape=["R", 1]), Tensor(shape=[V, 1]), None],
        outputs=[LOGITS],
    )
    return [
        device(0, 0, [], [], []),
        device(1, 1, [arena(0)], [], [SUM]),
        CpuNode(INTERPRETED, 2, (arena(0), arena(64, 4 * ROWS)), take),
        CpuNode(
            INTERPRETED,
            3,
            (arena(64, 4 * ROWS), CpuArg("weights", 64, 4 * V), CpuArg("none"), arena(128, 4 * V * ROWS)),
            linear,
        ),
        device(2, 4, [arena(128, 4 * V * ROWS)], [LOGITS], []),
    ]


def with_host(program: CudaProgram, nodes: list[CpuNode], *, logits_here: bool = False) -> CudaProgram:
    step = [cut_bucket(bucket, logits_here=logits_here) for bucket in program.graphs.step]
    here = host_program(
        nodes, max_context=CONTEXT, slots=SLOTS, max_step_tokens=TOKENS, max_rows=ROWS, page_tokens=PT, vocabulary=V
    )
    return replace(program, graphs=structs.replace(program.graphs, step=step), host=HostProgram(here, OPS))


Open = Callable[..., CudaReplay]


@pytest.fixture
def open_cut(fake: FakeCuda, executor: Any, tiny_kernels: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens replays of the tiny core with a host part of these nodes, and closes them behind the test."""
    opened: list[CudaReplay] = []

    def open_it(nodes: list[CpuNode] | None = None, *, logits_here: bool = False, **given: Any) -> CudaReplay:
        program = with_host(tiny_program(tiny_kernels, tmp_path / "core"), nodes or doubling(), logits_here=logits_here)
        opened.append(CudaReplay(program, device=open_device(["sm_90a"]), **{"kv_pages": 8, "threads": 2} | given))
        return opened[-1]

    yield open_it
    for replay in opened:
        replay.close()


def doubled(tokens: list[int]) -> list[list[float]]:
    return [[2 * value for value in row] for row in expected(tokens)]


@pytest.mark.parametrize("threads", [1, 3])
def test_values_go_to_the_host_and_come_back(open_cut: Open, executor: Any, threads: int) -> None:
    """In both buckets, with other numbers of rows, pieces in their order; draws and scores are the device's."""
    fallbacks = Fallbacks(told=False)
    replay = open_cut(threads=threads, fallbacks=fallbacks)
    replay.page_table[0:2] = [3, 5]
    replay.page_table[4] = 7
    first, second = [5, 6, 9, 1, 2, 8, 40, 3], [11, 0]
    replay.rows[:3] = [4, 6, 0]
    replay.step(fill(replay, [(0, 0, first[:5]), (1, 0, second)]), 3)
    for row, wanted in enumerate([doubled(first)[4], doubled(second)[1], doubled(first)[0]]):
        assert replay.logits(row).tolist() == wanted
    assert executor.launched == ["kernels.write", "kernels.gather", "kernels.project"]
    replay.step(fill(replay, [(0, 5, first[5:7])]), 0)
    replay.rows[0] = 0
    replay.step(fill(replay, [(0, 7, first[7:])]), 1)
    assert replay.logits(0).tolist() == doubled(first)[-1]
    replay.sample(1)
    assert replay.sampled[0] == V - 1
    replay.targets[0] = 9
    replay.score(0, 1)
    assert replay.logprobs[0].chosen == doubled(first)[-1][9]
    assert fallbacks.events == (Fallback(CAUSE, 3), Fallback(NUMPY, 3))


def test_logits_that_the_host_makes_end_on_the_device(open_cut: Open, executor: Any) -> None:
    """The last piece has no node: only what it takes counts, and no more than the live rows of it."""
    replay = open_cut(projecting(), logits_here=True)
    tokens = [4, 11, 3]
    replay.rows[:2] = [2, 0]
    replay.step(fill(replay, [(0, 0, tokens)]), 2)
    sums = list(accumulate(token + 1 for token in tokens))
    assert replay.logits(0).tolist() == [SCALE * sums[2] * (16 + v) for v in range(V)]
    assert replay.logits(1).tolist() == [SCALE * sums[0] * (16 + v) for v in range(V)]
    assert executor.launched == ["kernels.write", "kernels.gather"]
    replay.sample(1)
    assert replay.sampled[0] == V - 1


def test_what_is_made_meanwhile_runs_once_on_the_calling_thread(open_cut: Open) -> None:
    replay, ran = open_cut(), []
    replay.rows[0] = 1
    replay.step(fill(replay, [(0, 0, [3, 4])]), 1, lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()] and replay.logits(0).tolist() == doubled([3, 4])[1]


def test_what_fails_meanwhile_leaves_no_rows(open_cut: Open) -> None:
    replay = open_cut()

    def fail() -> None:
        raise LookupError("nothing")

    with pytest.raises(LookupError):
        replay.step(1, 1, fail)
    with pytest.raises(ValueError, match="left 0 rows"):
        replay.sample(1)
    replay.step(1, 1)
    replay.sample(1)


def step_right(replay: CudaReplay, page: int) -> None:
    replay.page_table[0] = page
    replay.rows[0] = 1
    replay.step(fill(replay, [(0, 0, [3, 4])]), 1)
    assert replay.logits(0).tolist() == doubled([3, 4])[1]


# Calls of one step: a page table's row and what the last piece takes; what the second one gives; three pieces.
# Behind each, how many pieces have run by then.
CALLS = {"cuMemcpyHtoDAsync@1": 0, "cuMemcpyHtoDAsync@2": 2, "cuMemcpyDtoHAsync@1": 2}
CALLS |= {f"cuGraphLaunch@{n}": n - 1 for n in (1, 2, 3)} | {f"cuStreamSynchronize@{n}": n for n in (1, 2, 3)}


@pytest.mark.parametrize("call", CALLS)
def test_a_piece_that_fails_gives_nothing_and_the_next_step_is_right(
    open_cut: Open, fake: FakeCuda, executor: Any, call: str
) -> None:
    """No later piece is launched, and what was sent before is sent again."""
    replay, ran = open_cut(), []
    step_right(replay, 5)
    executor.launched.clear()
    function, _, number = call.partition("@")
    fake.fail(f"{function}=701@{number}")
    replay.page_table[0] = 6
    with pytest.raises(DeviceError, match=f"{function}: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        replay.step(fill(replay, [(0, 0, [3, 4])]), 1, lambda: ran.append(1))
    assert len(executor.launched) == CALLS[call] and ran == ([] if call == "cuMemcpyHtoDAsync@1" else [1])
    step_right(replay, 6)


@pytest.mark.parametrize("call", CALLS)
def test_a_device_lost_in_a_piece_is_a_dead_replay(open_cut: Open, fake: FakeCuda, call: str) -> None:
    replay = open_cut()
    step_right(replay, 5)
    function, _, number = call.partition("@")
    fake.fail(f"{function}=719@{number}")
    replay.page_table[0] = 6
    with pytest.raises(ReplayDead) as error:
        replay.step(fill(replay, [(0, 0, [3, 4])]), 1)
    assert str(error.value).startswith(f"{function}: CUDA_ERROR_LAUNCH_FAILED") and "start it" in str(error.value)
    with pytest.raises(ReplayDead) as later:
        replay.step(1, 0)
    assert str(later.value) == str(error.value)


def test_a_node_of_the_host_that_fails_ends_its_step_alone(
    open_cut: Open, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flare.replay import interpreter

    def broken(a: Any, b: Any) -> Any:
        raise ValueError("broken")

    replay = open_cut()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "OPS", interpreter.OPS | {"add": broken})
        with pytest.raises(ValueError, match="broken"):
            replay.step(1, 1)
    assert executor.launched == ["kernels.write", "kernels.gather"]
    step_right(replay, 2)


def test_where_the_host_may_not_run_anything_no_step_does(open_cut: Open, executor: Any) -> None:
    fallbacks = Fallbacks(allowed=False)
    replay = open_cut(fallbacks=fallbacks)
    with pytest.raises(RequestError) as caught:
        replay.step(1, 1)
    assert str(caught.value) == f"CPU fallback disabled: {CAUSE}; {NUMPY}"
    assert (caught.value.status, executor.launched, fallbacks.events) == (500, [], ())


def test_a_bad_argument_runs_nothing(open_cut: Open, executor: Any) -> None:
    fallbacks = Fallbacks(told=False)
    replay = open_cut(fallbacks=fallbacks)
    replay.page_table[0] = 8
    with pytest.raises(ValueError, match=r"^page_table: slot 0 has page 8: must be in \[0, 8\)"):
        replay.step(1, 1)
    assert (executor.launched, fallbacks.events) == ([], ())


@pytest.mark.parametrize(
    ("nodes", "given", "failure", "kind", "says"),
    [
        (None, {"threads": 0}, "", InputError, "threads 0: must be in"),
        (
            None,
            {},
            "cuMemAllocHost=2@3",
            InputError,
            "values between the device and the host: 64 bytes of pinned host",
        ),
        ([replace(doubling()[0], kernel="gone", op=None)], {}, "", CoreError, "the library has no kernel gone"),
        ([replace(doubling()[2], kernel=DEVICE)], {}, "", CoreError, "node 0: kernel 'device' and op 'add'"),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    open_cut: Open, fake: FakeCuda, nodes: Any, given: dict[str, Any], failure: str, kind: type[Exception], says: str
) -> None:
    if failure:
        fake.fail(failure)
    with pytest.raises(kind, match=says):
        open_cut(nodes, **given)
    assert not fake.blocks() and not fake.contexts()


def test_a_closed_replay_has_given_everything_back(open_cut: Open, fake: FakeCuda) -> None:
    before = len(os.listdir("/proc/self/task"))
    replay = open_cut(threads=3)
    step_right(replay, 1)
    assert len(os.listdir("/proc/self/task")) == before + 2
    replay.close()
    replay.close()
    assert not fake.blocks() and not fake.contexts() and len(os.listdir("/proc/self/task")) == before
    with pytest.raises(ReplayDead, match="closed"):
        replay.step(1, 0)
