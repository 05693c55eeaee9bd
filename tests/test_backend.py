"""Which target of a core serves, and what happens where no device comes up."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flare
from flare.config import MIB, MemorySize
from flare.errors import InputError
from flare.fallbacks import NO_DEVICE
from flare.replay import cuda_driver
from flare.replay.cuda_driver import NoDevice
from flare.replay.program import choose_isa
from tests.support.backends import choose, with_cuda
from tests.support.forged_targets import add_cuda

ROOT = Path(__file__).resolve().parent.parent
REASON = "no CUDA driver: libcuda.so.1 does not load; install NVIDIA's driver"
ASKED = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}


@pytest.fixture
def both(tiny_core: Path, tmp_path: Path) -> Path:
    """A core with a cpu target and a forged cuda one."""
    return with_cuda(tiny_core, tmp_path / "core")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """No device comes up; the architectures that were asked for are kept."""
    asked: list[list[str]] = []

    def open_device(architectures: Any) -> Any:
        asked.append(list(architectures))
        raise NoDevice(REASON)

    monkeypatch.setattr(cuda_driver, "open_device", open_device)
    return asked


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
