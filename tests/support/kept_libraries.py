"""Kernel libraries of exports, kept by what they are compiled from: equal sources are compiled once in a test run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from ignition.targets.cpu.compile import FLAGS, ISA_FLAGS, Library, compile_libraries


def kept_in(folder: Path) -> Callable[..., dict[str, Library]]:
    """compile_libraries that looks into `folder` first, which several processes may use at once."""

    def compile_or_take(
        sources: Mapping[str, str],
        headers: Mapping[str, str],
        advance: Callable[[int, int, str], None] = lambda done, total, isa: None,
    ) -> dict[str, Library]:
        files = {isa: folder / _digest(isa, source, headers) for isa, source in sources.items()}
        missing = {isa: source for isa, source in sources.items() if not files[isa].exists()}
        for isa, library in compile_libraries(missing, headers, advance).items() if missing else ():
            own = files[isa].with_suffix(f".{os.getpid()}")
            own.write_bytes(msgspec.msgpack.encode(library))
            own.replace(files[isa])
        return {isa: msgspec.msgpack.decode(files[isa].read_bytes(), type=Library) for isa in sources}

    return compile_or_take


def _digest(isa: str, source: str, headers: Mapping[str, str]) -> str:
    made_of = [isa, source, dict(headers), os.environ.get("CXX", ""), ISA_FLAGS[isa], FLAGS]
    return sha256(msgspec.msgpack.encode(made_of)).hexdigest()
