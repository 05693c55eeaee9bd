"""The routes, and the one handler that every request goes through: key, route, answer or error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from flare.config import ServerSettings
from flare.errors import RequestError
from flare.http.auth import check_key, check_version
from flare.http.bodies import check_media_type, content_coding, read_body
from flare.http.codings import CODINGS, decompress
from flare.http.connections import Connections
from flare.http.errors import Envelope, Refusal, bytes_response, error_response, failure, json_response, ollama_error
from flare.http.generate import Generator
from flare.metrics import OTHER_ROUTE, Load, Reading
from flare.protocols import metrics as reports
from flare.protocols import ollama
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.decoding import shown
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import GenerationEndpoint, encode_json
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.models import find_model, model_info, model_list
from flare.protocols.responses import Responses
from flare.runtime import Runtime

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

GENERATION: tuple[GenerationEndpoint, ...] = (ChatCompletions(), Completions(), Messages(), Responses())
MODEL_PREFIX = "/v1/models/"
MODEL_ROUTE = MODEL_PREFIX + "{model}"
CLIENT_GONE = 499
PLAIN = ("identity",)


class App:
    """Answers requests over one runtime.

    `routes` maps a path to its handlers by method; GET also serves HEAD. `envelopes` says, for a path and all below it,
    how errors are told there; elsewhere they have OpenAI's form. Query strings count for no route but /metrics.
    """

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.key = settings.api_key.encode()
        self.generator = Generator(runtime, settings)
        self.metrics = self.generator.metrics
        self.connections: Connections | None = None  # the server sets it when it listens
        self.routes: dict[str, dict[str, Handler]] = {}
        self.envelopes: dict[str, Envelope] = {"/api": ollama_error}
        for endpoint in GENERATION:
            self.routes[endpoint.path] = {"POST": self.generator.handler(endpoint)}
            self.envelopes[endpoint.path] = endpoint.error
        model = runtime.model
        self.get("/v1/models", lambda: model_list(model))
        self.get("/v1/flare/model_info", lambda: model_info(model))
        self.get("/v1/flare/status", lambda: reports.status(self.reading(), closing=self.generator.closing))
        self.get("/health", self.health)
        self.routes["/metrics"] = {"GET": self.report}
        self.get("/api/tags", lambda: ollama.tags(model))
        self.post("/api/show", lambda body: encode_json(ollama.show(body, model)), PLAIN)
        count = CountTokens()
        self.post(count.path, lambda body: count.encode(runtime.prepare(count.count(body, model)).prompt_tokens))

    def get(self, path: str, make: Callable[[], object]) -> None:
        """Adds a GET route that answers with what `make` returns, as JSON."""

        async def handler(request: web.BaseRequest) -> web.Response:
            return json_response(make())

        self.routes[path] = {"GET": handler}

    def post(self, path: str, make: Callable[[bytes | bytearray], bytes], codings: Sequence[str] = CODINGS) -> None:
        """Adds a POST route that answers with the JSON that `make` returns of the decoded body; the worker pool runs it."""
        settings, generator = self.settings, self.generator

        def work(body: bytearray, coding: str) -> bytes:
            return make(decompress(body, coding, settings.max_body_bytes))

        async def handler(request: web.BaseRequest) -> web.Response:
            coding = content_coding(request, codings)
            with generator.bodies.share() as share:
                body = await read_body(
                    request,
                    share,
                    settings.max_body_bytes,
                    silence_s=settings.body_silence_s,
                    total_s=settings.body_total_s,
                )
                loop = asyncio.get_running_loop()
                return bytes_response(await loop.run_in_executor(generator.pool, work, body, coding))

        self.routes[path] = {"POST": handler}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request, and counts it. Raises only when the client is gone."""
        status = CLIENT_GONE
        try:
            response = await self._answer(request)
            status = response.status
            return response
        finally:
            if status == CLIENT_GONE and request.writer.output_size > 0:
                status = 200  # of a stream that was not read to its end
            self.metrics.request_finished(self._route(request.path), status)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            check_key(request, self.key)
            handler = self._find(request)
            check_version(request)
            check_media_type(request)
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            return error_response(failure(error), envelope=self._envelope(request.path))

    def _route(self, path: str) -> str:
        """Returns the name under which requests to a path are counted."""
        if path in self.routes:
            return path
        return MODEL_ROUTE if path.startswith(MODEL_PREFIX) else OTHER_ROUTE

    def _envelope(self, path: str) -> Envelope:
        for prefix, envelope in self.envelopes.items():
            if path == prefix or path.startswith(prefix + "/"):
                return envelope
        return error_object

    def _find(self, request: web.BaseRequest) -> Handler:
        """Returns the request's handler. Raises RequestError (404, 405). Paths are compared as they are, once decoded: a
        slash too many is another path."""
        path = request.path
        methods: Mapping[str, Handler] | None = self.routes.get(path)
        if methods is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
            methods = {"GET": self.model}
        if methods is None:
            hint = self._hint(path)
            raise RequestError(f"there is no route {shown(path)!r}{hint}", status=404, code="not_found")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            raise Refusal(
                f"this route allows {allowed}", status=405, headers={"Allow": allowed}, code="method_not_allowed"
            )
        return handler

    def _hint(self, path: str) -> str:
        """Returns what may have been meant, for the message: the usual slips are a base URL without /v1, or twice."""
        plain = "/" + path.strip("/").removeprefix("v1/")
        near = next((route for route in (plain, "/v1" + plain) if route in self.routes), None)
        if near is not None:
            return f"; did you mean {near!r}?"
        return "; this server has Ollama's discovery alone, and generates under /v1" if path.startswith("/api/") else ""

    async def model(self, request: web.BaseRequest) -> web.Response:
        return json_response(find_model(request.path.removeprefix(MODEL_PREFIX), self.runtime.model))

    def reading(self) -> Reading:
        """Returns everything that is reported, as it is now."""
        admission, bodies, connections = self.generator.admission, self.generator.bodies, self.connections
        load = Load(
            admission_used=admission.used,
            admission_capacity=admission.capacity,
            body_bytes=bodies.used,
            body_bytes_capacity=bodies.capacity,
            connections=connections.used if connections else 0,
            connections_capacity=self.settings.max_connections,
        )
        return self.metrics.read(self.runtime.model, self.runtime.stats(), load)

    async def report(self, request: web.BaseRequest) -> web.Response:
        accept = ",".join(request.headers.getall("Accept", []))
        body, media = reports.metrics(self.reading(), query=request.rel_url.raw_query_string, accept=accept)
        return bytes_response(body, headers={"Content-Type": media})

    def health(self) -> object:
        if self.runtime.healthy and not self.generator.closing:
            return {"status": "ok"}
        raise RequestError("the model cannot run; the server must be restarted", status=503, type="server_error")
