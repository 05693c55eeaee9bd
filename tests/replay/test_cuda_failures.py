"""What becomes of a replay when the driver fails: at load nothing is left behind, later a call or the device is lost."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, string_at
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flare.core.cuda_graph import Bucket, Edge, KernelNode
from flare.errors import CoreError, FlareError, InputError, ReplayDead
from flare.replay import cuda_weights
from flare.replay.cuda import CudaReplay
from flare.replay.cuda_driver import DeviceError, open_device
from flare.replay.cuda_program import NODE_BYTES, CudaProgram
from tests.replay.conftest import Open
from tests.replay.test_cuda import device_array, expected, fill
from tests.support.fake_cuda.library import FakeCuda
from tests.support.tiny_cuda.core import WEIGHTS_OFFSET, tiny_program
from tests.support.tiny_cuda.sizes import PAGE_BYTES, V

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go through buffers of 24 bytes: many turns, and one that is not full."""
    monkeypatch.setattr(cuda_weights, "STAGING_BYTES", 24)


@pytest.mark.parametrize(
    "failure, kind, text",
    [
        ("cuMemGetInfo=999", ReplayDead, "cuMemGetInfo: CUDA_ERROR_UNKNOWN"),
        ("cuMemAlloc=2", InputError, f"weights: 256 bytes of memory of fake device 0: cuMemAlloc: {OUT_OF_MEMORY}"),
        ("cuMemAlloc=2@4", InputError, f"8 kv pages: 1024 bytes of memory of fake device 0: cuMemAlloc: {OUT_OF_MEMORY}"),
        ("cuMemAlloc=2@4", InputError, "; ask for less kv memory, or free some"),
        ("cuMemAlloc=2@3", InputError, "io: "),
        ("cuMemAlloc=2@3", InputError, "; free some memory of the device"),
        ("cuGraphUpload=2", InputError, "; ask for less kv memory, or free some"),
        ("cuMemAllocHost=2", InputError, "host: "),
        ("cuMemAllocHost=2@3", InputError, "weights: a buffer to copy them by: 24 bytes of pinned host memory"),
        ("cuEventCreate=2", InputError, f"cuEventCreate: {OUT_OF_MEMORY}"),
        ("cuMemcpyHtoDAsync=700@3", ReplayDead, "cuMemcpyHtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuEventSynchronize=719@2", ReplayDead, "cuEventSynchronize: CUDA_ERROR_LAUNCH_FAILED"),
        ("cuLibraryLoadData=209@2", CoreError, ".cubin: the driver (CUDA 13.0) of fake device 0 refuses it: "),
        ("cuLibraryGetKernel=500@3", CoreError, "kernel 'project': the driver"),
        ("cuKernelGetFunction=2", InputError, f"cuKernelGetFunction: {OUT_OF_MEMORY}"),
        ("cuGraphCreate=2", InputError, "cuGraphCreate"),
        ("cuGraphAddNode=1@8", CoreError, "cuda-sm_90a.msgpack: step[1]: node 2 ('tiny write'): the driver refuses it: "),
        ("cuGraphAddNode=2@8", InputError, "cuGraphAddNode"),
        ("cuGraphInstantiate=801", DeviceError, "cuGraphInstantiateWithFlags"),
        ("cuGraphUpload=2@6", InputError, "cuGraphUpload"),
        ("cuStreamSynchronize=719@2", ReplayDead, "cuStreamSynchronize"),
    ],
)  # fmt: skip
def test_a_load_that_fails_leaves_nothing(
    open_tiny: Open, small_buffers: None, fake: FakeCuda, failure: str, kind: type[FlareError], text: str
) -> None:
    fake.fail(failure.replace("cuGraphInstantiate=", "cuGraphInstantiateWithFlags="))
    with pytest.raises(kind) as error:
        open_tiny()
    shown = str(error.value)
    assert text.replace("cuGraphInstantiateWithFlags", "cuGraphInstantiate") in shown and "\n" not in shown
    if kind is not ReplayDead:
        assert not fake.blocks() and not fake.contexts()
    fake.reset()
    with open_tiny() as replay:
        replay.step(1, 1)


def run(replay: CudaReplay, page: int) -> None:
    """A step on a page, a draw with a history that has the page's number, and a score: all are right."""
    replay.page_table[0] = page
    replay.rows[0] = 1
    replay.step(fill(replay, [(0, 0, [3, 4])]), 1)
    assert device_array(replay, "page_table", c_int32, 1)[0] == page
    row = replay.sampling[0]
    row.presence, row.history, row.history_len = 1.0, (c_int32 * 3)(1, page, 3), 3
    replay.sample(1)
    assert replay.sampled[0] == (63 + 4 + page) % V
    replay.targets[0] = 2
    replay.score(0, 1)
    assert replay.logprobs[0].chosen == expected([3, 4])[1][2]
    assert replay.logits(0).tolist() == expected([3, 4])[1]


