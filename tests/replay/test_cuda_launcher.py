"""A command of flare in a process of its own, with the fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.fake_cuda.launcher import main
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python -m tests.support.fake_cuda.launcher LIBRARY PACKAGE GRAPHS"),
        (["libcuda.so.1", "kernels", "--", "serve"], "usage: "),
        (["nowhere.so", "kernels", "graphs.msgpack", "--", "serve"], "nowhere.so: no such file; usage: "),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith(said) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("cuGraphLaunch=719", True),
        ("cuMemAlloc=2@3", True),
        ("cuMemAlloc=2@3+", True),
        ("cuMemAlloc=2@3-", False),
        ("cuGraphLaunch", False),
        ("cuGraphLaunch=x", False),
        ("cuGraphLunch=719", False),
        ("fake_set=1", False),
    ],
)
def test_a_failure_is_of_a_function_that_is_there(text: str, good: bool, fake_libcuda: Path) -> None:
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(fake_libcuda)!r})"]
    result = subprocess.run(command, env=os.environ | {"FAKE_CUDA_FAIL": text}, capture_output=True, text=True)
    if good:
        assert (result.returncode, result.stderr) == (0, "")
    else:
        assert result.returncode == 2 and result.stderr.startswith(f"FAKE_CUDA_FAIL: {text} is not function=result")
        assert result.stderr.count("\n") == 1
