"""Which groups of checks there are for a bundle, and the unpacking of its cores to where they can be opened."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

KINDS = ("kernels", "draws", "core", "timing")
"""Groups of each core. What proves most comes first, since time may run out."""

PACKED = ".xz"


def groups(cores: Sequence[str], only: Sequence[str]) -> list[str]:
    """The groups in the order in which they run; with `only`, those that match one of the patterns."""
    found = ["environment", *(f"{kind}:{core}" for kind in KINDS for core in cores)]
    return [group for group in found if not only or any(fnmatch(group, pattern) for pattern in only)]


def core_names(bundle: Path) -> list[str]:
    """The bundle's cores, by the size of their files: the small ones first."""
    cores = [path for path in (bundle / "cores").iterdir() if path.is_dir()] if (bundle / "cores").is_dir() else []
    return [path.name for path in sorted(cores, key=lambda path: (_size(path), path.name))]


def unpack(bundle: Path, names: Sequence[str], folder: Path) -> None:
    """Copies cores into a folder and decompresses what is packed, with modes that flare accepts, whatever the bundle's are."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: _unpack(bundle / "cores" / name, folder / name), names))


def pack_weights(core: Path) -> None:
    """Compresses the weights of a core that travels."""
    for path in core.glob("weights*.safetensors"):
        with open(path, "rb") as source, lzma.open(f"{path}{PACKED}", "wb", preset=3) as target:
            shutil.copyfileobj(source, target, 1 << 22)
        path.unlink()


def _unpack(core: Path, target: Path) -> None:
    for path in sorted(core.rglob("*")):
        place = target / path.relative_to(core)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            continue
        packed = path.suffix == PACKED
        place = place.with_suffix("") if packed else place
        with lzma.open(path) if packed else open(path, "rb") as source, open(place, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 22)
        place.chmod(0o644)
    for path in (target, *target.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
