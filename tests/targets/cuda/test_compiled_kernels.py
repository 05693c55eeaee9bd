"""The kernels as machine code: they compile for every architecture, fit into its shared memory, keep their registers, and wait
for the kernel before them where they may be launched before its end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from flare.core.architectures import ABILITIES
from flare.core.cubin import read_cubin
from flare.core.cuda_graph import Box
from flare.core.tensor_maps import MapType
from ignition.targets.cuda.compile import Compiled, compile_launches
from ignition.targets.cuda.compile_worker import Cubin
from ignition.targets.cuda.kernels.embedding import embed_launch
from ignition.targets.cuda.kernels.gate_up import gate_up_launch
from ignition.targets.cuda.kernels.heads import Pages, heads_launch
from ignition.targets.cuda.kernels.linear import linear_launch
from ignition.targets.cuda.kernels.logprobs import add_launch
from ignition.targets.cuda.kernels.matrix import Matrix
from ignition.targets.cuda.kernels.norm import rms_norm_launch
from ignition.targets.cuda.kernels.quantised_linear import quantised_linear_launch
from ignition.targets.cuda.kernels.rotary import rope_angles_launch
from ignition.targets.cuda.launch import Launch, Pointer, TensorMap
from tests.support.cuda_cubins import before_the_wait

F32, BF16, F16, I32, I8, U8, FP8 = (Pointer(e, None) for e in ("f32", "bf16", "f16", "i32", "i8", "u8", "fp8"))
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def bf16(n: int, k: int) -> Matrix:
    return Matrix("bf16", n, k, BF16)


def q8(n: int, k: int) -> Matrix:
    return Matrix("q8", n, k, I8, F16)


def q4(n: int, k: int) -> Matrix:
    return Matrix("q4", n, k, U8, F16, F16)


def fp8(n: int, k: int) -> Matrix:
    return Matrix("fp8", n, k, FP8, F32)


def representative(architecture: str) -> Iterator[Launch]:
    """A few of a model's launches, those with the largest tiles among them; all kinds for sm_90a."""
    step = {"tokens": 8, "architecture": architecture}
    yield linear_launch(BF16, bf16(151_936, 1024), F32, **step, label="bf16 wide")
    yield gate_up_launch(BF16, q4(18_944, 3584), q4(18_944, 3584), BF16, **step, label="q4 gate_up")
    if architecture in ("sm_90a", "sm_120a"):
        yield gate_up_launch(BF16, bf16(9728, 2560), bf16(9728, 2560), BF16, **step, label="bf16 gate_up")
    if architecture != "sm_90a":
        return
    yield linear_launch(BF16, bf16(576, 1536), F32, **step, label="bf16 narrow", residual=F32)
    yield linear_launch(F32, Matrix("f32", 4096, 576, F32), F32, **step, label="f32", bias=F32)
    yield quantised_linear_launch(BF16, q8(576, 576), F32, **step, label="q8 narrow")
    yield quantised_linear_launch(BF16, fp8(8192, 1024), BF16, **step, label="fp8")
    yield gate_up_launch(BF16, q8(14_336, 4096), q8(14_336, 4096), BF16, **step, label="q8 gate_up")
    yield embed_launch(q4(49_152, 576), I32, F32, count=8, architecture=architecture, label="embed")
    yield rms_norm_launch(F32, F32, BF16, count=8, width=16_384, eps=1e-5, label="norm", rows=I32)
    yield rope_angles_launch(I32, F32, F32, F32, tokens=8, half=64, scale=1.0, label="angles")
    pages = Pages(BF16, BF16, I32, page_tokens=16, page_stride=2 * 8 * 16 * 128, table_stride=64)
    yield heads_launch(
        F32,
        BF16,
        pages,
        I32,
        I32,
        tokens=8,
        heads=32,
        kv_heads=8,
        head_dim=128,
        label="heads",
        norms=(F32, F32),
        angles=(F32, F32),
    )


def weights() -> Launch:
    """A kernel of log probabilities that has the cpu target's bits: exp of f32, sums in f64, no division."""
    numbers = Pointer("i64", None)
    return add_launch(F32, I32, I32, F32, numbers, rows=8, all_rows=8, vocabulary=151_936)


def widest(architecture: str) -> Iterator[Launch]:
    """Products of f32 with quantised weights: nothing loads more at once."""
    step = {"tokens": 8, "architecture": architecture}
    yield quantised_linear_launch(F32, q8(576, 576), F32, **step, label="q8 narrow, of f32")
    yield gate_up_launch(F32, fp8(14_336, 1024), fp8(14_336, 1024), F32, **step, label="fp8 gate_up, of f32")


EXACT = ("sm_90a", "sm_100a", "sm_120a")
LAUNCHES = {architecture: list(representative(architecture)) for architecture in ABILITIES}
WIDEST = {architecture: list(widest(architecture)) for architecture in ("sm_89", "sm_120a")}
CASES = [(architecture, launch) for architecture, launches in LAUNCHES.items() for launch in launches]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    more = {architecture: [weights()] if architecture in EXACT else [] for architecture in LAUNCHES}
    return compile_launches({name: [*some, *more[name], *WIDEST.get(name, ())] for name, some in LAUNCHES.items()})


