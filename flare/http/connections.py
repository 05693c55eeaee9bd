"""The connections of a server: how many there may be, how long one waits for a request, and what is not HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from flare.config import ServerSettings
from flare.errors import RequestError
from flare.failures import for_log
from flare.http.errors import http_response, not_http
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import encode_json
from flare.service.errors import error_reply, failure

READ_AHEAD_BYTES = 1 << 16
"""What is read of a body before anyone asks: up to twice this, and one read of the socket of at most 256 KiB."""
REFUSED_S = 2.0
"""How long a refused connection may take to read why."""
MAX_REFUSED = 256
"""Refused connections that may be open at a time; those beyond are closed without a word."""

_log = logging.getLogger("flare.http")


class Connection(web.RequestHandler):
    """A connection whose errors outside of any handler, such as broken HTTP, have the shape of all others.

    It becomes a `Refused` one where there are too many: counted here, since a socket is accepted some time before.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(connections, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connections = self._connections
        if connections.used < connections.capacity:
            assert isinstance(transport, asyncio.Transport)
            # A write ends once the system has taken all of it: what waits here is an answer that still has its place.
            transport.set_write_buffer_limits(high=0)
            super().connection_made(transport)
            return
        refused = Refused(connections)
        transport.set_protocol(refused)
        refused.connection_made(transport)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        _log.error("a connection failed\n%s", for_log(error) if isinstance(error, BaseException) else "")

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
        response = http_response(error_reply(error))
        response.force_close()
        return response


class Refused(asyncio.Protocol):
    """A connection over the limit: it gets one response, and whatever it sends is thrown away."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connections = self._connections
        connections.refused.add(self)
        if len(connections.refused) > MAX_REFUSED:
            transport.abort()
            return
        transport.write(connections.refusal)
        transport.write_eof()
        # A socket that is closed with unread input takes its last bytes back: the client closes, or time is up.
        self._timer = asyncio.get_running_loop().call_later(REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.refused.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Connections(web.Server):
    """Makes the protocol of each accepted socket. `used` counts the open ones, without those that are being refused."""

    def __init__(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], settings: ServerSettings
    ) -> None:
        # A lost client cancels its handler.
        super().__init__(handle, handler_cancellation=True)
        self._loop = asyncio.get_running_loop()
        self._keepalive_s = settings.keepalive_s
        self.capacity = settings.max_connections
        self.used = 0
        self.refused: set[Refused] = set()
        self.refusal = full(self.capacity)

    def __call__(self) -> web.RequestHandler:
        options: dict[str, Any] = {
            "auto_decompress": False,  # bodies stay as sent: they are decompressed elsewhere, with a bound
            "access_log": None,
            "logger": _log,
            "read_bufsize": READ_AHEAD_BYTES,
            "keepalive_timeout": self._keepalive_s,
        }
        return Connection(self, loop=self._loop, **options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        self.used += 1
        super().connection_made(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self.used -= 1
        super().connection_lost(handler, exc)


def full(capacity: int) -> bytes:
    """Returns the response that a connection over the limit gets, whatever it would have asked."""
    error = RequestError(
        f"the server has {capacity} connections, as many as it serves; try again later",
        status=503,
        type="server_error",
        code="too_many_connections",
    )
    body = encode_json(error_object(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nServer: flare\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
