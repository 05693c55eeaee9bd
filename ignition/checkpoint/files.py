"""Reading untrusted files: regular files only, sizes first, JSON within bounds."""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from flare.errors import InputError

JSON_LIMIT = 100 << 20  # bytes; the bound that the safetensors format sets for its header


def file_size(path: Path) -> int:
    """Bytes of a regular file, links followed (a hub cache is made of them). Raises InputError for anything else."""
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: {reason(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a regular file")
    return status.st_size


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """The whole of a small file. Raises InputError when it is longer than `limit` bytes."""
    size = file_size(path)
    if size > limit:
        raise InputError(f"{path}: {size} bytes, the limit for this file is {limit}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {reason(error)}") from None


def read_text(path: Path, limit: int = JSON_LIMIT) -> str:
    """A small UTF-8 file; line ends stay as they are."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None


def map_file(path: Path) -> memoryview:
    """The file mapped read-only. Raises InputError when it is empty or cannot be mapped."""
    if file_size(path) == 0:
        raise InputError(f"{path}: the file is empty")
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {reason(error)}") from None


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises InputError whose line starts with `where`.

    Nesting is bounded by the parser's own recursion limit.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise InputError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({reason(error)})") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON {type(value).__name__}, an object is needed")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file."""
    return parse_object(read_bytes(path), str(path))


def check_tokenizer(content: bytes, where: str) -> None:
    """Raises InputError unless the `tokenizers` library loads this tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise InputError(f"{where}: the tokenizers library refuses it ({reason(error)})") from None


def printable(name: str) -> str:
    """A name from an untrusted file as part of a one-line message."""
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])


def reason(error: BaseException) -> str:
    """An exception as the tail of a one-line message."""
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return " ".join((text or type(error).__name__).split())[:300]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} occurs twice")
            seen.add(key)
    return value
