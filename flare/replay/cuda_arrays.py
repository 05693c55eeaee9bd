"""The arrays between a replay and its graphs: each has a place in device memory and, pinned, one on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import memmove, memset, sizeof
from typing import Any

from flare.core.cuda_graph import Pointer
from flare.replay.cuda_driver import CudaDevice

differ = ctypes.CDLL(None).memcmp
"""memcmp of two addresses and a number of bytes: 0 where all are the same."""
differ.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class DeviceArrays:
    """Addresses of the named arrays of a graph file. What is written to the host's side is sent by `send`."""

    def __init__(self, device: CudaDevice, io: Mapping[str, Pointer], addresses: Mapping[str, int]) -> None:
        self.device = device
        self.address = {name: addresses[place.segment] + place.offset for name, place in io.items()}

    def host(self, name: str) -> int:
        """Returns the address of an array's side on the host."""
        return self.address[f"host.{name}"]

    def send(self, name: str, offset: int, size: int) -> None:
        """Starts to copy bytes of an array to the device."""
        self.device.upload(self.address[name] + offset, self.host(name) + offset, size)

    def fetch(self, name: str, offset: int, size: int) -> None:
        """Starts to copy bytes of an array to the host."""
        self.device.download(self.host(name) + offset, self.address[name] + offset, size)

    def send_all(self, name: str, spans: Iterable[tuple[int, int]]) -> None:
        """Starts to copy spans (offset, bytes) of an array, in ascending order; those that touch go together."""
        begin = end = 0
        for offset, size in spans:
            if offset != end:
                if end > begin:
                    self.send(name, begin, end - begin)
                begin = offset
            end = offset + size
        if end > begin:
            self.send(name, begin, end - begin)


class PageTable:
    """The page table on the device, kept like the engine's: a slot's row is checked and copied only where it changed."""

    def __init__(self, arrays: DeviceArrays, source: Any, stride: int, kv_pages: int) -> None:
        self._arrays = arrays
        self._stride = stride
        self._kv_pages = kv_pages
        self._source = source
        self._begin = ctypes.addressof(source)
        self._host = arrays.host("page_table")
        memset(self._host, 0xFF, sizeof(source))  # no page has the number -1: nothing is on the device yet

    def changed(self, slot: int, pages: int) -> bool:
        """Whether the first `pages` entries of a slot's row differ from the device's. Raises ValueError when one of them is no
        page of the pool."""
        row = 4 * slot * self._stride
        if not differ(self._begin + row, self._host + row, 4 * pages):
            return False
        entry = slot * self._stride
        for page in (min(self._source[entry : entry + pages]), max(self._source[entry : entry + pages])):
            if not 0 <= page < self._kv_pages:
                raise ValueError(f"page_table: slot {slot} has page {page}: must be in [0, {self._kv_pages})")
        return True

    def send(self, rows: Iterable[tuple[int, int]]) -> None:
        """Starts to copy the first entries of slots' rows: pairs of a slot and how many."""
        for slot, pages in rows:
            row = 4 * slot * self._stride
            memmove(self._host + row, self._begin + row, 4 * pages)
            self._arrays.send("page_table", row, 4 * pages)

    def forget(self, rows: Iterable[tuple[int, int]]) -> None:
        """Has these rows copied anew at their next use: it is not known what of them arrived."""
        for slot, pages in rows:
            memset(self._host + 4 * slot * self._stride, 0xFF, 4 * pages)
