"""Server-sent events over HTTP: the headers of a stream, and comments while it is silent."""

from __future__ import annotations

import asyncio
from time import monotonic

from flare.service.stream import EventStream

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""What a stream's response carries beside its type: proxies are to pass every event on at once."""
KEEPALIVE = b": keep-alive\n\n"


LEAST_WAIT = 0.01
"""The part of the silence that the clock waits at least, so that many streams cost little: a comment is late by that much at
most."""


class Keeper:
    """Sends a comment on each stream that nothing went out on for `silence_s` seconds: one timer for all of them."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.streams: set[EventStream] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(max(self.look(monotonic()), self.silence_s * LEAST_WAIT))

    def look(self, now: float) -> float:
        """Sends what is due at `now`, a moment of the monotonic clock. Returns in how many seconds the next may be due."""
        wait = self.silence_s
        for stream in self.streams:
            left = stream.sent_at + self.silence_s - now
            if left > 0:
                wait = min(wait, left)
            elif stream.drained:
                stream.push(KEEPALIVE)
        return wait
