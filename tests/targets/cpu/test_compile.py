"""Kernel libraries: what gets into them, what does not, and what people read when the compiler fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from flare.errors import InputError
from ignition.targets.cpu.compile import ISA_FLAGS, Library, compile_libraries, find_compiler
from ignition.targets.cpu.source import headers

SOURCE = """
#include "kernel.h"
#include "runtime.h"
struct Nothing {
  static constexpr int32_t args = 0;
  static constexpr size_t scratch = 0;
  static int64_t units(const flare::Step&) { return 0; }
  static void run(const flare::Step&, const flare::Arg*, flare::Scratch, int64_t, int64_t) {}
  static flare::Need need(int32_t, const flare::Capacity&) { return {}; }
};
static constexpr flare::Kernel kernels[] = {flare::kernel<Nothing>("Nothing")};
FLARE_LIBRARY("LEVEL", kernels)
__attribute__((visibility("default"))) const char* stray = __FILE__;
"""

TINY = 'extern "C" __attribute__((visibility("default"))) int flare_answer() { return ANSWER; }\n#include "answer.h"\n'


def compile_one(isa: str, source: str = SOURCE) -> Library:
    return compile_libraries({isa: source.replace("LEVEL", isa)}, headers())[isa]


def tool(*command: object) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Path]:
    library = compile_one("x86-64-v3")
    path = tmp_path_factory.mktemp("built") / "library.so"
    path.write_bytes(library.data)
    return library, path


def test_a_library_needs_libc_and_exports_the_interface_only(built: tuple[Library, Path]) -> None:
    needed = {
        line.split("[")[1].rstrip("]") for line in tool("readelf", "-d", built[1]).splitlines() if "NEEDED" in line
    }
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    symbols = [line.split() for line in tool("nm", "-D", "--defined-only", built[1]).splitlines()]
    assert {name for _, kind, name in symbols if kind == "T"} == {
        *("flare_abi_version", "flare_library_info", "flare_open", "flare_begin", "flare_finish"),
        *("flare_sample", "flare_score", "flare_logits", "flare_close"),
    }
    assert {kind for _, kind, _ in symbols} == {"T"}


def test_the_stack_is_not_executable_and_nothing_is_relocated_late(built: tuple[Library, Path]) -> None:
    text = tool("readelf", "-lWd", built[1])
    assert "GNU_STACK" in text and "RWE" not in text
    assert "BIND_NOW" in text or "NOW" in text


def test_equal_sources_give_equal_bytes_without_paths(
    built: tuple[Library, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    assert compile_one("x86-64-v3").data == built[0].data
    for part in (b"ignition-compile", os.fsencode(tmp_path), os.fsencode(Path.cwd()), b"/tmp/"):
        assert part not in built[0].data


def test_levels_differ_in_their_flags_and_instructions(built: tuple[Library, Path]) -> None:
    assert [flags for flags in ISA_FLAGS.values()] == [("-march=x86-64-v4", "-mavx512vnni"), ("-march=x86-64-v3",), ()]
    library = built[0]
    assert library.isa == "x86-64-v3" and library.compiler.startswith("g++")
    assert library.flags[0] == "-march=x86-64-v3" and "-ffp-contract=off" in library.flags
    assert not any("/" in flag for flag in library.flags)
    assembly = tool("objdump", "-d", built[1])
    assert "%ymm" in assembly and "%zmm" not in assembly
    assert "vfmadd" not in assembly, "products and sums were fused that the source does not fuse"


def test_all_levels_come_back_in_order_and_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    sources = {isa: TINY.replace("ANSWER", f"number + {i}") for i, isa in enumerate(reversed(ISA_FLAGS))}
    # The header comes first, so that the function sees it.
    sources = {isa: "\n".join(reversed(text.splitlines())) for isa, text in sources.items()}
    libraries = compile_libraries(sources, {"answer.h": "constexpr int number = 40;"}, lambda *a: told.append(a))
    assert list(libraries) == list(sources)
    for i, (isa, library) in enumerate(libraries.items()):
        path = tmp_path / f"{isa}.so"
        path.write_bytes(library.data)
        if isa == "generic":
            assert ctypes.CDLL(str(path)).flare_answer() == 40 + i
    assert [done for done, _, _ in told] == [0, 1, 2, 3] and {total for _, total, _ in told} == {3}
    assert {isa for _, _, isa in told[1:]} == set(sources)


def test_a_compiler_error_is_one_line() -> None:
    with pytest.raises(InputError) as error:
        compile_one("generic", "int x = ;\nint y = ;\n")
    text = str(error.value)
    assert text.startswith("compiling generic with ") and "step.cc:1:9: error:" in text and "\n" not in text


def test_a_missing_function_is_found_at_export_not_at_load() -> None:
    with pytest.raises(InputError, match="undefined reference to .nowhere"):
        compile_one("generic", 'extern "C" int nowhere(); extern "C" int flare_x() { return nowhere(); }\n')


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InputError, match="isa x86-64-v9: must be one of x86-64-v4, x86-64-v3, generic"):
        compile_one("x86-64-v9")


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in answers --version, then waits for a child that waits for ever; both are gone afterwards."""
    script = tmp_path / "slow-c++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(InputError, match="compiling generic: not done after 0.5 s"):
        compile_libraries({"generic": ""}, {}, timeout=0.5)
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")
    while status.exists() and status.read_text().rpartition(") ")[2][0] != "Z":
        pass


def test_the_compiler_is_cxx_or_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() == ["g++"]
    monkeypatch.setenv("CXX", "g++ -pipe")
    assert find_compiler() == ["g++", "-pipe"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="CXX=no-such-compiler: no C.. compiler found: install g"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"g\+\+ or c\+\+: no C\+\+ compiler found: install g\+\+ 11 or later, or set CXX to one"
    ):
        find_compiler()
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert find_compiler() == ["c++"]


def test_an_interrupt_ends_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ending them, leaving would wait for the stand-in's 1000 seconds."""
    started = tmp_path / "started"
    script = tmp_path / "slow-c++"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\ntouch {started}\nsleep 1000\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))

    def interrupt(done: int, total: int, isa: str) -> None:
        while not started.exists():
            pass
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_libraries({"generic": ""}, {}, interrupt)


def test_a_temporary_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(InputError, match="missing: .*TMPDIR"):
        compile_libraries({"generic": ""}, {})