@pytest.mark.parametrize(("architecture", "launch"), CASES, ids=[f"{a}-{launch.label}" for a, launch in CASES])
def test_a_kernel_fits_its_architecture_and_spills_nothing(
    compiled: Compiled, architecture: str, launch: Launch, tmp_path: Path
) -> None:
    cubin = compiled.cubin(launch, architecture)
    assert cubin.shared <= ABILITIES[architecture].shared_bytes
    assert cubin.threads == 32 * launch.warps
    used = dumped("-res-usage", cubin, tmp_path)
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", used).groups())
    assert stack == local == 0
    assert registers * cubin.threads <= 65_536


@pytest.mark.parametrize("architecture", WIDEST)
def test_products_of_f32_fit_the_least_shared_memory(compiled: Compiled, architecture: str) -> None:
    """They may spill: without tensor cores their sums take more registers than there are."""
    for launch in WIDEST[architecture]:
        assert compiled.cubin(launch, architecture).shared <= ABILITIES[architecture].shared_bytes, launch.label


@pytest.mark.parametrize("architecture", EXACT)
def test_products_and_sums_are_not_fused(compiled: Compiled, architecture: str, tmp_path: Path) -> None:
    """Nor flushed to zero, nor approximated: draws have the cpu target's bits, and both forms of attention each other's. What
    Triton is told is not enough: its assembler fuses pairs all the same, and a processor's interpreter shows nothing of it."""
    code = dumped("-sass", compiled.cubin(weights(), architecture), tmp_path)
    names = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    kinds = {name.partition(".")[0] for name in names}
    assert {"FADD", "FMUL", "DADD"} <= kinds and not {"FFMA", "FFMA2", "DFMA", "MUFU"} & kinds
    assert not [name for name in names if ".FTZ" in name]


REACHING = {
    "LD",
    "LDG",
    "LDGSTS",
    "ST",
    "STG",
    "ATOM",
    "ATOMG",
    "RED",
    "REDG",
    "UBLKCP",
    "UTMALDG",
    "UTMASTG",
    "EXIT",
    "RET",
}
"""Instructions that reach memory of the device, or end a kernel."""


@pytest.mark.parametrize("architecture", ABILITIES)
def test_kernels_wait_before_they_reach_memory_or_end(compiled: Compiled, architecture: str, tmp_path: Path) -> None:
    """On the architectures of compute capability 9.0 and more; on the others they have no such instruction."""
    first, *others = (compiled.cubin(launch, architecture) for launch in LAUNCHES[architecture])
    (tmp_path / "kernel").write_bytes(first.data)
    before, there = before_the_wait(tmp_path / "kernel"), int(architecture.strip("sm_a")) >= 90
    assert before is not None and not REACHING & set(before) if there else before is None
    for cubin in others:
        assert read_cubin(cubin.data, "x").kernels[cubin.symbol].waits is there


def dumped(what: str, cubin: Cubin, folder: Path) -> str:
    """What NVIDIA's tool says of a cubin."""
    (folder / "kernel").write_bytes(cubin.data)
    return subprocess.run(
        [TOOLS / "cuobjdump", what, folder / "kernel"], capture_output=True, text=True, check=True
    ).stdout


MAPPED = [(a, launch) for a, launch in CASES if any(isinstance(value, TensorMap) for value in launch.args.values())]


def test_which_products_copy_by_tensor_maps() -> None:
    """Those with halves, from compute capability 9.0 on."""
    found: dict[str, set[str]] = {}
    for architecture, launch in MAPPED:
        found.setdefault(launch.label, set()).add(architecture)
    assert found == {
        "bf16 wide": {"sm_90a", "sm_100a", "sm_103a", "sm_120a"},
        "bf16 gate_up": {"sm_90a", "sm_120a"},
        "bf16 narrow": {"sm_90a"},
    }


@pytest.mark.parametrize(("architecture", "launch"), MAPPED, ids=[f"{a}-{launch.label}" for a, launch in MAPPED])
def test_tensor_maps_are_copied_in_bulk_and_ahead(
    compiled: Compiled, architecture: str, launch: Launch, tmp_path: Path
) -> None:
    """The machine code copies all operands by the unit for tensor maps and none by threads, at least `stages` - 1 turns ahead;
    a box has rows of 128 bytes, swizzled; and the kernel's parameters are those of the graph file's rules."""
    cubin, maps = compiled.cubin(launch, architecture), tensor_maps(launch)
    code = dumped("-sass", cubin, tmp_path)
    assert len(re.findall(r"\bUTMALDG\.2D\b", code)) >= len(maps) * launch.stages / 2
    assert "LDGSTS" not in code
    turn = sum(2 * rows * depth for rows, depth in (each.block for each in maps.values()))
    assert cubin.shared >= (launch.stages - 1) * turn
    assert cubin.boxes == {
        name: Box(shape=(each.block[0], 64), swizzle=128, promotion=128) for name, each in maps.items()
    }
    sizes = [size for _, size in read_cubin(cubin.data, "kernel").kernels[cubin.symbol].parameters]
    first = [MapType("bf16", each.block).parameter_bytes() for each in maps.values()]
    assert sizes[: len(sum(first, []))] == sum(first, []) and 128 not in sizes[len(sum(first, [])) :]


def tensor_maps(launch: Launch) -> dict[str, TensorMap]:
    return {name: value for name, value in launch.args.items() if isinstance(value, TensorMap)}
