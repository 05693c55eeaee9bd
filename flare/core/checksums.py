"""Hashes of a core's files.

Small files are hashed with SHA-256 as a whole. Weights use a two-level SHA-256: the file is cut into chunks of 8 MiB, the
chunks are hashed in parallel, and the hash of the file is the SHA-256 of the chunks' digests joined in order. That lets
every core of the machine work on one file, and is as hard to forge as SHA-256 itself.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

CHUNK_BYTES = 8 << 20


def sha256_bytes(data: bytes | memoryview) -> str:
    """Returns the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_chunked(path: str | os.PathLike[str], *, threads: int | None = None) -> str:
    """Returns the two-level SHA-256 of a file as 64 hex digits.

    `threads` bounds the hashing threads (default: the machine's processors). Raises OSError when the file cannot be read.
    """
    size = os.stat(path).st_size
    workers = min(threads or os.cpu_count() or 1, max(1, -(-size // CHUNK_BYTES)))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def digest(offset: int) -> bytes:
            hasher = hashlib.sha256()
            end = min(offset + CHUNK_BYTES, size)
            while offset < end:  # pread may return less than asked for
                piece = os.pread(file, min(1 << 20, end - offset), offset)
                if not piece:
                    break  # the file shrank: the digest will disagree
                hasher.update(piece)
                offset += len(piece)
            return hasher.digest()

        outer = hashlib.sha256()
        with ThreadPoolExecutor(workers) as pool:
            for chunk in pool.map(digest, range(0, size, CHUNK_BYTES)):
                outer.update(chunk)
        return outer.hexdigest()
    finally:
        os.close(file)
