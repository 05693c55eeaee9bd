"""HTTP as a transport of the service: what comes with a request is checked and read here, and its reply is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from aiohttp import web

from flare.config import ServerSettings
from flare.errors import RequestError
from flare.http.auth import check_key
from flare.http.bodies import check_media_type, content_coding, read_body
from flare.http.codings import CODINGS, decompress
from flare.http.errors import SERVER, http_response, not_http
from flare.http.rebinding import check_host
from flare.http.sse import HEADERS, Keeper
from flare.protocols.versions import check_version
from flare.runtime import Runtime
from flare.service.admission import Share
from flare.service.errors import failure
from flare.service.exchange import Body, Reply
from flare.service.routes import Service
from flare.service.stream import EventStream

R = TypeVar("R", bound=web.StreamResponse)

CLIENT_GONE = 499


class App:
    """Answers aiohttp's requests with the service. `keeper` sends comments on silent streams."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.settings = settings
        self.key = settings.api_key.encode()
        self.service = Service(runtime, settings)
        self.keeper = Keeper(settings.keepalive_comment_s)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request, and counts it. Raises only when the client is gone."""
        exchange = Exchange(request, self)
        try:
            await self.service.handle(exchange)
            assert exchange.response is not None
            return exchange.response
        finally:
            begun = exchange.response is not None and request.writer.output_size > 0
            status = exchange.response.status if begun else CLIENT_GONE
            self.service.metrics.request_finished(self.service.route(request.path), status)


class Exchange:
    """One request over HTTP, see `Incoming`. `response` is what was, or is being, sent."""

    def __init__(self, request: web.BaseRequest, app: App) -> None:
        self.method = request.method
        self.path = request.path
        self.query = request.rel_url.raw_query_string
        self.response: web.StreamResponse | None = None
        self._request = request
        self._app = app

    @property
    def accept(self) -> str:
        return ",".join(self._request.headers.getall("Accept", []))

    def check_sender(self) -> None:
        check_key(self._request, self._app.key)

    def check_head(self) -> None:
        check_host(self._request, self._app.settings.host)
        check_version(self.path, self._request.headers.getall("anthropic-version", []))
        check_media_type(self._request)

    async def read(self, share: Share, codings: Sequence[str] | None) -> Body:
        settings = self._app.settings
        limit = settings.max_body_bytes
        coding = content_coding(self._request, CODINGS if codings is None else codings)
        try:
            body = await read_body(
                self._request, share, limit, silence_s=settings.body_silence_s, total_s=settings.body_total_s
            )
        except web.RequestPayloadError:
            raise not_http() from None
        return partial(decompress, body, coding, limit)

    async def send(self, reply: Reply) -> None:
        with self._sending(http_response(reply)) as response:
            await response.prepare(self._request)
            await response.write_eof()

    async def stream(self, headers: Mapping[str, str], stream: EventStream) -> None:
        streams = self._app.keeper.streams
        with self._sending(web.StreamResponse(headers={**SERVER, **HEADERS, **headers})) as response:
            streams.add(stream)
            try:
                await response.prepare(self._request)
                await stream.pump(response.write)
                await response.write_eof()
            finally:
                streams.discard(stream)

    @contextmanager
    def _sending(self, response: R) -> Iterator[R]:
        """Makes every failure but the client's own one that nothing can be sent behind."""
        self.response = response
        try:
            yield response
        except ConnectionError:
            raise
        except Exception as error:
            told: RequestError = failure(error)
            raise ConnectionError(f"a response has begun, an error cannot follow it: {told}") from error
