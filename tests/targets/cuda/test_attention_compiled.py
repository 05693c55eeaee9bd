"""The attention kernels as they are compiled: they fit each architecture, and multiply alike in both forms."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flare.core.architectures import ABILITIES
from ignition.targets.cuda.compile import NO_PAIRS
from ignition.targets.cuda.kernels.attention_shape import SMALLEST_SPLIT, tiles

# Shared memory of a block, KiB: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_120a": 99}


FORMS = ("few", "many")


def compiled(folder: Path, architecture: str, element: str, head_dim: int, *forms: str) -> dict[str, dict[str, Any]]:
    """Compiles kernels in another process, as compile.py does: by the assembler of CUDA 12 for all architectures."""
    ptxas = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/ptxas"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | {
        "DISABLE_LLVM_OPT": NO_PAIRS,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas),
    }
    command = [
        sys.executable,
        "-m",
        "tests.targets.cuda.attention_compiler",
        architecture,
        element,
        str(head_dim),
        *forms,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def good(architecture: str, kernel: dict[str, Any]) -> bool:
    """Whether a kernel can be launched, and streams blocks without spilling: a scalar a block may come from local memory. From
    compute capability 9.0 on, it must wait before it reads or ends."""
    early = kernel["early"]
    waits = early is not None and not {"LD", "LDG", "LDGSTS", "EXIT"} & set(early)
    fits = kernel["shared"] <= SHARED[architecture] * 1024 and kernel["registers"] <= 255 and kernel["local"] <= 1
    return fits and (waits if int(architecture.strip("sm_a")) >= 90 else early is None)


@pytest.mark.parametrize(
    ("architecture", "head_dim", "instruction"),
    [
        ("sm_86", 256, "versionMajor = 2"),
        ("sm_90a", 128, "versionMajor = 3"),
        ("sm_90a", 512, "versionMajor = 3"),
        ("sm_100a", 512, "blockM = 128"),
    ],
)
def test_both_forms_fit_and_multiply_alike(tmp_path: Path, architecture: str, head_dim: int, instruction: str) -> None:
    """mma.sync, wgmma or tcgen05: the same instruction, of the same columns and depth, for the same product."""
    kernels = compiled(tmp_path, architecture, "bf16", head_dim, *FORMS)
    assert kernels["few"]["products"] == kernels["many"]["products"]
    for kernel in kernels.values():
        assert good(architecture, kernel)
        assert len(kernel["products"]) == 3
        assert all(f": {instruction}" in product for product in kernel["products"])


@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("sm_80", 512), ("sm_89", 64), ("sm_103a", 64), ("sm_120a", 512)]
)
def test_the_larger_form_fits_the_other_architectures(tmp_path: Path, architecture: str, head_dim: int) -> None:
    assert good(architecture, compiled(tmp_path, architecture, "f16", head_dim, "many")["many"])


def test_tiles_of_both_forms_suit_one_instruction() -> None:
    """mma.sync takes 16 rows, wgmma 64, tcgen05.mma 128 or 64 that are other instructions."""
    for architecture in ABILITIES:
        for element in ("bf16", "f16", "f32"):
            for head_dim in (64, 80, 128, 256, 264, 512):
                found = tiles(architecture, element, head_dim)
                if architecture in ("sm_100a", "sm_103a") or element == "f32":
                    assert found.few == found.many
                else:
                    floor = 64 if architecture == "sm_90a" else 16
                    assert found.few.rows >= floor and (found.few.rows < 64) == (floor == 16)
                assert SMALLEST_SPLIT % found.block == 0
    assert set(ABILITIES) == set(SHARED)
