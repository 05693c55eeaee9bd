"""The threads that decode, render and tokenize, so that the event loop never has to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """A number of threads. `run` is called on the event loop.

    Work that waits for a thread waits on the loop, not in the pool's queue: who is cancelled there leaves nothing behind. A
    queue would keep the work of requests that are long gone, with their bodies, until a thread comes by.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flare-frontend")
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns, and raises what it raises; first come, first served.

        Whoever is cancelled while a thread works is told so only when it has let go, since it cannot be stopped: what the work
        holds is held, and counted, until then.
        """
        async with self._free:
            running = asyncio.wrap_future(self._pool.submit(work))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
            finally:
                del running  # its exception's traceback knows this frame, and all that the work held

    def close(self) -> None:
        """Takes no more work; the threads end with what they have begun. Does not wait, and may be called twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)
