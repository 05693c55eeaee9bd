"""A device that serves: its memory and this machine's, and what it is refused for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.config import MIB, MemorySize
from flare.core.cuda_graph import Bucket, HostCut, HostRows, Pointer
from flare.core.directory import Core, open_core
from flare.core.oracle import read_oracle
from flare.errors import CoreError, InputError, SettingError
from flare.replay import cuda, cuda_driver
from flare.replay.oracle import check_core, pages_needed
from flare.replay.program import choose_isa, open_replay
from flare.report import Laps
from flare.runtime import Runtime
from tests.support.backends import choose, settings, with_cuda
from tests.support.cuda_cubins import assemble
from tests.support.forged_cores import forge_manifest
from tests.support.forged_targets import add_host


@pytest.fixture
def both(tiny_core: Path, tmp_path: Path) -> Path:
    """A core with a cpu target and a forged cuda one."""
    return with_cuda(tiny_core, tmp_path / "core")


def between(offset: int, row_bytes: int) -> HostRows:
    """Values of two tokens that go between a device and the host."""
    return HostRows(buffer=Pointer(segment="arena", offset=offset, bytes=2 * row_bytes), row_bytes=row_bytes, count="T")


class Device:
    """A device with a name and memory, that is either open or closed."""

    name, architecture = "NVIDIA H200", "sm_90a"
    capability, shared_bytes = (9, 0), 227 << 10

    def __init__(self, free: int) -> None:
        self.free = free
        self.closed = 0

    def __str__(self) -> str:
        return self.name

    def memory(self) -> tuple[int, int]:
        return self.free, 2 * self.free

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device with 10 MiB free comes up, and graphs without nodes are there for it, of three pieces; replays of it only say
    what they were given."""
    found = Device(free=10 * MIB)
    cuts = [
        HostCut(at=1, gives=[between(0, 7)], takes=[between(64, 20), between(256, 30)]),
        HostCut(at=1, gives=[between(0, 1000)], takes=[between(64, 900)]),
    ]
    step = [Bucket(tokens=1, rows=1, nodes=[], host=[]), Bucket(tokens=2, rows=1, nodes=[], host=cuts)]
    graphs = SimpleNamespace(arch="sm_90a", kernels=[], step=step, sample=[], score=[])
    monkeypatch.setattr(cuda_driver, "open_device", lambda architectures: found)
    monkeypatch.setattr("flare.replay.cuda_program.open_cuda_graphs", lambda core, architecture: (graphs, {}))
    monkeypatch.setattr(cuda, "CudaReplay", lambda program, **given: SimpleNamespace(program=program, **given))
    return found


