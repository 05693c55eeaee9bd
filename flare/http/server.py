"""One server on one event loop: it listens on a bound socket, and stops without leaving a request unanswered."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

from aiohttp import web

from flare.config import ServerSettings
from flare.http.app import App
from flare.http.connections import Connections
from flare.http.silence import end_when_silent
from flare.runtime import Runtime

BACKLOG = 1024
SPARE_FILES = 256
"""Open files that are no connections: the core's, the loop's, and a margin."""


def raise_file_limit(wanted: int) -> None:
    """Lets this process open `wanted` files, or as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Server:
    """Serves a runtime. `start` and `stop` are called on the event loop; the runtime stays the caller's to close."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.app = App(runtime, settings)
        self.generator = self.app.service.generator
        self._runner: web.ServerRunner | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        """Starts the engine and listens on `sock`, which is bound."""
        self.app.service.start(asyncio.get_running_loop())
        self.connections = self.app.service.connections = Connections(self.app.handle, self.settings)
        raise_file_limit(self.settings.max_connections + SPARE_FILES)
        options: dict[str, Any] = {"shutdown_timeout": self.settings.shutdown_s}
        self._runner = web.ServerRunner(self.connections, handle_signals=False, **options)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=BACKLOG).start()
        self._keeping = asyncio.create_task(self.app.keeper.run())
        model, replay = self.runtime.model, self.runtime.replay
        if model.target == "cuda":
            self._watching = asyncio.create_task(end_when_silent(lambda: replay.waits, model.device))

    async def stop(self) -> None:
        """Stops accepting, ends every answer with an error, lets the last bytes out, and closes the connections."""
        assert self._runner is not None and self._keeping is not None
        for site in list(self._runner.sites):
            await site.stop()
        await self.app.service.stop(self._runner.cleanup())
        for task in (self._keeping, self._watching):
            if task is not None:
                task.cancel()
