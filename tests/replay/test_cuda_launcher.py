"""A command of flare in a process of its own, with the fake driver."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.support.tiny_cuda.compile import ARCH
from tests.support.tiny_cuda.core import PACKAGE, tiny_graphs


def test_a_command_runs_beside_the_executor(
    repository: Path, fake_libcuda: Path, tiny_kernels: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"cuda-{ARCH}.msgpack"
    file.write_bytes(tiny_graphs(tiny_kernels)[0].encode())
    command = [sys.executable, "-m", "tests.support.fake_cuda.launcher", fake_libcuda, PACKAGE, file, "--", "--version"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip().split()[-1]) == (0, version("flare-ignition")), result.stderr
