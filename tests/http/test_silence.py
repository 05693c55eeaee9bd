"""A device that does not answer any more: the server ends, instead of letting everybody wait without end."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ignition.targets.cuda.export as cuda_export
from flare.http import silence
from flare.http.silence import SILENT_TURNS, Silence
from ignition.export import export_core
from ignition.options import Options
from tests.support.checkpoints import TINY_CUDA, make_checkpoint
from tests.support.fake_cuda.server import FakeDeviceServer
from tests.support.stub_cubins import compile_stubs


def test_one_wait_that_goes_on_is_silence() -> None:
    waits = iter([0, *[1] * SILENT_TURNS, 1])
    watch = Silence(lambda: next(waits))
    assert [watch.turn() for _ in range(SILENT_TURNS + 2)] == [False] * (SILENT_TURNS + 1) + [True]


@pytest.mark.parametrize(
    "waits",
    [[2] * 3 * SILENT_TURNS, list(range(1, 6 * SILENT_TURNS, 2)), [*[1] * SILENT_TURNS, *[3] * SILENT_TURNS]],
    ids=["idle", "a wait a turn", "a wait that ended in time"],
)
def test_waits_that_end_are_none(waits: list[int]) -> None:
    given = iter(waits)
    watch = Silence(lambda: next(given))
    assert not any(watch.turn() for _ in waits)


SHORT = """
import sys
from flare.http import silence
silence.TURN_S, silence.SILENT_TURNS = 0.02, 5
from tests.support.fake_cuda import launcher
launcher.main(sys.argv[1:])
"""
"""A launcher whose server waits a tenth of a second."""


def test_a_server_whose_device_does_not_answer_ends_with_a_line(
    fake_libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and graphs are waited for at load; the third wait is a step's, and does not end."""
    monkeypatch.setattr(cuda_export, "compile_launches", compile_stubs)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **TINY_CUDA)
    options = Options(targets=("cuda:sm_90a",), slots=2, max_step_tokens=4, max_context=32)
    core = export_core(str(checkpoint), tmp_path / "core", options).output
    hang = "cuStreamSynchronize=-1@3"
    with FakeDeviceServer(core, fake_libcuda, launcher=("-c", SHORT), fail=hang) as server:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        code, said = server.ended()
    assert code == silence.EXIT_CODE == 2
    assert said.splitlines()[-1] == (
        "flare: fake device 0 (sm_90a) has not answered for 0.1 s: most likely a kernel does not end, and CUDA cannot stop one"
        "; the server ends, start it again"
    )


ALONE = """
import asyncio
from flare.http import silence
silence.TURN_S, silence.SILENT_TURNS, silence.SAYING_S = 0.01, 1, 0.1
asyncio.run(silence.end_when_silent(lambda: 1, "the device"))
"""


@pytest.mark.parametrize("unread", ["full disk", "closed pipe", "full pipe"])
def test_a_server_ends_though_nobody_takes_its_line(unread: str) -> None:
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb") as held,
        os.fdopen(writer, "wb", buffering=0) as errors,
        open("/dev/full", "w") as full,
    ):
        if unread == "full pipe":
            os.set_blocking(writer, False)
            while errors.write(bytes(4096)):  # None: no room is left
                pass
            os.set_blocking(writer, True)
        else:
            held.close()
        given = full if unread == "full disk" else errors
        ended = subprocess.run([sys.executable, "-c", ALONE], stderr=given, timeout=60)
    assert ended.returncode == silence.EXIT_CODE
