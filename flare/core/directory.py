"""Opening a core directory: names, modes, sizes and hashes are checked before anything in it is used.

A core holds native code, so it is as trusted as the program itself. Opening refuses links, files that others may write,
paths that leave the directory, sizes that disagree with the manifest, and, for everything but the weights, wrong hashes.
Of each target's weights, size and header are checked at once; `verify=True` hashes every byte.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from flare.core.architectures import Architecture
from flare.core.checksums import sha256_bytes, sha256_chunked
from flare.core.graph import Graph, decode_graph
from flare.core.manifest import (
    MANIFEST_CHECKSUM_FILE,
    MANIFEST_FILE,
    CpuTarget,
    CudaTarget,
    Manifest,
)
from flare.core.manifest_checks import decode_manifest
from flare.errors import CoreError, InputError, NoCore

if TYPE_CHECKING:
    from flare.core.cuda_graph import CudaGraphs

MAX_SMALL_FILE_BYTES = 256 << 20


class Core:
    """An opened core: its manifest and the checked bytes of its small files.

    Attributes: `path` (absolute), `manifest`. `read` gives the very bytes that were hashed. Libraries and weights are opened
    again by path when they are loaded: who may write the directory is trusted, as with any program.
    """

    def __init__(self, path: Path, manifest: Manifest, manifest_sha256: str, small: dict[str, bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self.manifest_sha256 = manifest_sha256
        self._small = small

    def read(self, name: str) -> bytes:
        """Returns the checked bytes of a small file (everything but the weights). Raises KeyError for an unknown name."""
        return self._small[name]

    def file(self, name: str) -> Path:
        """Returns the absolute path of a file that the manifest lists."""
        return self.path / name

    def graph(self, name: str = "step") -> Graph:
        """Returns a decoded graph of the cpu target, which the core must have. Raises CoreError when the file is malformed."""
        assert self.manifest.cpu is not None
        file = self.manifest.cpu.graphs[name]
        return decode_graph(self.read(file), file)

    def host_graph(self) -> Graph:
        """Returns the decoded graph of the cuda target's host part, which the core must have. Raises as `graph` does."""
        assert self.manifest.cuda is not None and self.manifest.cuda.host is not None
        file = self.manifest.cuda.host.program.graphs["step"]
        return decode_graph(self.read(file), file)

    def cuda_graphs(self, architecture: Architecture) -> CudaGraphs:
        """Returns the decoded graphs of the cuda target, which the core must have, for one of its architectures.

        Raises CoreError when the file is malformed; `cuda_checks.py` checks what they say.
        """
        from flare.core.cuda_graph import decode_cuda_graphs

        assert self.manifest.cuda is not None
        file = self.manifest.cuda.architectures[architecture]
        return decode_cuda_graphs(self.read(file), file)


def read_manifest(path: str | os.PathLike[str]) -> tuple[Manifest, str]:
    """Returns the manifest of the core directory at `path`, checked by itself, and its hash in hexadecimal.

    Raises NoCore when there is no such directory, CoreError naming file, value and remedy when the manifest is bad.
    """
    root = Path(os.path.realpath(path))
    if not os.path.isdir(root):
        from flare.core import wrong_path

        found = wrong_path.file if os.path.lexists(root) else wrong_path.missing
        raise NoCore(f"{os.fspath(path)}: {found(Path(path))}")
    _check_mode(root, os.stat(root), str(path))
    if not os.access(root, os.R_OK | os.X_OK):
        raise InputError(f"{os.fspath(path)}: may not be read by this user; check its permissions")
    if not os.path.lexists(root / MANIFEST_FILE):
        from flare.core import wrong_path

        raise CoreError(f"{os.fspath(path)}: {wrong_path.directory(Path(path))}")
    data = _read(root, MANIFEST_FILE)
    digest = sha256_bytes(data)
    recorded = _read(root, MANIFEST_CHECKSUM_FILE).decode("ascii", "replace").split()
    if recorded != [digest, MANIFEST_FILE]:
        raise CoreError(
            f"{MANIFEST_FILE}: its hash is {digest[:16]}…, {MANIFEST_CHECKSUM_FILE} disagrees; export again"
        )
    return decode_manifest(data), digest


