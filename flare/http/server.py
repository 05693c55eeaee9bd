"""One server on one event loop: it listens on a bound socket, and stops without leaving a request unanswered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web

from flare.config import ServerSettings
from flare.http.app import App
from flare.http.errors import error_response, failure, not_http
from flare.http.generate import shutting_down
from flare.runtime import Runtime

if TYPE_CHECKING:
    from flare.engine import Delivery

BACKLOG = 1024

_log = logging.getLogger("flare.http")


class Connection(web.RequestHandler):
    """A connection whose errors outside of any handler, such as broken HTTP, have the shape of all others."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun, an error cannot follow it")
        if status < 500:
            _log.debug("a connection sent what is not HTTP")
            error = not_http()
        else:
            error = failure(exc if isinstance(exc, Exception) else RuntimeError(message))
        response = error_response(error)
        response.force_close()
        return response


class Connections(web.Server):
    """Makes a `Connection` for each accepted socket."""

    def __init__(self, app: App) -> None:
        # A lost client cancels its handler.
        super().__init__(app.handle, handler_cancellation=True)
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> web.RequestHandler:
        # Bodies stay as sent: they are decompressed elsewhere, with a bound.
        options: dict[str, Any] = {"auto_decompress": False, "access_log": None, "logger": _log}
        return Connection(self, loop=self._loop, **options)


class Server:
    """Serves a runtime. `start` and `stop` are called on the event loop; the runtime stays the caller's to close."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.app = App(runtime, settings)
        self.generator = self.app.generator
        self._runner: web.ServerRunner | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        """Starts the engine and listens on `sock`, which is bound."""
        loop = asyncio.get_running_loop()

        def dispatch(batch: list[Delivery]) -> None:
            # Once the loop is closed, every answer has ended and the batch is of no interest.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.runtime.receive, batch)

        self.runtime.start(dispatch)
        options: dict[str, Any] = {"shutdown_timeout": self.settings.shutdown_s}
        self._runner = web.ServerRunner(Connections(self.app), handle_signals=False, **options)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=BACKLOG).start()
        self._keeper = asyncio.create_task(self.generator.keeper.run())

    async def stop(self) -> None:
        """Stops accepting, ends every answer with an error, lets the last bytes out, and closes the connections."""
        assert self._runner is not None and self._keeper is not None
        for site in list(self._runner.sites):
            await site.stop()
        self.generator.fail_all(shutting_down())
        await self._runner.cleanup()
        self._keeper.cancel()
        self.generator.close()
