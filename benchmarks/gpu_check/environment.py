"""What machine the figures come from, and whether there is a device for the bundle's cores at all."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_check.findings import Checks, Finding, measured
from flare.core.architectures import in_order
from flare.core.directory import open_core
from flare.replay.cuda_driver import open_device

PACKAGES = ("cuda-bindings", "torch", "triton", "numpy")


def check_environment(checks: Checks, folder: Path) -> None:
    """Opens the device as flare does, and says what there is."""

    def versions() -> Finding:
        return measured("versions", python=platform.python_version(), system=platform.platform(), **_versions())

    def device() -> Finding:
        architectures: set[str] = set()
        for path in sorted(folder.iterdir()):
            target = open_core(path).manifest.cuda
            architectures |= set(target.architectures) if target else set()
        opened = open_device(in_order(architectures))
        try:
            free, total = opened.memory()
            return measured(
                "the device that flare takes",
                name=opened.name,
                capability=".".join(map(str, opened.capability)),
                architecture=opened.architecture,
                cuda_of_driver=opened.driver_version(),
                memory_bytes=total,
                free_bytes=free,
            )
        finally:
            opened.close()

    checks.run("versions", versions)
    checks.run("device", device)


def _versions() -> dict[str, str]:
    import msgspec

    found = {"msgspec": msgspec.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