def test_a_device_serves_from_its_own_memory(both: Path, device: Device) -> None:
    core = open_core(both)
    segments = core.manifest.cuda.segments
    reserved = segments.weights_bytes + segments.arena_bytes + segments.io_bytes
    page, limits = segments.kv_page_bytes, core.manifest.limits
    full = limits.slots * -(-limits.max_context // limits.page_tokens)
    for wanted, budget in (
        (None, int((device.free - reserved) * 0.9)),
        (MemorySize(share=0.25), int((device.free - reserved) * 0.25)),
        (MemorySize(bytes=3 * MIB), 3 * MIB),
    ):
        backend = choose(both, kv_memory=wanted)
        assert backend.kv_pages == min(full, budget // page)
        assert (backend.kind, backend.architecture) == ("cuda", "sm_90a")
        assert backend.device == "NVIDIA H200 (sm_90a)" and not device.closed
        replay = backend.open()
        assert (replay.device, replay.kv_pages) == (device, backend.kv_pages)
        assert replay.program.segments == segments and replay.program.weights == core.file("weights-cuda.safetensors")


def test_a_device_without_the_shared_memory_did_not_come_up(
    both: Path, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernels, of an older architecture, would be refused by the driver; the static buffer has 100 bytes."""
    kernel = SimpleNamespace(cubin="k", name="plain", source="attention_prefill.attention_tile", shared=112 << 10)
    graphs = SimpleNamespace(arch="sm_80", kernels=[kernel], step=[], sample=[], score=[])
    cubins = {"k": assemble(tmp_path, "ptxas", "sm_80")}
    monkeypatch.setattr("flare.replay.cuda_program.open_cuda_graphs", lambda core, architecture: (graphs, cubins))
    device.name, device.capability, device.shared_bytes = "NVIDIA A10", (8, 6), 99 << 10
    reason = (
        "NVIDIA A10 gives a block 101376 bytes of shared memory, kernel attention_prefill.attention_tile of sm_80 takes "
        "114788; export the core with sm_86 among its --target cuda"
    )
    backend = choose(both, kv_memory=MemorySize(bytes=MIB))
    assert (backend.kind, device.closed) == ("cpu", 1)
    assert caplog.messages == [
        f"CPU FALLBACK at start: no device backend came up, the core's cpu target serves: {reason}"
    ]
    with pytest.raises(InputError) as caught:
        choose(both, cpu_fallback=False)
    assert reason in str(caught.value) and caught.value.exit_code == 2 and device.closed == 2
    device.shared_bytes = (112 << 10) + 100
    assert choose(both).kind == "cuda" and device.closed == 2


def test_a_host_part_is_served_from_this_machines_memory(
    both: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many pages as both sides have memory for, here beside pinned memory for what one piece takes and gives, too;
    threads, huge pages and fallbacks are the server's."""
    add_host(both)
    core = open_core(both)
    page = core.manifest.cuda.host.program.segments.kv_page_bytes
    segments = core.manifest.cuda.host.program.segments
    pinned = 4096 + 2 * (20 + 30 + 1000)
    reserved = segments.weights_bytes + segments.arena_bytes + segments.io_bytes + pinned
    for wanted, free, pages in (
        (None, reserved + 60 * page, 30),
        (MemorySize(share=0.25), reserved + 60 * page, 15),
        (MemorySize(bytes=8 << 15), reserved + 60 * page, 8),  # of the device, whose pages are larger
    ):
        monkeypatch.setattr("flare.memory.free_memory", lambda free=free: free)
        backend = choose(both, kv_memory=wanted, huge_pages=True)
        assert backend.kv_pages == pages and backend.kind == "cuda"
        replay = backend.open()
        assert (replay.kv_pages, replay.threads, replay.huge_pages) == (pages, 1, True)
        assert replay.fallbacks.allowed and replay.program.host.ops == {"silu_mul": 2}
        assert replay.program.host.program.kv_page_bytes == page
    monkeypatch.setattr("flare.memory.free_memory", lambda: reserved - 1)
    with pytest.raises(InputError, match="^this machine has .* of memory free, the core's weights and work areas take"):
        choose(both)
    assert device.closed == 1
    monkeypatch.setattr("flare.memory.free_memory", lambda: reserved + page)
    with pytest.raises(SettingError, match=r" MiB on this machine, at least 2 are needed; .* MiB are free; free some"):
        choose(both)
    monkeypatch.setattr("flare.memory.free_memory", lambda: reserved + 2 * page)
    with pytest.raises(
        SettingError, match=r"^8\.0 MiB: 0\.\d MiB are free on this machine beside the weights; ask for l"
    ):
        choose(both, kv_memory=MemorySize(bytes=8 * MIB))
    device.free = MIB
    with pytest.raises(
        SettingError, match=r"^8\.0 MiB: .* MiB are free on NVIDIA H200 beside the weights; ask for less$"
    ):
        choose(both, kv_memory=MemorySize(bytes=8 * MIB))


@pytest.mark.parametrize("page", [1 << 12, 1 << 17], ids=["smaller than the device's", "larger"])
def test_the_memory_that_a_check_asks_for_is_enough_on_both_sides(both: Path, device: Device, page: int) -> None:
    add_host(both)
    forge_manifest(both, lambda m: m["targets"][1]["host"]["program"]["segments"].update(kv_page_bytes=page))
    core = open_core(both)
    needed = pages_needed([prompt.tokens for prompt in read_oracle(core).prompts], 16)
    replay: Any = SimpleNamespace(page_tokens=16, kv_pages=needed - 1)
    with pytest.raises(SettingError) as caught:
        check_core(core, core.manifest.cuda, replay, "sm_90a")
    asked = re.search(r"ask for (\d+) bytes", str(caught.value))
    assert asked and choose(both, kv_memory=MemorySize(bytes=int(asked[1]))).kv_pages == needed
    assert choose(both, kv_memory=MemorySize(bytes=int(asked[1]) - 1)).kv_pages < needed


def test_a_device_too_small_for_the_weights_is_named(both: Path, device: Device) -> None:
    """Whatever was asked for keys and values: no amount of that helps, and no setting is blamed."""
    segments = open_core(both).manifest.cuda.segments
    reserved = segments.weights_bytes + segments.arena_bytes + segments.io_bytes
    device.free = reserved - MIB // 2
    for wanted in (None, MemorySize(share=0.5), MemorySize(bytes=MIB)):
        with pytest.raises(InputError) as caught:
            choose(both, kv_memory=wanted)
        assert not isinstance(caught.value, SettingError) and caught.value.exit_code == 2
        assert str(caught.value) == (
            f"NVIDIA H200 has {device.free / MIB:.1f} MiB of memory free, the core's weights and work areas take "
            f"{reserved / MIB:.1f} MiB: free some memory, take something larger, or export the core in a smaller format "
            "(--weights)"
        )
    assert device.closed == 3
    device.free = reserved + segments.kv_page_bytes
    with pytest.raises(
        SettingError, match=r" MiB on NVIDIA H200, at least 2 are needed; .* MiB are free; free some memory$"
    ):
        choose(both)


def test_a_start_that_fails_gives_the_device_back(both: Path, device: Device, monkeypatch: Any) -> None:
    with pytest.raises(SettingError) as caught:
        choose(both, kv_memory=MemorySize(bytes=1 << 40))
    assert caught.value.setting == "kv_memory" and device.closed == 1
    with pytest.raises(InputError, match="temperature|budget"):
        Runtime.load(settings(both, thinking_token_budget=5))
    assert device.closed == 2

    def bad_graphs(core: Core, architecture: str) -> Any:
        raise CoreError("graphs: bad")

    monkeypatch.setattr("flare.replay.cuda_program.open_cuda_graphs", bad_graphs)
    with pytest.raises(CoreError, match="graphs: bad"):
        Runtime.load(settings(both))
    assert device.closed == 3


def test_the_report_and_the_model_name_the_device(both: Path, device: Device, monkeypatch: Any) -> None:
    """The replay is one of the cpu target's, standing for the device's."""
    opened: list[Any] = []

    def replay(program: Any, *, device: Device, kv_pages: int, **_: Any) -> Any:
        opened.append(open_replay(open_core(both), threads=1, kv_pages=kv_pages))
        return opened[-1]

    monkeypatch.setattr(cuda, "CudaReplay", replay)
    laps = Laps()
    runtime = Runtime.load(settings(both, check=True), laps)
    try:
        assert (runtime.model.target, runtime.model.device) == ("cuda", "NVIDIA H200 (sm_90a)")
        assert laps.notes[0] == f"target: cuda on NVIDIA H200 (sm_90a), {opened[0].kv_pages} kv pages"
        assert laps.notes[1].startswith("check: sm_90a ")
        assert " positions within tolerance (not run at export), " in laps.notes[1]
        assert runtime.fallbacks.events == ()
    finally:
        runtime.close()


def test_the_check_of_a_device_has_the_tolerance_of_its_numbers(both: Path) -> None:
    """A device that rounds to bf16 may be farther from the reference than f32 weights allow, but never wrong."""
    core = open_core(both)
    target = core.manifest.cuda
    assert target.weights.formats.keys() == {"f32"}
    pages = pages_needed([prompt.tokens for prompt in read_oracle(core).prompts], 16)
    with open_replay(core, threads=1, kv_pages=pages) as replay:
        score = replay.score

        def shifted(by: float) -> Callable[[int, int], None]:
            def changed(first: int, count: int) -> None:
                score(first, count)
                for row in range(first, first + count):
                    replay.logprobs[row].chosen -= by

            return changed

        replay.score = shifted(0.05)
        assert "within tolerance" in check_core(core, target, replay, "sm_90a")
        with pytest.raises(CoreError, match="out of tolerance|differ"):
            check_core(core, core.manifest.cpu, replay, choose_isa(core.manifest.cpu))
        replay.score = shifted(0.5)
        with pytest.raises(CoreError, match="on sm_90a are out of tolerance"):
            check_core(core, target, replay, "sm_90a")
