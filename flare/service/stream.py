"""The frames of a streamed answer on their way to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic


class EventStream:
    """The frames of one answer. `push` and `end` are called on the event loop; `take` or `pump` hands them on.

    A reader that pauses holds up nothing but its own stream: frames gather here, at most as many as the answer's limit
    allows. `sent_at` is when the last ones were handed on, at first when the stream began, on the monotonic clock.
    """

    __slots__ = ("_frames", "_waiter", "ended", "sent_at")

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.sent_at = monotonic()

    @property
    def drained(self) -> bool:
        """Whether all frames so far are handed on."""
        return not self._frames

    def push(self, frames: bytes) -> None:
        self._frames.append(frames)
        self._wake()

    def end(self) -> None:
        """No frame follows."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> bytes:
        """Returns the frames that have gathered since the last call, at least one; nothing at the end. One caller at a time."""
        while not self._frames:
            if self.ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        frames, self._frames = self._frames, []
        self.sent_at = monotonic()
        return frames[0] if len(frames) == 1 else b"".join(frames)

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes until the end. Raises what `write` raises, or is cancelled, when the reader goes away."""
        while frames := await self.take():
            await write(frames)
