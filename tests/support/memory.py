"""A bound on what a piece of code may allocate, for parsers of files that lie about their sizes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Fails unless Python's and numpy's allocations inside the block stay below `limit` bytes at every moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated, the limit is {limit}"
