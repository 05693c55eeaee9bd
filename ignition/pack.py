"""Packing: a core is written beside its final place, made durable, and renamed into it.

Until the rename there is no core: an export that is interrupted, killed or out of disk leaves nothing under the name that
was asked for. Files and folders get fixed modes, so that two exports of one checkpoint are equal byte for byte.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from flare.core.checksums import sha256_bytes, sha256_chunked
from flare.core.manifest import MANIFEST_CHECKSUM_FILE, MANIFEST_FILE, File, Manifest
from flare.errors import InputError
from ignition.plan import Span

ALIGNMENT = 64
PAGE = 4096
# File systems that can keep a file in huge pages do so for what is written in whole ones. A process that maps the core
# soon afterwards then reads its weights through a thousandth of the page table's entries.
WRITE_BYTES = 8 << 20


def lay_out_weights(sizes: Mapping[str, int]) -> tuple[dict[str, Span], bytes]:
    """Places a target's packed weights, in the order given, and returns their spans and the safetensors header before them.

    `sizes` are bytes by tensor name. Every tensor is padded to a multiple of 64 bytes and declared as u8 of its padded
    size, so that the data has no holes; the header is padded with spaces until the data starts at a multiple of 4096.
    """
    spans: dict[str, Span] = {}
    entries: dict[str, object] = {"__metadata__": {"format": "flare-core"}}
    offset = 0
    for name, size in sizes.items():
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        spans[name] = Span(offset, size)
        entries[name] = {"dtype": "U8", "shape": [padded], "data_offsets": [offset, offset + padded]}
        offset += padded
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return spans, len(text).to_bytes(8, "little") + text


class CoreWriter:
    """Writes one core. Use as a context manager; without `commit` everything written is removed again.

    Raises InputError for a place that cannot be written, that holds something other than a core, or that is full.
    """

    def __init__(self, output: Path) -> None:
        self.output = Path(os.path.realpath(output))  # a link stays: what it points to is replaced
        self.folder = Path()  # made on entry
        self.files: dict[str, File] = {}
        self._lock = -1

    def __enter__(self) -> CoreWriter:
        with self._writing():
            if self.output.exists() and not (self.output / MANIFEST_FILE).is_file() and any_entry(self.output):
                raise InputError(f"{self.output}: exists and is not a core; choose another -o or remove it")
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._make_folder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def add(self, name: str, data: bytes) -> None:
        """Writes a small file and records its size and hash."""
        self._write(name, [data])
        self.files[name] = File(bytes=len(data), hash=sha256_bytes(data))

    def add_weights(self, name: str, header: bytes, tensors: Iterable[Callable[[], bytes]]) -> None:
        """Writes a target's weights: the header, then each tensor, made when its turn comes and padded to 64 bytes."""

        def pieces() -> Iterable[bytes]:
            yield header
            for make in tensors:
                data = make()
                yield data
                yield bytes(-len(data) % ALIGNMENT)

        self._write(name, pieces())
        path = self.folder / name
        with self._writing():
            self.files[name] = File(bytes=path.stat().st_size, hash=sha256_chunked(path), chunked=True)

    def commit(self, manifest: Manifest) -> None:
        """Writes the manifest and its checksum, makes everything durable and moves the core into place."""
        data = manifest.encode()
        self._write(MANIFEST_FILE, [data])
        self._write(MANIFEST_CHECKSUM_FILE, [f"{sha256_bytes(data)}  {MANIFEST_FILE}\n".encode()])
        with self._writing():
            for folder, _, _ in os.walk(self.folder):
                _sync(folder)
            if self.output.exists():
                exchange(self.folder, self.output)  # the old core is now the temporary folder, which leaving removes
            else:
                os.rename(self.folder, self.output)
            _sync(self.output.parent)

    def _write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = self.folder / name
        with self._writing():
            for folder in reversed(Path(name).parents[:-1]):
                if not (self.folder / folder).exists():
                    (self.folder / folder).mkdir()
                    (self.folder / folder).chmod(0o755)
            stream = open(path, "xb", buffering=0)
        with stream:
            for block in in_blocks(pieces):  # making a piece may fail for its own reasons, which are not the output's
                with self._writing():
                    rest = memoryview(block)
                    while rest:
                        rest = rest[stream.write(rest) :]
            with self._writing():
                os.fchmod(stream.fileno(), 0o644)
                os.fsync(stream.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what the file system refuses into one line about the place of the core."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(self.output.parent).free
                raise InputError(
                    f"{self.output}: the disk is full ({free} bytes free); free some space or choose another -o"
                ) from None
            raise InputError(f"{self.output}: cannot be written ({os.strerror(error.errno or 0)})") from None

    def _make_folder(self) -> None:
        """Makes the temporary folder and locks it for as long as this export runs."""
        while True:
            self.folder = Path(tempfile.mkdtemp(prefix=f".{self.output.name}.partial-", dir=self.output.parent))
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # without locks nobody takes the folder for a leftover either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                os.chmod(self.folder, 0o755)
                return
            except FileNotFoundError:  # another export found it before it was locked, and removed it
                os.close(self._lock)

    def _remove_leftovers(self) -> None:
        """Removes what killed exports to the same place left behind: folders that no living process holds locked.

        The lock is the kernel's, so it holds across pid namespaces (containers that share a volume) and ends with its
        process, however that ends.
        """
        for leftover in self.output.parent.glob(f".{glob.escape(self.output.name)}.partial-*"):
            with suppress(OSError):
                descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(leftover, ignore_errors=True)
                finally:
                    os.close(descriptor)


def in_blocks(pieces: Iterable[bytes], size: int = WRITE_BYTES) -> Iterator[bytes | bytearray]:
    """The same bytes in blocks of `size`, the last one shorter."""
    block = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[: size - len(block)]
            block += taken
            view = view[len(taken) :]
            if len(block) == size:
                yield block
                block = bytearray()
    if block:
        yield block


def any_entry(path: Path) -> bool:
    """Whether `path` is something other than an empty directory."""
    return not path.is_dir() or any(path.iterdir())


def exchange(one: Path, other: Path) -> None:
    """Swaps two directories atomically (renameat2 with RENAME_EXCHANGE), so that the old core stands until the new one does.

    A file system or C library without it gets renames instead: for a moment nothing stands at `other`.
    """
    at_working_directory, flag = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        failed = libc.renameat2(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other), flag)
        number = ctypes.get_errno() if failed else 0
    except AttributeError:
        number = errno.ENOSYS
    if number in (errno.EINVAL, errno.ENOSYS):
        aside = one.with_name(f"{one.name}-old")  # a leftover's name: the next export removes it if this one is killed
        os.rename(other, aside)
        try:
            os.rename(one, other)
        except OSError:
            os.rename(aside, other)
            raise
        os.rename(aside, one)
    elif number:
        raise OSError(number, os.strerror(number), str(other))


def _sync(folder: str | os.PathLike[str]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
