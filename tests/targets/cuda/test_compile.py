"""Cubins: what gets into them, what people read when a kernel does not compile, and what an interrupt leaves behind."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree

import pytest

from flare.core.cuda_graph import Box
from flare.core.tensor_maps import MapType
from flare.errors import InputError
from ignition.targets.cuda import compile as compile_module
from ignition.targets.cuda.compile import Compiled, compile_launches, job
from ignition.targets.cuda.compile_worker import Failure, compile_job, read_box
from ignition.targets.cuda.kernels.logprobs import add_launch
from ignition.targets.cuda.launch import Launch, Pointer, TensorMap
from tests.support.cuda_cubins import before_the_wait

PACKAGE = "tests.targets.cuda.sample_kernels"


def pointer(element: str) -> Pointer:
    return Pointer(element, "anything")


def add(count: int = 5, y: bool = True, **constants: object) -> Launch:
    args = {
        "x": pointer("f32"),
        "y": pointer("f32") if y else None,
        "out": pointer("f32"),
        "count": count,
        "scale": 0.5,
    }
    return Launch("arithmetic.add", args, {"BLOCK": 128} | constants, (count, 1, 1), "sum", warps=2)


def product() -> Launch:
    args = {"x": pointer("bf16"), "w": pointer("bf16"), "out": pointer("f32")}
    return Launch("arithmetic.product", args, {"K": 128, "BLOCK": 32}, (1, 1, 1), "product", stages=3)


def refused(kernel: str, args: dict[str, object], **constants: int) -> Launch:
    return Launch(kernel, args, constants, (1, 1, 1), "label")


BOTH = {"x": pointer("f32"), "out": pointer("f32")}
WAIT = "does not wait first for the kernel before it; make begin(PROGRAMMATIC) its first statement"


def data(compiled: Compiled) -> list[bytes]:
    return sorted(cubin.data for cubins in compiled.cubins.values() for cubin in cubins.values())


def compile_two(**settings: object) -> Compiled:
    return compile_launches({"sm_80": [add()], "sm_90a": [add(), product()]}, package=PACKAGE, **settings)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_two()


def test_a_cubin_is_for_its_architecture_and_says_how_it_is_launched(compiled: Compiled) -> None:
    small, large = compiled.cubin(add(), "sm_90a"), compiled.cubin(product(), "sm_90a")
    assert (small.symbol, small.threads, small.shared) == ("add", 64, 0)
    assert (large.symbol, large.threads) == ("product", 128) and large.shared >= 2 * 32 * 32 * 2
    # <elf.h> and NVIDIA's cubins: machine 190; e_flags: architecture in the low byte, bit 11 the "a" variant
    for cubin, flags in ((small, 90 | 1 << 11), (compiled.cubin(add(), "sm_80"), 80)):
        assert cubin.data[:4] == b"\x7fELF" and struct.unpack_from("<H", cubin.data, 18) == (190,)
        assert struct.unpack_from("<I", cubin.data, 48)[0] & (0xFF | 1 << 11) == flags
        assert cubin.data[7] == 51  # the ELF ABI that drivers of CUDA 12 know
    assert set(compiled.versions()) == {"triton", "ptxas"}
    assert compiled.versions()["ptxas"].startswith("12.")


def test_launches_that_differ_in_grid_numbers_and_memory_share_a_cubin() -> None:
    told: list[tuple[int, int, str]] = []
    launches = [add(5), add(7), add(7, y=False)]
    found = compile_launches({"sm_80": launches}, lambda *news: told.append(news), package=PACKAGE)
    assert found.cubin(add(5), "sm_80") is found.cubin(add(7), "sm_80")
    assert found.cubin(add(7, y=False), "sm_80").data != found.cubin(add(7), "sm_80").data
    assert told == [(0, 2, ""), (1, 2, "arithmetic.add"), (2, 2, "arithmetic.add")]
    with pytest.raises(KeyError):
        found.cubin(add(5, BLOCK=256), "sm_80")


def test_arithmetic_on_pairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which this Triton makes unless told otherwise, by a variable that a later one may not know."""
    made = compile_module._environment

    def without(folder: Path) -> dict[str, str]:
        return {name: value for name, value in made(folder).items() if name != "DISABLE_LLVM_OPT"}

    monkeypatch.setattr(compile_module, "_environment", without)
    logits, integers, sums = pointer("f32"), pointer("i32"), pointer("i64")
    weights = add_launch(logits, integers, integers, logits, sums, rows=1, all_rows=1, vocabulary=4096)
    with pytest.raises(InputError) as error:
        compile_launches({"sm_120a": [weights]})
    assert str(error.value) == (
        "compiling logprobs.add for sm_120a: it computes on pairs of f32, whose products and sums ptxas fuses; this Triton "
        "ignores DISABLE_LLVM_OPT"
    )


SAID = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False, "is_im2col": False}


