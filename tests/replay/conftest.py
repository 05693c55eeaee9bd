"""The fake CUDA driver, and replays of the tiny cuda core on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flare.replay.cuda import CudaReplay
from flare.replay.cuda_driver import open_device
from tests.conftest import once
from tests.support.fake_cuda.library import FakeCuda
from tests.support.tiny_cuda.compile import compile_kernels
from tests.support.tiny_cuda.core import PACKAGE, tiny_graphs, tiny_program

Open = Callable[..., CudaReplay]
"""Opens the tiny core: `kv_pages`, and changes of `tiny_program`."""


@pytest.fixture(scope="session")
def tiny_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny core's kernels, compiled once a session."""
    return once(tmp_path_factory, "tiny-kernels", compile_kernels)


@pytest.fixture(scope="session")
def loaded_fake(fake_libcuda: Path) -> FakeCuda:
    return FakeCuda(fake_libcuda)


@pytest.fixture
def fake(loaded_fake: FakeCuda) -> Iterator[FakeCuda]:
    """The fake driver, as good as new before and after. Nothing may be freed while work is under way."""
    loaded_fake.reset()
    yield loaded_fake
    assert not loaded_fake.misfrees()
    loaded_fake.reset()


@pytest.fixture(scope="session")
def _executor(loaded_fake: FakeCuda, tiny_kernels: Path) -> Any:
    from tests.support.fake_cuda.executor import Executor

    return Executor(loaded_fake, tiny_graphs(tiny_kernels)[0], package=PACKAGE)


@pytest.fixture
def executor(_executor: Any) -> Iterator[Any]:
    """What runs kernels; it counts anew for each test."""
    _executor.launched.clear()
    _executor.failures.clear()
    _executor.install()
    yield _executor
    _executor.remove()


@pytest.fixture
def open_tiny(fake: FakeCuda, executor: Any, tiny_kernels: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens replays of the tiny core, and closes them behind the test."""
    opened: list[CudaReplay] = []

    def open_it(*, kv_pages: int = 8, values: list[float] | None = None, **changes: Any) -> CudaReplay:
        program = tiny_program(tiny_kernels, tmp_path / "weights", values, **changes)
        opened.append(CudaReplay(program, device=open_device(["sm_90a"]), kv_pages=kv_pages))
        return opened[-1]

    yield open_it
    for replay in opened:
        replay.close()