# Calls of one `run`: HtoD copies of a page table's row, parameters, a history, `first`, targets and wanted.
CALLS = [*(f"cuMemcpyHtoDAsync@{n}" for n in range(1, 7)), "cuMemcpyDtoHAsync@1", "cuMemcpyDtoH@1"]
CALLS += [f"{function}@{n}" for function in ("cuGraphLaunch", "cuStreamSynchronize") for n in (1, 2, 3)]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_gives_nothing_and_the_next_is_right(open_tiny: Open, fake: FakeCuda, call: str) -> None:
    """What was sent before the failure is sent again: the device's page table and histories are not taken for granted."""
    replay = open_tiny()
    run(replay, 5)
    function, _, number = call.partition("@")
    fake.fail(f"{function}=701@{number}")
    with pytest.raises(DeviceError, match=f"{function}: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        run(replay, 6)
    run(replay, 6)


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_device_is_a_dead_replay(open_tiny: Open, fake: FakeCuda, call: str) -> None:
    replay = open_tiny()
    run(replay, 5)
    function, _, number = call.partition("@")
    fake.fail(f"{function}=719@{number}")
    with pytest.raises(ReplayDead) as error:
        run(replay, 6)
    wanted = f"{function}: CUDA_ERROR_LAUNCH_FAILED: injected into "
    assert str(error.value).startswith(wanted) and "start it again" in str(error.value)
    for again in (lambda: replay.step(1, 0), lambda: replay.sample(0), lambda: replay.logits(0)):
        with pytest.raises(ReplayDead) as later:
            again()
        assert str(later.value) == str(error.value)
    replay.close()
    replay.close()


def test_a_kernel_that_fails_on_the_device(open_tiny: Open, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known when the device is waited for, and `meanwhile` ran."""
    replay = open_tiny()
    called: list[int] = []

    def fail(*_: Any) -> None:
        assert called
        raise IndexError("a bad address")

    monkeypatch.setattr(executor, "_launch", fail)
    with pytest.raises(ReplayDead, match="cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED: write: the executor failed"):
        replay.step(1, 1, lambda: called.append(1))
    assert len(executor.failures) == 1 and "a bad address" in executor.failures[0]


def test_a_device_lost_while_a_failure_is_settled(open_tiny: Open, fake: FakeCuda) -> None:
    """The worse of two failures counts."""
    replay = open_tiny()

    def fail() -> None:
        fake.fail("cuStreamSynchronize=700")
        raise LookupError

    with pytest.raises(ReplayDead, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        replay.step(1, 1, fail)
    with pytest.raises(ReplayDead, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        replay.step(1, 1)


@pytest.mark.parametrize("result", ["304@1+", "2@1+", "12345"])
def test_a_failure_that_stays_is_a_dead_replay(open_tiny: Open, fake: FakeCuda, result: str) -> None:
    """Whatever the driver calls it: else every later step would fail, and nobody be told to start the process again."""
    replay = open_tiny()
    fake.fail(f"cuStreamSynchronize={result}")
    with pytest.raises(ReplayDead, match="cuStreamSynchronize: .*; the device is lost to this process, start it again"):
        replay.step(1, 1)
    fake.fail("")
    with pytest.raises(ReplayDead, match="start it again"):
        replay.step(1, 1)


# The memory plan.


def fixed_bytes(program: CudaProgram) -> int:
    """What the tiny core takes beside its pages, summed up from its parts."""
    nodes = 2 * 5 + 2 * 3 + 2
    cubins = sum(len(data) for data in program.cubins.values())
    return 4 * V + program.segments.arena_bytes + program.segments.io_bytes + cubins + NODE_BYTES * nodes


@pytest.mark.parametrize("kv_pages", [0, -1, 2**31])
def test_bad_counts_of_pages_are_refused(open_tiny: Open, kv_pages: int) -> None:
    with pytest.raises(InputError, match=rf"kv_pages {kv_pages}: must be in \[1, 2147483647\]"):
        open_tiny(kv_pages=kv_pages)


def test_memory_is_counted_before_it_is_taken(
    open_tiny: Open, fake: FakeCuda, tiny_kernels: Path, tmp_path: Path
) -> None:
    program = tiny_program(tiny_kernels, tmp_path / "other")
    fixed = fixed_bytes(program)
    assert program.reserved_bytes == fixed
    fake.set("memory", fixed + 100 * PAGE_BYTES)
    open_tiny(kv_pages=100).close()
    fake.fail("cuMemAlloc=999")  # the first that is taken would lose the device
    with pytest.raises(InputError) as error:
        open_tiny(kv_pages=101)
    mib = (fixed + 101 * PAGE_BYTES) / 2**20
    assert str(error.value) == (
        f"kv_pages 101: {mib:.1f} MiB are needed ({fixed / 2**20:.1f} MiB beside the pages of 0.000 MiB), fake device 0 has "
        f"{(fixed + 100 * PAGE_BYTES) / 2**20:.1f} MiB free; at most 100 pages fit: ask for less kv memory"
    )
    assert not fake.blocks() and not fake.contexts()
    fake.set("memory", fixed)
    with pytest.raises(InputError, match="free; free some, or take a larger device"):
        open_tiny(kv_pages=1)


# Weights.


def test_weights_arrive_whole_through_small_buffers(open_tiny: Open, small_buffers: None, fake: FakeCuda) -> None:
    """Each buffer is used many times, and only after its last copy is done; then both are freed."""
    open_tiny(values=[3.0 * v for v in range(V)])
    begin = next(begin for begin, size in fake.blocks() if size == 4 * V)
    assert string_at(begin, 4 * V) == bytes((c_float * V)(*(3.0 * v for v in range(V))))
    assert [size for _, size in fake.blocks()].count(24) == 0


def test_weights_that_are_not_all_there(open_tiny: Open, fake: FakeCuda, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(WEIGHTS_OFFSET + 255))
    with pytest.raises(CoreError) as error:
        open_tiny(weights=short)
    assert str(error.value) == "short: weights: 256 bytes at 4096 reach beyond the file's 4351"
    assert not fake.blocks()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_weights_that_are_cut_short_while_they_are_read(
    open_tiny: Open, small_buffers: None, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """At the second read a copy is under way: buffers are freed when it is done."""
    real, calls = cuda_weights.os.preadv, []

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        if len(calls) == cut:
            (tmp_path / "weights" / "weights-cuda.safetensors").write_bytes(bytes(offset))
        return real(file, buffers, offset)

    monkeypatch.setattr(cuda_weights.os, "preadv", preadv)
    ends = WEIGHTS_OFFSET + 24 * (cut - 1)
    with pytest.raises(
        CoreError, match=f"weights-cuda.safetensors: weights: the file ends at byte {ends} while it is read"
    ):
        open_tiny()
    assert not fake.blocks() and not fake.contexts() and not fake.misfrees()


@pytest.mark.parametrize("failure", ["cuEventRecord=701", "cuMemcpyHtoDAsync=701@2", "cuStreamSynchronize=701"])
def test_weights_whose_copies_fail(open_tiny: Open, small_buffers: None, fake: FakeCuda, failure: str) -> None:
    fake.fail(failure)
    with pytest.raises(DeviceError, match=f"{failure.partition('=')[0]}: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        open_tiny()
    assert not fake.blocks() and not fake.contexts() and not fake.misfrees()


def test_a_device_is_closed_when_its_work_is_done(fake: FakeCuda) -> None:
    device = open_device(["sm_90a"])
    target, source = device.allocate(64, "weights"), device.allocate_host(64, "host")
    device.upload(target, source, 64)
    device.record(device.event())
    device.close()
    assert not fake.blocks() and not fake.contexts() and not fake.misfrees()


# The fake: what it would not let pass.


def with_node(program: CudaProgram, index: int, change: Callable[[Any], Any]) -> CudaProgram:
    """The program with a node of its first step changed."""
    step = program.graphs.step[0]
    nodes = [change(node) if i == index else node for i, node in enumerate(step.nodes)]
    bucket = Bucket(tokens=step.tokens, rows=step.rows, nodes=nodes)
    return replace(program, graphs=structs.replace(program.graphs, step=[bucket, *program.graphs.step[1:]]))


def shifted(node: KernelNode) -> KernelNode:
    return structs.replace(node, args=node.args[1:] + node.args[:1])


@pytest.mark.parametrize(
    "index, change, text",
    [
        (2, lambda node: structs.replace(node, grid=(0, 1, 1)), "a grid of 0 x 1 x 1"),
        (2, lambda node: structs.replace(node, grid=(1, 1, 65536)), "a grid of 1 x 1 x 65536"),
        (3, lambda node: structs.replace(node, after=[Edge(node=2), Edge(node=2)]), "bad edges"),
        (2, lambda node: structs.replace(node, after=[Edge(node=0, programmatic=True)]), "bad edges"),
        (0, lambda node: structs.replace(node, source=structs.replace(node.source, offset=1 << 30)), "from outside of memory"),
        (0, lambda node: structs.replace(node, target=structs.replace(node.target, offset=1 << 30)), "to outside of memory"),
        (1, lambda node: structs.replace(node, target=structs.replace(node.target, bytes=1 << 20)), "outside of memory"),
    ],
)  # fmt: skip
def test_the_fake_refuses_bad_nodes(
    fake: FakeCuda, tiny_kernels: Path, tmp_path: Path, index: int, change: Callable[[Any], Any], text: str
) -> None:
    program = with_node(tiny_program(tiny_kernels, tmp_path / "core"), index, change)
    with pytest.raises(CoreError, match=rf"step\[0\]: node {index} .*: cuGraphAddNode: .*{text}"):
        CudaReplay(program, device=open_device(["sm_90a"]), kv_pages=8)


@pytest.mark.parametrize("threads, shared, text", [(64, 0, "a block of 64 threads, it requires 32"),
                                                   (32, 300000, "cuFuncSetAttribute")])  # fmt: skip
def test_the_fake_holds_launches_to_the_cubin(
    fake: FakeCuda, tiny_kernels: Path, tmp_path: Path, threads: int, shared: int, text: str
) -> None:
    program = tiny_program(tiny_kernels, tmp_path / "core")
    kernels = [structs.replace(kernel, threads=threads, shared=shared) for kernel in program.graphs.kernels]
    program = replace(program, graphs=structs.replace(program.graphs, kernels=kernels))
    with pytest.raises(CoreError, match=text):
        CudaReplay(program, device=open_device(["sm_90a"]), kv_pages=8)


def first_logits(program: CudaProgram) -> list[float] | None:
    """Of a step of two tokens, the last one's; None where the executor failed."""
    with CudaReplay(program, device=open_device(["sm_90a"]), kv_pages=8) as replay:
        replay.rows[0] = 1
        try:
            replay.step(fill(replay, [(0, 0, [5, 6])]), 1)
            return replay.logits(0).tolist()
        except ReplayDead as error:
            assert "executor failed" in str(error)
            return None


@pytest.mark.parametrize(
    "change",
    [
        lambda node: structs.replace(node, after=[]),
        lambda node: structs.replace(node, after=node.after[:1]),
        shifted,
    ],
    ids=["no edges", "an edge missing", "arguments shifted"],
)
def test_the_fake_shows_what_is_wrong_in_a_graph(
    fake: FakeCuda, executor: Any, tiny_kernels: Path, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    """Without an edge a node runs too early, with wrong arguments it computes something else or fails."""
    program = with_node(tiny_program(tiny_kernels, tmp_path / "core"), 3, change)
    assert first_logits(program) != expected([5, 6])[1]


def without_waits(program: CudaProgram) -> CudaProgram:
    """The program with cubins that ask for the next kernel where they should wait: PREEXIT instead of ACQBULK."""
    cubins, names = {}, {}
    for file, data in program.cubins.items():
        changed = data.replace(b"\x2e\x78" + bytes(6), b"\x2d\x78" + bytes(6))
        names[file] = f"kernels/{sha256(changed).hexdigest()[:16]}.cubin"
        cubins[names[file]] = changed
    kernels = [structs.replace(kernel, cubin=names[kernel.cubin]) for kernel in program.graphs.kernels]
    return replace(program, graphs=structs.replace(program.graphs, kernels=kernels), cubins=cubins)


def test_the_fake_shows_a_kernel_that_does_not_wait(
    fake: FakeCuda, executor: Any, tiny_kernels: Path, tmp_path: Path
) -> None:
    """Behind its programmatic edge it runs too early, and so does what waits for its end; behind full ones all is well."""
    program = tiny_program(tiny_kernels, tmp_path / "core")
    hasty = without_waits(program)
    executor.add(hasty.graphs)
    full = with_node(hasty, 3, lambda node: structs.replace(node, after=[Edge(node=1), Edge(node=2)]))
    assert first_logits(program) == first_logits(full) == expected([5, 6])[1]
    assert first_logits(hasty) != expected([5, 6])[1]
    assert executor.launched[-3:] == ["kernels.gather", "kernels.project", "kernels.write"]
