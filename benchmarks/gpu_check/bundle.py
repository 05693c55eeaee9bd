"""Prepares what `benchmarks.gpu_check` needs on a machine with a device and no network, on one with the exporter:

    python -m benchmarks.gpu_check.bundle [FOLDER] [--architecture sm_90a]...

Exports the cores of models.py, with the weights compressed, and unpacks msgspec for the Pythons that such machines have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from benchmarks.gpu_check.__main__ import ROOT
from benchmarks.gpu_check.models import MODELS, Model, write_checkpoint
from benchmarks.gpu_check.plan import pack_weights
from flare.core.architectures import Architecture
from ignition.export import export_core
from ignition.options import WITHOUT_FP8, Options

PYTHONS = ("311", "312")
PLATFORM = "manylinux2014_x86_64"
MOST_BYTES = 60 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check.bundle",
        description="Exports the cores that `python -m benchmarks.gpu_check` runs on a machine with a device; takes minutes.",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=ROOT / "gpu-check", help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--architecture",
        action="append",
        choices=get_args(Architecture),
        help="architecture to export for (repeatable; default: sm_90a)",
    )
    options = parser.parse_args()
    make_bundle(options.folder, options.architecture or ["sm_90a"], MODELS)
    size = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"{options.folder}: it may have {MOST_BYTES >> 20} MiB, to travel; name fewer architectures")


def make_bundle(
    folder: Path, architectures: Sequence[str], models: Sequence[Model], pythons: Sequence[str] = PYTHONS
) -> None:
    """Makes the bundle anew, in the place of an earlier one."""
    if folder.exists() and not (folder / "bundle.json").exists():
        sys.exit(f"{folder}: exists and is no bundle; name another folder, or remove it")
    shutil.rmtree(folder, ignore_errors=True)
    for python in pythons:
        bring_msgspec(folder, python)
    made = []
    for model in models:
        if model.weights == "fp8" and set(architectures) & set(WITHOUT_FP8):
            continue
        print(f"{model.name}: exporting", flush=True)
        export(model, folder / "cores" / model.name, architectures)
        made.append(model.name)
    about = {
        "architectures": list(architectures),
        "cores": made,
        "flare": version("flare-ignition"),
        "triton": version("triton"),
    }
    (folder / "bundle.json").write_text(json.dumps(about, indent=1) + "\n")


def export(model: Model, path: Path, architectures: Sequence[str]) -> None:
    """Exports a model's core and compresses its weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    long = model.kind == "long"
    options = Options(
        weights=model.weights,
        targets=(f"cuda:{','.join(architectures)}",),
        slots=32 if long else 8,
        max_step_tokens=512 if long else 128,
    )
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as temporary:
        export_core(str(write_checkpoint(model, Path(temporary) / model.name)), path, options)
    pack_weights(path)


def bring_msgspec(folder: Path, python: str) -> None:
    """Unpacks the wheel of the msgspec that is installed here, for a version of Python such as 312."""
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as temporary:
        wanted = ["--only-binary=:all:", "--no-deps", "--platform", PLATFORM, "--python-version", python]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *wanted]
            + ["--dest", temporary, f"msgspec=={version('msgspec')}"],
            check=True,
        )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / f"site-cp{python}")


if __name__ == "__main__":
    main()
