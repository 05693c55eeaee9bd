"""A core's weights: file -> device memory, by way of two pinned buffers, so that reading and copying go on at once."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from flare.errors import CoreError
from flare.replay.cuda_driver import CudaDevice

STAGING_BYTES = 32 << 20
"""Size of either buffer."""


def load_weights(device: CudaDevice, path: Path, offset: int, size: int, target: int) -> None:
    """Copies `size` bytes of the file from `offset` on to device memory at `target`, and frees the buffers.

    Bytes are read straight into pinned memory: mapping the file would fault on each page, and end the process where the file
    is cut short meanwhile. Raises CoreError when the file is shorter, InputError when there is no memory to be pinned.
    """
    if not size:
        return
    staging: list[int] = []
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        held = os.fstat(file).st_size
        if offset + size > held:
            raise CoreError(f"{path.name}: weights: {size} bytes at {offset} reach beyond the file's {held}")
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_SEQUENTIAL)
        chunk = min(STAGING_BYTES, size)
        for _ in range(2 if size > chunk else 1):
            staging.append(device.pin(chunk, "weights: a buffer to copy them by"))
        views = [memoryview((ctypes.c_char * chunk).from_address(address)).cast("B") for address in staging]
        copied = [device.event() for _ in staging]
        for index, begin in enumerate(range(0, size, chunk)):
            turn, count = index % len(staging), min(chunk, size - begin)
            if index >= len(staging):
                device.wait(copied[turn])
            _read(file, views[turn][:count], offset + begin, path.name)
            device.upload(target + begin, staging[turn], count)
            device.record(copied[turn])
        device.synchronise()
    except BaseException:
        device.settle()
        raise
    finally:
        os.close(file)
        for address in staging:
            device.unpin(address)


def _read(file: int, view: memoryview, offset: int, name: str) -> None:
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise CoreError(f"{name}: weights: the file ends at byte {offset} while it is read")
        view, offset = view[count:], offset + count
