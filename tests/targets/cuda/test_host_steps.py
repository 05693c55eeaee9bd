"""Steps of which the processor runs a part: graphs and programs as an export writes them, on ordinary memory for a device."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flare.core.oracle import excess, tolerance
from flare.errors import RequestError
from flare.fallbacks import Fallback, Fallbacks
from flare.replay.program import runnable_isas
from ignition.options import ISAS
from ignition.oracle import deviation
from ignition.targets.cpu import compile
from ignition.targets.cpu.source import generate, headers
from ignition.targets.cuda.kernels import norm
from ignition.targets.cuda.places import KERNELS
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda_exports import Exported, export_cuda, export_odd
from tests.support.cuda_hosts import HostStep
from tests.support.odd_graphs import heads_of_their_own, late_product

CASES: dict[str, tuple[str, str, str, Collection[str]]] = {
    "silu_mul and embed": ("llama", "float32", "auto", {"silu_mul", "embed"}),
    "rms_norm": ("llama", "float32", "auto", {"rms_norm"}),
    "kv_write": ("llama", "float32", "auto", {"kv_write"}),
    "all": ("llama", "float32", "auto", KERNELS),
    "bf16 silu_mul and rms_norm": ("qwen3", "bfloat16", "auto", {"silu_mul", "rms_norm"}),
    "q8 linear and take_rows": ("llama", "float32", "q8", {"linear", "take_rows"}),
    "fp8 linear and embed": ("llama", "float32", "fp8", {"linear", "embed"}),
}
"""By name: checkpoint, its dtype, --weights, and the ops that have no kernel."""

TABLES = [[3, 1], [9, 5], [0, 7]]
FIRST = [5, 6, 7, 200, 9], [0, 1, 2, 0, 1], [0, 0, 0, 2, 2], [4, 2]
SECOND = [11, 12, 3], [3, 4, 2], [0, 0, 2], [1, 2, 0]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    folder = tmp_path_factory.mktemp("exports")
    checkpoints = {
        (kind, dtype): make_checkpoint(folder / f"{kind}-{dtype}", kind, dtype=dtype, num_hidden_layers=1)
        for kind, dtype, _, _ in CASES.values()
    }
    made = {
        name: export_cuda(checkpoints[kind, dtype], weights, kernels=KERNELS - set(missing))
        for name, (kind, dtype, weights, missing) in CASES.items()
    }
    narrow = make_checkpoint(folder / "narrow", "qwen3", num_hidden_layers=1, head_dim=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "WIDEST", 63)
        wide = export_cuda(checkpoints["llama", "float32"])
    return made | {
        "heads of 20": export_cuda(narrow),
        "wide norms": wide,
        "odd": export_odd(heads_of_their_own, "head"),
        "late product": export_odd(late_product, "square", kernels=KERNELS - {"silu_mul"}),
    }


@pytest.fixture(scope="module")
def library(exports: dict[str, Exported], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One library with the kernels of all host parts here, compiled in a hurry: what they compute does not depend on that."""
    isa = runnable_isas(ISAS)[-1]
    kernels = dict.fromkeys(kernel for made in exports.values() for kernel in made.export.host.export.kernels)
    path = tmp_path_factory.mktemp("library") / "host.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "FLAGS", tuple(flag.replace("-O3", "-O0") for flag in compile.FLAGS))
        path.write_bytes(compile.compile_libraries({isa: generate(kernels, isa)}, headers())[isa].data)
    return path


