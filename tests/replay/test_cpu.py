"""CpuReplay: instruction set levels, the program's checks, its arrays and their life."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from flare.errors import CoreError, InputError, ReplayDead
from flare.replay.cpu import (
    ISA_FLAGS,
    CpuArg,
    CpuProgram,
    CpuReplay,
    best_isa,
    load_library,
    machine_flags,
)
from tests.support.fake_library import aligned, fake_library, fill, io, node, program

OUT = CpuArg("io", 1024, 256)
LOGITS = node("Logits<64>", 1, CpuArg("weights", 0, 256), CpuArg("io", 0, 1024))
LEVELS = ["x86-64-v4", "x86-64-v3", "generic"]

# /proc/cpuinfo of three real machines: Zen 4, Haswell, and a first-generation Xeon with AVX-512 but without VNNI.
HASWELL = frozenset(
    "sse sse2 ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm abm bmi1 avx2 bmi2".split()
)
SKYLAKE = HASWELL | frozenset("avx512f avx512dq avx512cd avx512bw avx512vl".split())
ZEN4 = SKYLAKE | frozenset("avx512ifma avx512vbmi avx512_vnni avx512_bf16".split())


def compile_c(folder: Path, text: str) -> Path:
    (folder / "fake.c").write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "fake.c", "-o", folder / "fake.so"], check=True)
    return folder / "fake.so"


@pytest.mark.parametrize(
    "flags, best", [(ZEN4, LEVELS[0]), (SKYLAKE, LEVELS[1]), (HASWELL, LEVELS[1]), (HASWELL - {"movbe"}, LEVELS[2])]
)
def test_best_isa_is_the_fastest_that_the_machine_runs(flags: frozenset[str], best: str) -> None:
    assert best_isa(LEVELS, flags) == best
    assert best_isa(reversed(LEVELS), flags) == best
    assert best_isa([best], flags) == best


def test_best_isa_says_what_is_offered_and_what_is_lacking() -> None:
    with pytest.raises(CoreError) as error:
        best_isa(["x86-64-v4", "x86-64-v3"], SKYLAKE - {"abm"})
    assert str(error.value) == (
        "kernels: the core offers x86-64-v4, x86-64-v3, this machine runs generic; x86-64-v4 needs abm avx512_vnni; "
        "x86-64-v3 needs abm: export the core with generic among its --isa levels"
    )
    with pytest.raises(CoreError, match="the core offers no level"):
        best_isa([], ZEN4)
    with pytest.raises(CoreError, match="the core offers armv9"):
        best_isa(["armv9"], ZEN4)


def test_machine_flags_are_this_processors() -> None:
    """The compiler's own look at the processor decides: whatever it finds is there, and nothing else of ours is."""
    listed = subprocess.run(
        ["gcc", "-march=native", "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True
    ).stdout
    spelled = {"abm": "LZCNT", "avx512_vnni": "AVX512VNNI", "bmi1": "BMI"}
    ours = frozenset[str]().union(*ISA_FLAGS.values())
    assert machine_flags() & ours == {flag for flag in ours if f"__{spelled.get(flag, flag.upper())}__ " in listed}


def test_a_step_through_the_arrays() -> None:
    with CpuReplay(program([node("Tokens", 0, OUT), LOGITS]), threads=2, kv_pages=40) as replay:
        limits = replay.limits
        assert (limits.vocabulary, limits.slots, limits.page_stride, limits.kv_pages) == (64, 4, 10, 40)
        lengths = [len(a) for a in (replay.tokens, replay.positions, replay.slots, replay.rows, replay.page_table)]
        assert lengths == [64, 64, 64, 4, 40]
        assert [len(a) for a in (replay.targets, replay.wanted, replay.logprobs)] == [4, 4, 4]
        fill(replay, [5, 6, 7])
        replay.rows[:2] = [2, 0]
        replay.step(3, 2)
        assert list(io(replay, ctypes.c_int32, 3)) == [5, 6, 7]
        assert list(replay.logits(0)) == [i + 7 * (i == 7) for i in range(64)]
        assert list(replay.logits(1)) == [i + 5 * (i == 5) for i in range(64)]
        view = replay.logits(0)
        assert view.format == "f" and view.nbytes == 256
        replay.sample(2)  # neutral parameters: temperature 0
        assert list(replay.sampled[:2]) == [63, 63]
        for row in (-1, 4):
            with pytest.raises(ValueError, match=f"row {row}"):
                replay.logits(row)


def test_a_closed_replay_is_dead() -> None:
    replay = CpuReplay(program([LOGITS]), threads=2, kv_pages=40)
    replay.close()
    replay.close()
    for call in (
        lambda: replay.step(1, 0),
        lambda: replay.sample(0),
        lambda: replay.score(0, 0),
        lambda: replay.logits(0),
    ):
        with pytest.raises(ReplayDead, match="closed"):
            call()


def test_weights_stay_mapped_while_the_core_is_open(tmp_path: Path) -> None:
    """A read-only file serves as it is; its mapping cannot go away before the core, and need not stay after it."""
    (tmp_path / "weights").write_bytes(bytes(4096) + bytes((ctypes.c_float * 1024)(*range(1024))))
    with open(tmp_path / "weights", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    replay = CpuReplay(
        program([LOGITS], weights=mapped, weights_offset=4096, weights_bytes=4096), threads=1, kv_pages=40
    )
    with pytest.raises(BufferError):
        mapped.close()
    fill(replay, [0])
    replay.step(1, 1)
    assert list(replay.logits(0)) == list(range(64))
    replay.close()
    mapped.close()

    with open(tmp_path / "weights", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    plan = program([LOGITS], weights=mapped, weights_offset=4096, weights_bytes=4096)
    with CpuReplay(plan, threads=2, kv_pages=40, huge_pages=True) as replay:
        mapped.close()  # copied
        fill(replay, [0])
        replay.step(1, 1)
        assert list(replay.logits(0)) == list(range(64))


GOOD = dict(weights=aligned(bytes(4096)), weights_bytes=4096)

BAD = [
    (dict(vocabulary=2**31), "vocabulary 2147483648"),
    (dict(slots=2**32 + 4), "slots 4294967300"),
    (dict(max_rows=-1), "max_rows -1"),
    (dict(arena_bytes=2**64), "arena_bytes 18446744073709551616"),
    (dict(kv_page_bytes=-64), "kv_page_bytes -64"),
    (dict(weights_bytes=4097), "weights: 4097 bytes at 0 reach beyond the file's 4096"),
    (dict(weights_offset=-64), "weights: 4096 bytes at -64"),
    (dict(weights_offset=1, weights_bytes=64), "weights: their address"),
    (dict(nodes=[node("Tokens", 0, CpuArg("disk", 0, 64))]), "segment 'disk'"),
    (dict(nodes=[node("Tokens", 0, CpuArg("io", -64, 64))]), "offset -64"),
    (dict(nodes=[node("Tokens", 0, CpuArg("io", 2**64, 64))]), "offset 18446744073709551616"),
    (dict(nodes=[node("Tokens", 0, CpuArg("io", 0, 2**63))]), "beyond its segment"),
    (dict(nodes=[node("Tokens", 0)]), "0 arguments, the kernel takes 1"),
    (dict(nodes=[node("Tokens\n", 0, CpuArg("io", 0, 64))]), r"node 0: 'Tokens\n' is no name of a kernel"),
    (dict(nodes=[node("Tokens\0", 0, CpuArg("io", 0, 64))]), r"node 0: 'Tokens\x00' is no name of a kernel"),
    (dict(nodes=[node("Tokens", 2**32, CpuArg("io", 0, 64))]), "node 0: phase 4294967296: must be in [0, 2^31)"),
    (dict(nodes=[]), "node_count 0"),
]


@pytest.mark.parametrize("changes, text", BAD, ids=[text for _, text in BAD])
def test_a_bad_program_is_refused(changes: dict[str, object], text: str) -> None:
    plan = program(**(dict(nodes=[LOGITS]) | GOOD | changes))
    with pytest.raises(CoreError) as error:
        CpuReplay(plan, threads=1, kv_pages=40)
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("threads, kv_pages", [(0, 40), (-1, 40), (2**31, 40), (1, 0), (1, 2**31)])
def test_bad_counts_are_refused(threads: int, kv_pages: int) -> None:
    with pytest.raises(InputError, match=r"(threads|kv_pages) -?\d+: must be in"):
        CpuReplay(program([LOGITS]), threads=threads, kv_pages=kv_pages)


def test_too_little_memory_is_the_machines_fault_not_the_cores() -> None:
    plan: CpuProgram = program([LOGITS], kv_page_bytes=1 << 40)
    with pytest.raises(InputError, match="does not give 43980465111040 bytes of memory for kv pages"):
        CpuReplay(plan, threads=1, kv_pages=40)


def test_what_is_no_kernel_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no ELF")
    for path in (tmp_path / "text.so", tmp_path / "missing.so", compile_c(tmp_path, "int other;")):
        with pytest.raises(CoreError, match="not a kernel library of this machine"):
            load_library(path)


def test_another_abi_is_refused(tmp_path: Path) -> None:
    path = compile_c(tmp_path, "unsigned flare_abi_version(void) { return 1; }")
    with pytest.raises(CoreError, match="ABI version 1, this flare replays 4: export the core again"):
        load_library(path)


def test_structures_have_the_sizes_of_the_c_side() -> None:
    """The C compiler's own sizes and offsets, from the header that the kernels are compiled with."""
    import flare.replay.cpu_interface as native

    fields = {
        "flare_arg": native.ArgStruct,
        "flare_node": native.NodeStruct,
        "flare_open_args": native.OpenArgs,
        "flare_step_args": native.StepArgs,
        "flare_sample_args": native.SampleArgs,
        "flare_score_args": native.ScoreArgs,
        "flare::SampleParams": native.SampleParams,
        "flare::RowLogprobs": native.RowLogprobs,
    }
    reserved_words = {"explicit": "explicit_"}
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});" for name, mirror in fields.items()]
    checks += [
        f"static_assert(offsetof({name}, {reserved_words.get(field, field)}) == {getattr(mirror, field).offset});"
        for name, mirror in fields.items()
        for field, _ in mirror._fields_
    ]
    kernels = Path(__file__).parents[2] / "ignition/targets/cpu/kernels"
    source = "\n".join(['#include "runtime.h"', *checks])
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{kernels}", "-Wno-psabi", "-x", "c++", "-"]
    subprocess.run(command, input=source, text=True, check=True)


def test_the_replay_imports_neither_numpy_nor_the_exporter(repository: Path) -> None:
    """Importing numpy costs more than opening a core does."""
    code = "import sys, flare.replay.cpu; print(sorted({'numpy', 'torch', 'ignition'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_library_describes_itself() -> None:
    with CpuReplay(program([LOGITS]), threads=1, kv_pages=40) as replay:
        assert replay.info["isa"] == fake_library().stem
        assert "Logits<64>" in replay.info["kernels"]