def open_core(path: str | os.PathLike[str], *, verify: bool = False) -> Core:
    """Opens the core directory at `path` and checks it; `verify` also hashes every byte of the weights.

    Raises as `read_manifest` does, and CoreError when a file of the core is bad.
    """
    manifest, digest = read_manifest(path)
    root = Path(os.path.realpath(path))
    small: dict[str, bytes] = {}
    weights = {part.weights.file: part for part in manifest.parts}
    for name, entry in manifest.files.items():
        if name in weights:
            _check_weights(root, manifest, weights[name])
            continue
        content = _read(root, name, entry.bytes)
        if sha256_bytes(content) != entry.hash:
            raise CoreError(f"{name}: bytes differ from the manifest's hash {entry.hash[:16]}…; export the core again")
        small[name] = content
    core = Core(root, manifest, digest, small)
    if verify:
        verify_weights(core)
    return core


def verify_weights(core: Core) -> None:
    """Hashes every byte of every target's weights, and of a host part's. Raises CoreError when they differ from the
    manifest."""
    for part in core.manifest.parts:
        name = part.weights.file
        entry = core.manifest.files[name]
        if sha256_chunked(core.file(name)) != entry.hash:
            raise CoreError(f"{name}: bytes differ from the manifest's hash {entry.hash[:16]}…; export the core again")


def _check_mode(path: Path, status: os.stat_result, shown: str) -> None:
    if status.st_mode & stat.S_IWOTH:
        raise CoreError(f"{shown}: others may write it (mode {stat.S_IMODE(status.st_mode):o}); chmod o-w it")


def _open(root: Path, name: str) -> int:
    """Opens a regular file below `root` without following links; returns the descriptor."""
    directory = root
    for part in Path(name).parts[:-1]:
        directory = directory / part
        status = os.lstat(directory) if os.path.lexists(directory) else None
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise CoreError(f"{name}: missing, or a link on the way to it; export the core again")
        _check_mode(directory, status, str(directory.relative_to(root)))
    try:
        file = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CoreError(f"{name}: missing from the core; export the core again") from None
    except OSError as error:
        raise CoreError(f"{name}: cannot be opened without following links ({os.strerror(error.errno or 0)})") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise CoreError(f"{name}: not a regular file; export the core again")
    try:
        _check_mode(root / name, status, name)
    except CoreError:
        os.close(file)
        raise
    return file


def _read(root: Path, name: str, size: int | None = None) -> bytes:
    file = _open(root, name)
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(file).st_size
        if size is not None and found != size:
            raise CoreError(f"{name}: {found} bytes, the manifest says {size}; export the core again")
        if found > MAX_SMALL_FILE_BYTES:
            raise CoreError(f"{name}: {found} bytes, the limit is {MAX_SMALL_FILE_BYTES}; export the core again")
        return stream.read()


def _check_weights(root: Path, manifest: Manifest, target: CpuTarget | CudaTarget) -> None:
    """Checks the weights' size, and the header by hash: a safetensors header says where each tensor lies."""
    name, segments = target.weights.file, target.segments
    entry = manifest.files[name]
    file = _open(root, name)
    with os.fdopen(file, "rb") as stream:
        size = os.fstat(file).st_size
        if size != entry.bytes or size != segments.weights_offset + segments.weights_bytes:
            raise CoreError(
                f"{name}: {size} bytes, the manifest says {entry.bytes} "
                f"({segments.weights_offset} of header, {segments.weights_bytes} of weights); export the core again"
            )
        header = stream.read(segments.weights_offset)
    if len(header) < 8 or int.from_bytes(header[:8], "little") != segments.weights_offset - 8:
        raise CoreError(f"{name}: header length disagrees with segments.weights_offset; export the core again")
    if sha256_bytes(header) != target.weights.header_sha256:
        raise CoreError(f"{name}: header differs from the manifest's hash; export the core again")
