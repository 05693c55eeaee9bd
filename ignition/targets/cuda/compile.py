"""Compiles the kernels that launches name into cubins, ahead of time and without a GPU.

Launches that differ only in their grids and memory share one cubin. Each is compiled in one of several processes
(compile_worker.py) whose environment is made here, so the same kernels and the same Triton give the same bytes, whatever
the folder, the number of processes and the caller's environment.

All architectures are assembled by the ptxas 12.9 that Triton brings, not by the newer one that it would take from sm_90 on:
a cubin of CUDA 13's ptxas has another ELF ABI, which drivers of CUDA 12 refuse, while drivers of CUDA 13 take both. So sm_80
to sm_90a run on drivers from 525 on, the others on every driver that knows them.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec

from flare.errors import InputError
from ignition.targets.cuda.compile_worker import Cubin, Failure, Job, Result, write
from ignition.targets.cuda.launch import Launch

KERNELS = "ignition.targets.cuda.kernels"
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "HOME")
"""Environment variables that the compiling processes see of the caller's."""

NO_PAIRS = "nvptx-no-f32x2"
"""LLVM's option for no instructions on pairs of f32, which architectures from sm_100a on have. ptxas 12.9 fuses products and
sums of pairs although it is told not to fuse; and which values become pairs follows from a kernel's tiles, so rows would have
other bits in another form of the same kernel."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Cubins by architecture and by what they were made from."""

    package: str
    cubins: Mapping[str, Mapping[bytes, Cubin]]

    def cubin(self, launch: Launch, architecture: str) -> Cubin:
        """Returns the cubin that a launch calls. Raises KeyError for a launch that was not among those compiled."""
        return self.cubins[architecture][job(launch, architecture, self.package).key()]

    def versions(self) -> dict[str, str]:
        """Returns the versions of what compiled, by tool."""
        return {t: v for some in self.cubins.values() for cubin in some.values() for t, v in cubin.versions.items()}


def job(launch: Launch, architecture: str, package: str = KERNELS) -> Job:
    """Returns what decides a launch's machine code."""
    return Job(
        package, launch.kernel, launch.signature(), launch.all_constants(), launch.warps, launch.stages, architecture
    )


def compile_launches(
    launches: Mapping[str, Iterable[Launch]],
    advance: Callable[[int, int, str], None] = lambda done, total, kernel: None,
    *,
    workers: int | None = None,
    timeout: float = 600.0,
    package: str = KERNELS,
) -> Compiled:
    """Compiles `launches` (by architecture: sm_80, sm_90a, ...) and returns their cubins.

    At most `workers` kernels compile at once (default: one a processor), each for at most `timeout` seconds. `advance` is
    called with the number of kernels done, of how many, and the name of the one just done. `package` holds the kernels'
    files. Raises InputError with the kernel's name and the compiler's last line; an interrupt ends the compilers.
    """
    wanted = {}
    for architecture, some in launches.items():
        for launch in some:
            item = job(launch, architecture, package)
            wanted[item.key()] = item
    count = min(len(wanted), workers or os.cpu_count() or 1)
    advance(0, len(wanted), "")
    found: dict[bytes, Cubin] = {}
    with _Compilers(count, timeout) as compilers, ThreadPoolExecutor(max_workers=max(1, count)) as pool:
        try:
            waiting = {pool.submit(compilers.compile, item): key for key, item in wanted.items()}
            for done, future in enumerate(as_completed(waiting), 1):
                found[waiting[future]] = future.result()
                advance(done, len(wanted), wanted[waiting[future]].kernel)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.kill()
            raise
    cubins: dict[str, dict[bytes, Cubin]] = {architecture: {} for architecture in launches}
    for key, item in wanted.items():
        cubins[item.architecture][key] = found[key]
    return Compiled(package, cubins)


class _Compilers:
    """The processes that compile, with what they write below one folder. Leaving it ends them."""

    def __init__(self, count: int, timeout: float) -> None:
        self.timeout = timeout
        self.idle: SimpleQueue[_Compiler] = SimpleQueue()
        self.all: list[_Compiler] = []
        try:
            self.folder = tempfile.TemporaryDirectory(prefix="ignition-compile-")
            for number in range(count):
                compiler = _Compiler(Path(self.folder.name) / str(number))
                self.all.append(compiler)
                self.idle.put(compiler)
        except OSError as error:
            self.kill()
            raise InputError(
                f"{tempfile.gettempdir()}: the compilers cannot start ({error.strerror}); make room there, or set TMPDIR to "
                "another folder"
            ) from None

    def __enter__(self) -> _Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for compiler in self.all:
            compiler.close()
        self.folder.cleanup()

    def kill(self) -> None:
        """Ends what compiles now."""
        for compiler in self.all:
            compiler.kill()

    def compile(self, item: Job) -> Cubin:
        """Compiles one kernel in the next process that is free. Raises InputError."""
        compiler = self.idle.get()
        try:
            result = compiler.compile(item, self.timeout)
        finally:
            self.idle.put(compiler)
        if isinstance(result, Failure):
            raise InputError(f"compiling {item.kernel} for {item.architecture}: {result.text}")
        return result


class _Compiler:
    """One process that compiles, the leader of a process group that its assembler is in too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.messages = folder / "messages"
        with open(self.messages, "wb") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ignition.targets.cuda.compile_worker"],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                start_new_session=True,
            )

    def compile(self, item: Job, timeout: float) -> Result:
        assert self.process.stdin is not None
        try:
            write(self.process.stdin, item)
            message = self._read(time.monotonic() + timeout)
        except TimeoutError:
            self.kill()
            return Failure(f"not done after {timeout:g} s")
        except (BrokenPipeError, EOFError):
            return Failure(f"the compiler ended ({self._ending()})")
        return msgspec.msgpack.decode(message, type=Result)

    def _read(self, deadline: float) -> bytes:
        """Returns the next message. Raises TimeoutError, and EOFError where the process has ended."""
        assert self.process.stdout is not None
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while len(found) < 4 or len(found) < 4 + int.from_bytes(found[:4], "little"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                block = os.read(self.process.stdout.fileno(), 1 << 20)
                if not block:
                    raise EOFError
                found += block
        return bytes(found[4:])

    def _ending(self) -> str:
        """Returns how the process ended and the last line that it wrote."""
        try:
            code = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        with suppress(OSError):  # its folder may be gone: then how it ended is all there is to say
            lines = self.messages.read_text(errors="replace").split("\n")
            how = next((f"{how}: {line.strip()}" for line in reversed(lines) if line.strip()), how)
        return how

    def kill(self) -> None:
        """Ends the process and its assembler at once."""
        with suppress(ProcessLookupError):  # it ended by itself in this moment
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process, by the end of its input."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # it ended before it took all of a job
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _environment(folder: Path) -> dict[str, str]:
    """All that a compiling process sees of its surroundings."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {
        "DISABLE_LLVM_OPT": NO_PAIRS,
        "LC_ALL": "C",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",  # else paths get into the cubin
        "TRITON_PTXAS_BLACKWELL_PATH": str(Path(triton.origin).parent / "backends/nvidia/bin/ptxas"),
    }
