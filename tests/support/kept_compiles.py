"""What exports compile, kept by what it is made of: equal kernels are compiled once in a test run.

All test processes share one folder; while one of them compiles, the others wait.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec

from ignition.targets.cpu.compile import FLAGS, ISA_FLAGS, Library, compile_libraries
from ignition.targets.cuda.compile import KERNELS, Compiled, compile_launches, job
from ignition.targets.cuda.compile_worker import Cubin
from ignition.targets.cuda.launch import Launch


class Kept:
    """Stands in for compile_libraries and compile_launches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def libraries(
        self,
        sources: Mapping[str, str],
        headers: Mapping[str, str],
        advance: Callable[[int, int, str], None] = lambda done, total, isa: None,
    ) -> dict[str, Library]:
        """As compile_libraries."""
        compiler = os.environ.get("CXX", "")
        files = {
            isa: self._file(isa, source, dict(headers), compiler, ISA_FLAGS[isa], FLAGS)
            for isa, source in sources.items()
        }
        with self._locked():
            missing = {isa: source for isa, source in sources.items() if not files[isa].exists()}
            for isa, library in compile_libraries(missing, headers, advance).items() if missing else ():
                files[isa].write_bytes(msgspec.msgpack.encode(library))
        return {isa: msgspec.msgpack.decode(file.read_bytes(), type=Library) for isa, file in files.items()}

    def launches(
        self,
        launches: Mapping[str, Iterable[Launch]],
        advance: Callable[[int, int, str], None] = lambda done, total, kernel: None,
    ) -> Compiled:
        """As compile_launches."""
        wanted = {name: {job(one, name).key(): one for one in some} for name, some in launches.items()}
        with self._locked():
            missing = {
                name: [one for key, one in some.items() if not self._file(key).exists()]
                for name, some in wanted.items()
            }
            for some in compile_launches(missing, advance).cubins.values() if any(missing.values()) else ():
                for key, cubin in some.items():
                    self._file(key).write_bytes(msgspec.msgpack.encode(cubin))
        return Compiled(KERNELS, {name: {key: self._cubin(key) for key in some} for name, some in wanted.items()})

    def _cubin(self, key: bytes) -> Cubin:
        return msgspec.msgpack.decode(self._file(key).read_bytes(), type=Cubin)

    def _file(self, *made_of: object) -> Path:
        return self._folder / sha256(msgspec.msgpack.encode(made_of)).hexdigest()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
