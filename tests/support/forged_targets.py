"""Cores with a cuda target that nothing was compiled for: what a start decides before it needs a device's kernels."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import msgpack

from tests.support.forged_cores import forge_manifest

GRAPHS = "graphs/cuda-sm_90a.msgpack"


def add_cuda(core: Path, *, alone: bool = False) -> None:
    """Adds a cuda target for sm_90a with the weights of the cpu one; `alone` takes that one away."""
    shutil.copy(core / "weights.safetensors", core / "weights-cuda.safetensors")
    (core / GRAPHS).write_bytes(b"")

    def change(manifest: dict[str, Any]) -> None:
        (cpu,) = manifest["targets"]
        cuda = {
            "kind": "cuda",
            "architectures": {"sm_90a": GRAPHS},
            "compute_dtype": "bf16",
            "compiler": {"triton": "3.9.0"},
            "segments": cpu["segments"] | {"host_bytes": 4096, "kv_page_bytes": 1 << 15},
            "weights": cpu["weights"] | {"file": "weights-cuda.safetensors", "kv_format": "bf16"},
        }
        files = manifest["files"]
        files["weights-cuda.safetensors"] = dict(files["weights.safetensors"])
        files[GRAPHS] = {"bytes": 0, "hash": hashlib.sha256(b"").hexdigest(), "chunked": False}
        manifest["targets"] = [cuda] if alone else [cpu, cuda]

    forge_manifest(core, change)
    if alone:
        _without_cpu(core)


def add_host(core: Path) -> None:
    """Gives the cuda target of a core that has a cpu target, too, a host part: a copy of that."""
    shutil.copy(core / "weights.safetensors", core / "weights-host.safetensors")

    def change(manifest: dict[str, Any]) -> None:
        cpu, cuda = manifest["targets"]
        program = cpu | {"weights": cpu["weights"] | {"file": "weights-host.safetensors"}}
        cuda["host"] = {"ops": {"silu_mul": 2}, "program": program}
        manifest["files"]["weights-host.safetensors"] = dict(manifest["files"]["weights.safetensors"])

    forge_manifest(core, change)


def _without_cpu(core: Path) -> None:
    """Takes what is of the cpu target out of a core whose manifest has it no longer."""
    oracle = msgpack.unpackb((core / "oracle.msgpack").read_bytes())
    for prompt in oracle["prompts"]:
        prompt["compiled"] = {}
    data = msgpack.packb(oracle)
    (core / "oracle.msgpack").write_bytes(data)

    def change(manifest: dict[str, Any]) -> None:
        files = manifest["files"]
        for name in [name for name in files if name.startswith(("kernels/", "graphs/step", "weights."))]:
            del files[name]
        files["oracle.msgpack"].update(bytes=len(data), hash=hashlib.sha256(data).hexdigest())
        manifest["oracle"]["isas"] = []

    forge_manifest(core, change)
