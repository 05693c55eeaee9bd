"""Server-sent events: frames go out as they come, one write for all that has gathered since the last one."""

from __future__ import annotations

import asyncio

from aiohttp import web

HEADERS = {
    "Server": "flare",
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
KEEPALIVE = b": keep-alive\n\n"


class EventStream:
    """The frames of one response. `push` and `end` are called on the event loop; `pump` writes.

    A reader that pauses holds up `pump` and nothing else: frames gather here, at most as many as the answer's limit
    allows. `idle` counts the keeper's ticks since the last frame.
    """

    __slots__ = ("_frames", "_waiter", "ended", "idle")

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.idle = 0

    @property
    def drained(self) -> bool:
        """Whether all frames so far are handed to the socket."""
        return not self._frames

    def push(self, frames: bytes) -> None:
        self._frames.append(frames)
        self.idle = 0
        self._wake()

    def end(self) -> None:
        """No frame follows."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def pump(self, response: web.StreamResponse) -> None:
        """Writes until the end. Raises ConnectionError or is cancelled when the client goes away."""
        loop = asyncio.get_running_loop()
        while True:
            if self._frames:
                frames, self._frames = self._frames, []
                await response.write(frames[0] if len(frames) == 1 else b"".join(frames))
            elif self.ended:
                return
            else:
                self._waiter = loop.create_future()
                await self._waiter
                self._waiter = None


class Keeper:
    """Sends a comment on streams that have been silent: one timer for all of them."""

    def __init__(self, silence_s: float, ticks: int = 5) -> None:
        self.tick_s = silence_s / ticks
        self.ticks = ticks
        self.streams: set[EventStream] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.tick_s)
            self.tick()

    def tick(self) -> None:
        for stream in self.streams:
            stream.idle += 1
            if stream.idle >= self.ticks and stream.drained:
                stream.push(KEEPALIVE)