@pytest.mark.parametrize(
    ("changes", "kind", "swizzle"),
    [
        ({}, "bf16", 128),
        ({"elem_type": 6}, "fp16", 128),
        ({"swizzle": 2, "block_size": [16, 32]}, "bf16", 64),
        ({"swizzle": 1, "block_size": [16, 16]}, "bf16", 32),
        ({"swizzle": 0, "block_size": [16, 128]}, "bf16", 0),
        ({"swizzle": 4}, "bf16", None),
        ({"elem_type": 6}, "bf16", None),
        ({"elem_size": 4}, "bf16", None),
        ({"elem_type": 7, "elem_size": 4}, "fp32", None),
        ({"block_size": [16, 128]}, "bf16", None),
        ({"block_size": [16, 48]}, "bf16", None),
        ({"block_size": [64]}, "bf16", None),
        ({"fp4_padded": True}, "bf16", None),
        ({"is_im2col": True}, "bf16", None),
    ],
)
def test_the_box_of_a_tensor_map_is_what_the_compiler_says(
    changes: dict[str, object], kind: str, swizzle: int | None
) -> None:
    """Elements and swizzles as PTX numbers them for devices (tensormap.replace); what no graph can have gives no box."""
    said = SAID | changes
    wanted = None if swizzle is None else Box(shape=tuple(said["block_size"]), swizzle=swizzle, promotion=128)
    assert read_box(MapType(kind, (16, 128)), said) == wanted


def test_an_architecture_without_tensor_maps_compiles_none() -> None:
    mapped = Launch("arithmetic.product", {"x": TensorMap(pointer("bf16"), (4, 64), (4, 64))}, {}, (1, 1, 1), "product")
    assert compile_job(job(mapped, "sm_89", PACKAGE)) == Failure("x: sm_89 has no tensor maps")


def test_nothing_to_compile_starts_nothing() -> None:
    assert compile_launches({"sm_80": []}).versions() == {}


def test_bytes_do_not_depend_on_the_folder_the_environment_or_the_number_of_processes(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copytree(Path(__file__).parent / "sample_kernels", tmp_path / "elsewhere" / "copied_kernels")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    launches = {"sm_90a": [product(), add()], "sm_80": [add()]}
    other = compile_launches(launches, package="copied_kernels", workers=1)
    assert data(other) == data(compiled)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (refused("refused.wrong_types", {"x": pointer("f32"), "out": pointer("f32")}), "no_such_method"),
        (refused("refused.wrong_assembly", {"out": pointer("i32")}), "nonsense"),
        (refused("refused.scratch", {"out": pointer("f32")}, K=64), "scratch memory"),
        (refused("refused.wrong_types", {"x": pointer("f32"), "y": 3}), "the launch differ in out, y"),
        (refused("refused.none_such", {}), "none_such"),
        (refused("refused.knows_nothing_of_edges", BOTH), "the launch differ in PROGRAMMATIC"),
        (refused("refused.never_waits", BOTH), WAIT),
        (refused("refused.reads_before_it_waits", BOTH), WAIT),
        (refused("refused.returns_before_it_waits", BOTH), WAIT),
        (refused("refused.waits_in_a_branch", BOTH | {"count": 5}), WAIT),
        (refused("ends.kernel", {}), "the compiler ended (signal 9: the last words)"),
    ],
)
def test_a_kernel_that_does_not_compile_is_named_with_the_last_line(launch: Launch, said: str) -> None:
    with pytest.raises(InputError, match=launch.kernel) as caught:
        compile_launches({"sm_90a": [launch]}, package=PACKAGE)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"compiling {launch.kernel} for sm_90a: ")


def test_a_kernel_that_takes_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"compiling waits.kernel for sm_80: not done after 1 s"):
        compile_launches({"sm_80": [refused("waits.kernel", {})]}, package=PACKAGE, timeout=1.0)


def test_a_kernel_waits_only_where_there_are_programmatic_edges(tmp_path: Path) -> None:
    """From compute capability 9.0 on; elsewhere nothing is asked of it, and nothing put into it."""
    launches = [refused("refused.never_waits", BOTH), add()]
    found = compile_launches({"sm_80": launches, "sm_89": launches, "sm_120a": [add()]}, package=PACKAGE)
    for architecture, cubins in found.cubins.items():
        for number, cubin in enumerate(cubins.values()):
            file = tmp_path / f"{architecture}-{number}"
            file.write_bytes(cubin.data)
            assert (before_the_wait(file) is None) == (architecture != "sm_120a")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_export_leaves_no_process_and_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tmp").mkdir()
    code = (
        "from ignition.targets.cuda.compile import compile_launches\n"
        "from ignition.targets.cuda.launch import Launch\n"
        "launches = [Launch('waits.kernel', {}, {'N': n}, (1, 1, 1), '') for n in range(2)]\n"
        f"compile_launches({{'sm_80': launches}}, package={PACKAGE!r}, workers=2)\n"
    )
    environment = os.environ | {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as export:
        while len(started := list(tmp_path.glob("*.started"))) < 2 or not all(path.read_text() for path in started):
            assert export.poll() is None
        handles = [os.pidfd_open(int(number)) for path in started for number in (path.stem, path.read_text())]
        export.send_signal(number)
    deadline = time.monotonic() + 60.0
    # Kernels before Linux 6.16 tell the end of a process too early where a thread of it became another program.
    while any((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < deadline, "a folder is still there"
    for handle in handles:
        assert select.select([handle], [], [], 60.0)[0], "a process is still there"
        os.close(handle)