def run(step: HostStep, tokens: list[int], positions: list[int], slots: list[int], rows: list[int]) -> Tensor:
    """The logits of a step on the pages of TABLES."""
    for slot, pages in enumerate(TABLES):
        step.page_table[slot * step.page_stride : slot * step.page_stride + len(pages)] = pages
    count = len(tokens)
    step.tokens[:count], step.positions[:count], step.slots[:count] = tokens, positions, slots
    step.rows[: len(rows)] = rows
    step.step(count, len(rows))
    return torch.stack([step.logits(row) for row in range(len(rows))])


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_kernels_computes_what_the_reference_does(
    exports: dict[str, Exported], library: Path, name: str
) -> None:
    """Two steps, of which the second reads what the first left in the pages of its side."""
    made, missing = exports[name], CASES[name][3]
    assert missing <= made.target.host.ops.keys() and set(made.target.host.ops) - missing <= {
        "rope",
        "rms_norm",
        "kv_write",
        "attention",
    }
    found, wanted = [], []
    with HostStep(made, library) as step:
        for given in (FIRST, SECOND):
            found.append(run(step, *given))
            wanted.append(made.reference.step(*given[:3], TABLES, given[3]))
    if CASES[name][1:3] == ("float32", "auto"):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=2e-5 * theirs.abs().max())
    else:
        problem = excess(deviation(torch.cat(wanted).numpy(), torch.cat(found).numpy()), tolerance(made.target.formats))
        assert problem is None


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("odd", {"rms_norm": 1}),
        ("late product", {"silu_mul": 2}),
        ("heads of 20", {"rms_norm": 2, "rope": 2, "kv_write": 1, "attention": 1}),
        ("wide norms", {"rms_norm": 3}),
    ],
)
def test_a_step_in_a_place_or_of_a_size_without_kernels(
    exports: dict[str, Exported], library: Path, name: str, ops: dict[str, int]
) -> None:
    """An op in a place that no kernel was made for; a layer that runs in a later piece than its place in the step; sizes that
    kernels do not take."""
    made = exports[name]
    assert made.target.host.ops == ops
    with HostStep(made, library) as step:
        for given in (FIRST, SECOND):
            found, wanted = run(step, *given), made.reference.step(*given[:3], TABLES, given[3])
            assert torch.allclose(found, wanted, rtol=0, atol=2e-5 * wanted.abs().max())


@pytest.mark.parametrize("name", ["bf16 silu_mul and rms_norm", "q8 linear and take_rows"])
def test_a_row_has_the_same_bits_in_every_bucket_and_by_any_chunks(
    exports: dict[str, Exported], library: Path, name: str
) -> None:
    made, (tokens, positions, slots, _) = exports[name], FIRST
    with HostStep(made, library, threads=1) as alone, HostStep(made, library, threads=3) as together:
        last = [run(alone, [token], [place], [0], [0]) for place, token in enumerate(tokens[:3])][-1]
        chunk = run(alone, [200, 9], [0, 1], [2, 2], [1, 0])
        padded = [*tokens, 31, 32, 33, 34], [*positions, 0, 1, 2, 3], [*slots, 1, 1, 1, 1], [2, 4, 3]
        found = run(together, *padded)
    assert torch.equal(found, torch.cat([last, chunk]))


def test_matrices_of_the_host_are_stored_as_its_kernels_read_them(exports: dict[str, Exported]) -> None:
    """fp8 has no kernel there; what the device does not read is not among its weights, and the other way round."""
    fp8, q8, silu = exports["fp8 linear and embed"], exports["q8 linear and take_rows"], exports["silu_mul and embed"]
    assert fp8.target.host.program.weights.formats.keys() == {"bf16"}
    assert fp8.target.weights.formats.keys() == {"f32"}  # norms and rotary frequencies
    assert q8.target.host.program.weights.formats.keys() == {"q8"}
    table = silu.target.host.program.segments
    assert silu.target.host.program.weights.formats == {"f32": table.weights_bytes} == {"f32": 384 * 64 * 4}
    whole = silu.target.decode_weight_bytes
    assert q8.target.decode_weight_bytes > q8.target.weights.decode_weight_bytes and whole > 0
    assert exports["all"].target.weights.formats == {} and exports["all"].target.decode_weight_bytes == whole


def test_a_step_is_recorded_and_so_is_what_is_interpreted_in_it(exports: dict[str, Exported], library: Path) -> None:
    fallbacks = Fallbacks(told=False)
    with HostStep(exports["rms_norm"], library, fallbacks=fallbacks) as step:
        run(step, *FIRST)
    norms = "op rms_norm (3 nodes) is not run by a kernel of the cuda target, the processor runs it"
    rows = "op rms_norm (1 node) is not run by a kernel of the cpu target, numpy interprets it"
    assert fallbacks.events == (Fallback(norms, 1), Fallback(rows, 1))


def test_where_nothing_may_run_on_the_processor_no_piece_is_launched(
    exports: dict[str, Exported], library: Path
) -> None:
    with HostStep(exports["silu_mul and embed"], library, fallbacks=Fallbacks(allowed=False)) as step:
        with pytest.raises(RequestError, match=r"^CPU fallback disabled: op embed \(1 node\) is not run by a kernel"):
            run(step, *FIRST)
        assert step.device.launched == []
