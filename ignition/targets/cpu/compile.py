"""Compiles generated C++ into kernel libraries, one for each ISA level.

The same source, headers and compiler give the same bytes: no path, time or build id gets into a library. A library
needs nothing but libc (and libm) and exports the `flare_*` functions only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flare.errors import InputError

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "x86-64-v4": ("-march=x86-64-v4", "-mavx512vnni"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "generic": (),
}

# -ffp-contract=off: the source says where a product and a sum are fused, so that all levels give the same bits.
FLAGS = tuple(
    "-std=c++20 -O3 -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti -fno-gnu-unique -fvisibility=hidden"
    " -frandom-seed=flare -Wno-psabi -shared -fPIC -pthread -static-libstdc++ -static-libgcc -s"
    " -Wl,--build-id=none -Wl,--version-script=exports -Wl,-z,defs,-z,relro,-z,now,-z,noexecstack".split()
)

_EXPORTS = "{ global: flare_*; local: *; };\n"


@dataclass(frozen=True)
class Library:
    """A compiled kernel library: the shared object's bytes, and what they were made with."""

    isa: str
    data: bytes
    compiler: str
    flags: tuple[str, ...]


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else g++ or c++ on PATH. Raises InputError with the remedy if there is none."""
    named = os.environ.get("CXX", "").strip()
    for command in [shlex.split(named)] if named else [["g++"], ["c++"]]:
        if shutil.which(command[0]) is not None:
            return command
    where = f"CXX={named}" if named else "g++ or c++"
    raise InputError(f"{where}: no C++ compiler found: install g++ 11 or later, or set CXX to one")


class _Compilers:
    """The compilers that run, each with its children in a process group of its own, so that all can be ended at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()
        self.ended = False

    def start(self, command: list[str], folder: Path) -> subprocess.Popen[str]:
        with self.lock:
            if self.ended:
                raise InputError("compiling was interrupted")
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, "LC_ALL": "C"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"{command[0]}: cannot be run: {error.strerror}") from None
            self.running.add(process)
            return process

    def end(self) -> None:
        """Kills all that run; none starts any more."""
        with self.lock:
            self.ended = True
            for process in self.running:
                with suppress(ProcessLookupError):  # it ended by itself in this moment
                    if process.returncode is None:
                        os.killpg(process.pid, signal.SIGKILL)


def compile_libraries(
    sources: Mapping[str, str],
    headers: Mapping[str, str],
    advance: Callable[[int, int, str], None] = lambda done, total, isa: None,
    *,
    timeout: float = 900.0,
    jobs: int | None = None,
) -> dict[str, Library]:
    """Compiles `sources` (ISA level -> text of its translation unit) and returns a library for each level.

    Sources include `headers` (file name -> text). At most `jobs` compilers run at once (default: one a processor), each
    for at most `timeout` seconds; `advance` is called with the number done, of how many, and the level just done.
    Raises InputError with the compiler's first error. An interrupt ends the compilers that run.
    """
    if unknown := [isa for isa in sources if isa not in ISA_FLAGS]:
        raise InputError(f"isa {unknown[0]}: must be one of {', '.join(ISA_FLAGS)}")
    command = find_compiler()
    compilers = _Compilers()
    version = _version(command, compilers)
    try:
        with tempfile.TemporaryDirectory(prefix="ignition-compile-") as name:
            folder = Path(name)
            (folder / "kernels").mkdir()
            for header, text in headers.items():
                (folder / "kernels" / header).write_text(text, encoding="utf-8")
            with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
                try:
                    waiting = {
                        pool.submit(_compile, compilers, command, isa, source, folder, timeout): isa
                        for isa, source in sources.items()
                    }
                    advance(0, len(sources), "")
                    for done, future in enumerate(as_completed(waiting), 1):
                        advance(done, len(sources), waiting[future])
                except BaseException:
                    compilers.end()
                    raise
            data = {isa: future.result() for future, isa in waiting.items()}
    except OSError as error:
        raise InputError(
            f"{tempfile.gettempdir()}: no room for the compiler's files ({error.strerror}); set TMPDIR to another folder"
        ) from None
    return {isa: Library(isa, data[isa], version, ISA_FLAGS[isa] + FLAGS) for isa in sources}


def _version(command: list[str], compilers: _Compilers) -> str:
    status, text = _run(compilers, [*command, "--version"], Path.cwd(), 60.0)
    if status != 0 or not text.strip():
        raise InputError(f"{command[0]} --version failed: {_first_error(text)}")
    return text.splitlines()[0].strip()


def _compile(compilers: _Compilers, command: list[str], isa: str, source: str, folder: Path, timeout: float) -> bytes:
    own = folder / isa
    own.mkdir()
    (own / "step.cc").write_text(source, encoding="utf-8")
    (own / "exports").write_text(_EXPORTS, encoding="ascii")
    # All paths are relative, and the folder itself is mapped away: neither can get into the library.
    paths = ["-I../kernels", f"-ffile-prefix-map={own}=.", "step.cc", "-o", "step.so"]
    status, text = _run(compilers, [*command, *ISA_FLAGS[isa], *FLAGS, *paths], own, timeout)
    if status is None:
        raise InputError(f"compiling {isa}: not done after {timeout:g} s: choose fewer ISA levels, or a faster machine")
    if status != 0:
        raise InputError(f"compiling {isa} with {command[0]}: {_first_error(text)}")
    return (own / "step.so").read_bytes()


def _run(compilers: _Compilers, command: list[str], folder: Path, timeout: float) -> tuple[int | None, str]:
    """Exit status (None: timed out) and all output. The compiler's own children end with it."""
    process = compilers.start(command, folder)
    with process:
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with compilers.lock:
                compilers.running.discard(process)
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "undefined reference" in line]
    return (errors or lines[-1:] or ["it says nothing"])[0]
