"""Which target of a core serves, on which device, and what happens where none comes up."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flare
from flare.backend import choose_backend
from flare.config import MIB, MemorySize, RuntimeSettings
from flare.core.cuda_graph import Bucket, HostCut, HostRows, Pointer
from flare.core.directory import Core, open_core
from flare.core.oracle import read_oracle
from flare.errors import CoreError, InputError, SettingError
from flare.fallbacks import NO_DEVICE, Fallback, Fallbacks
from flare.replay import cuda, cuda_driver
from flare.replay.cuda_driver import NoDevice
from flare.replay.oracle import check_core, pages_needed
from flare.replay.program import choose_isa, open_replay
from flare.report import Laps
from flare.runtime import Runtime
from flare.sources import configure
from tests.support.cuda_cubins import assemble
from tests.support.forged_cores import forge_manifest
from tests.support.forged_targets import add_cuda, add_host

ROOT = Path(__file__).resolve().parent.parent
REASON = "no CUDA driver: libcuda.so.1 does not load; install NVIDIA's driver"
ASKED = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}


@pytest.fixture
def both(tiny_core: Path, tmp_path: Path) -> Path:
    """A core with a cpu target and a forged cuda one."""
    core = Path(shutil.copytree(tiny_core, tmp_path / "core"))
    add_cuda(core)
    return core


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """No device comes up; the architectures that were asked for are kept."""
    asked: list[list[str]] = []

    def open_device(architectures: Any) -> Any:
        asked.append(list(architectures))
        raise NoDevice(REASON)

    monkeypatch.setattr(cuda_driver, "open_device", open_device)
    return asked


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


def settings(core: Path, **given: Any) -> RuntimeSettings:
    return RuntimeSettings(core=str(core), threads=1, **given)


def choose(core: Path, **given: Any) -> Any:
    chosen = settings(core, **given)
    return choose_backend(open_core(core), chosen, Fallbacks(allowed=chosen.cpu_fallback))


def test_the_cpu_target_stands_in_and_says_so(
    both: Path, tiny_core: Path, no_device: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are those of a cpu core; the log, the answer, the status and the metrics count the steps that made them."""
    with flare.open(tiny_core, threads=1, kv_memory="4MiB") as plain:
        wanted = plain.request("/v1/completions", ASKED).json()
        assert "flare_warnings" not in wanted
        assert plain.request("/v1/flare/status").json()["cpu_fallback"] == {"allowed": True, "total": 0, "events": []}
    with caplog.at_level(logging.WARNING), flare.open(both, threads=1, kv_memory="4MiB") as standing_in:
        answer = standing_in.request("/v1/completions", ASKED).json()
        assert answer["choices"] == wanted["choices"]
        steps = standing_in.runtime.stats().steps
        warning = {"type": "cpu_fallback", "cause": NO_DEVICE, "count": steps}
        assert steps >= 5 and answer["flare_warnings"] == [warning]
        status = standing_in.request("/v1/flare/status").json()
        assert status["cpu_fallback"] == {
            "allowed": True,
            "total": steps,
            "events": [{"cause": NO_DEVICE, "count": steps}],
        }
        assert status["target"]["kind"] == "cpu"
        metrics = standing_in.request("/metrics?format=json").json()
        assert metrics["cpu_fallback_total"] == steps
        assert standing_in.request("/v1/models").json()["data"][0]["flare"]["target"] == "cpu"
    assert no_device == [["sm_90a"]]
    lines = [record.getMessage() for record in caplog.records]
    told = [2**n for n in range(10) if 2**n <= steps]
    assert lines == [
        f"CPU FALLBACK at start: no device backend came up, the core's cpu target serves: {REASON}",
        *(f"CPU FALLBACK ({count} so far for this cause): {NO_DEVICE}" for count in told),
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert REASON not in str([answer, status, metrics])  # of the machine: nobody but the operator hears it


def test_where_nothing_may_stand_in_the_start_is_refused(both: Path, no_device: list[list[str]]) -> None:
    with pytest.raises(InputError) as caught:
        choose(both, cpu_fallback=False)
    refused = f"no device backend came up and CPU fallback is disabled: {REASON}; or allow the fallback"
    assert str(caught.value) == refused and caught.value.exit_code == 2
    with pytest.raises(InputError) as caught:
        flare.open(both, threads=1, cpu_fallback=False)
    assert str(caught.value) == f"cpu_fallback: {refused}"


def test_a_core_for_devices_alone_needs_one(tiny_core: Path, tmp_path: Path, no_device: list[list[str]]) -> None:
    core = Path(shutil.copytree(tiny_core, tmp_path / "core"))
    add_cuda(core, alone=True)
    with pytest.raises(InputError) as caught:
        choose(core)
    line = str(caught.value)
    assert line.startswith("no device backend came up, and core ") and REASON in line
    assert line.endswith("; or export the core with --target cpu as well") and caught.value.exit_code == 2
    with pytest.raises(
        InputError, match="disabled: .*; or export the core with --target cpu as well and allow the fallback$"
    ):
        choose(core, cpu_fallback=False)


def test_a_cpu_core_falls_back_to_nothing(tiny_core: Path, no_device: list[list[str]]) -> None:
    backend = choose(tiny_core, cpu_fallback=False, kv_memory=MemorySize(bytes=MIB))
    assert backend.kind == "cpu" and backend.device == choose_isa(backend.target) and no_device == []


@pytest.mark.parametrize(
    ("options", "variables", "place"),
    [
        (["--no-cpu-fallback"], {"FLARE_CPU_FALLBACK": "0"}, "--no-cpu-fallback"),
        ([], {"FLARE_REQUIRE_DEVICE_KERNELS": "1"}, "FLARE_REQUIRE_DEVICE_KERNELS"),
    ],
)
def test_the_command_refuses_with_one_line(
    both: Path, options: list[str], variables: dict[str, str], place: str
) -> None:
    """It names what disabled the fallback. Whatever this machine has: no device is visible to the process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLARE_")}
    found = subprocess.run(
        [sys.executable, "-m", "flare.cli", "serve", str(both), "--port", "0", *options],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found
    assert found.stderr.startswith(f"flare: {place}: no device backend came up and CPU fallback is disabled: no CUDA ")
    assert found.stderr.endswith("; or allow the fallback\n")


def test_the_command_serves_with_a_warning(both: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLARE_")}
    command = [sys.executable, "-m", "flare.cli", "serve", str(both), "--port", "0", "--kv-memory", "4MiB"]
    with subprocess.Popen(
        command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline()]
            while lines[-1] and not lines[-1].startswith("serving "):
                lines.append(process.stderr.readline())
            assert lines[0].startswith("CPU FALLBACK at start: no device backend came up, "), lines
            assert any(line.startswith("target: cpu on ") for line in lines), lines
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


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


@pytest.mark.parametrize(
    ("variables", "options", "value", "source"),
    [
        ({}, {}, True, "default"),
        ({"FLARE_CPU_FALLBACK": "false"}, {}, False, "FLARE_CPU_FALLBACK"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "1"}, {}, False, "FLARE_REQUIRE_DEVICE_KERNELS"),
        (
            {"FLARE_REQUIRE_DEVICE_KERNELS": "true", "FLARE_CPU_FALLBACK": "1"},
            {},
            False,
            "FLARE_REQUIRE_DEVICE_KERNELS",
        ),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "0"}, {}, True, "default"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "0", "FLARE_CPU_FALLBACK": "0"}, {}, False, "FLARE_CPU_FALLBACK"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": ""}, {}, True, "default"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "1"}, {"cpu_fallback": True}, True, "--cpu-fallback"),
        ({}, {"cpu_fallback": False}, False, "--cpu-fallback"),
    ],
)
def test_where_the_setting_comes_from(
    variables: dict[str, str], options: dict[str, object], value: bool, source: str
) -> None:
    configuration = configure(options, variables)
    assert configuration.values["cpu_fallback"] == (value, source) and configuration.warnings == []
    if not value:
        named = "--no-cpu-fallback" if source == "--cpu-fallback" else source
        assert configuration.place("cpu_fallback") == named
    assert configure({"core": "c", **options}, variables).runtime().cpu_fallback is value


def test_a_variable_that_is_no_switch_is_named() -> None:
    with pytest.raises(InputError) as caught:
        configure({}, {"FLARE_REQUIRE_DEVICE_KERNELS": "yes"})
    assert str(caught.value) == "FLARE_REQUIRE_DEVICE_KERNELS: 'yes' is not a switch: true or false"


def test_counts_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    fallbacks.record("a")
    before = fallbacks.counts()
    assert fallbacks.since(before) == ()
    for cause in "bbcb":
        fallbacks.record(cause)
    assert fallbacks.since(before) == (Fallback("b", 3), Fallback("c", 1))
    assert fallbacks.events == (Fallback("a", 1), Fallback("b", 3), Fallback("c", 1))
    told = [(1, "a"), (1, "b"), (2, "b"), (1, "c")]
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU FALLBACK ({count} so far for this cause): {cause}" for count, cause in told
    ]


def test_threads_count_together(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    threads = [threading.Thread(target=lambda: [fallbacks.record("a") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fallbacks.events == (Fallback("a", 4000),)
    assert len(caplog.records) == 12  # 1 to 2048
