"""Server-sent events over HTTP: the headers of a stream, and comments while it is silent."""

from __future__ import annotations

import asyncio

from flare.service.stream import EventStream

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""What a stream's response carries beside its type: proxies are to pass every event on at once."""
KEEPALIVE = b": keep-alive\n\n"


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
