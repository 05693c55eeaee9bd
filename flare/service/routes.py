"""The routes, and the one handler that every request goes through: sender, route, answer or error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flare.config import ServerSettings
from flare.decisions.endpoint import DecisionEndpoint
from flare.errors import RequestError
from flare.failures import for_log
from flare.metrics import OTHER_ROUTE, Load, Reading
from flare.protocols import metrics as reports
from flare.protocols import ollama
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.decisions import Decisions
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import GenerationEndpoint, encode_json
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.models import find_model, model_info, model_list
from flare.protocols.refusals import shown
from flare.protocols.responses import Responses
from flare.protocols.systemone import SystemOne
from flare.runtime import Runtime
from flare.service.decide import Decider
from flare.service.errors import Envelope, Refusal, error_reply, failure, ollama_error
from flare.service.exchange import Incoming, Reply, bytes_reply, json_reply
from flare.service.generate import Generator, shutting_down

if TYPE_CHECKING:
    from flare.engine import Delivery

Handler = Callable[[Incoming], Awaitable[Reply | None]]
"""Answers a request on its route; returns the reply, or None when it has sent its answer itself."""

GENERATION: tuple[GenerationEndpoint, ...] = (ChatCompletions(), Completions(), Messages(), Responses())
DECISIONS: tuple[DecisionEndpoint, ...] = (SystemOne(), Decisions())
MODEL_PREFIX = "/v1/models/"
MODEL_ROUTE = MODEL_PREFIX + "{model}"
PLAIN = ("identity",)

_log = logging.getLogger("flare.service")


class Connected(Protocol):
    """The connections of a transport that has them: how many there are, and how many there may be."""

    used: int
    capacity: int


class Service:
    """Answers requests over one runtime; on one event loop.

    `routes` maps a path to its handlers by method; GET also serves HEAD. `envelopes` says, for a path and all below it,
    how errors are told there; elsewhere they have OpenAI's form. Query strings count for no route but /metrics.
    `connections` are the transport's, which sets them.
    """

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.generator = Generator(runtime, settings)
        self.metrics = self.generator.metrics
        self.connections: Connected | None = None
        self._description: bytes | None = None
        self.routes: dict[str, dict[str, Handler]] = {}
        self.envelopes: dict[str, Envelope] = {"/api": ollama_error}
        for endpoint in GENERATION:
            self.routes[endpoint.path] = {"POST": self.generator.handler(endpoint)}
            self.envelopes[endpoint.path] = endpoint.error
        decider = Decider(self.generator)
        for decisions in DECISIONS:
            self.routes[decisions.path] = {"POST": decider.handler(decisions)}
            self.envelopes[decisions.path] = decisions.error
        model = runtime.model
        self.get("/v1/models", lambda: model_list(model))
        self.get("/v1/flare/model_info", lambda: model_info(model))
        self.get("/v1/flare/status", lambda: reports.status(self.reading(), closing=self.generator.closing))
        self.get("/health", self.health)
        self.routes["/metrics"] = {"GET": self.report}
        self.routes["/openapi.json"] = {"GET": self.describe}
        self.get("/api/tags", lambda: ollama.tags(model))
        self.post("/api/show", lambda body: encode_json(ollama.show(body, model)), PLAIN)
        count = CountTokens()
        self.post(count.path, lambda body: count.encode(runtime.count_tokens(count.count(body, model))))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the engine, whose deliveries come to `loop`; all else is called there."""

        def dispatch(batch: list[Delivery]) -> None:
            # Once the loop is closed, every answer has ended and the batch is of no interest.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.runtime.receive, batch)

        loop.set_exception_handler(log_context)
        self.runtime.start(dispatch, forms=True)

    async def stop(self, drain: Awaitable[None]) -> None:
        """Ends every answer with an error, awaits `drain`, in which the transport lets the last bytes out, and ends the
        workers. Later requests are refused."""
        self.generator.fail_all(shutting_down())
        await drain
        self.generator.workers.close()

    def get(self, path: str, make: Callable[[], object]) -> None:
        """Adds a GET route that answers with what `make` returns, as JSON."""

        async def handler(incoming: Incoming) -> Reply:
            return json_reply(make())

        self.routes[path] = {"GET": handler}

    def post(self, path: str, make: Callable[[bytes | bytearray], bytes], codings: Sequence[str] | None = None) -> None:
        """Adds a POST route that answers with the JSON that `make` returns of the body; a worker runs it."""
        generator = self.generator

        async def handler(incoming: Incoming) -> Reply:
            with generator.bodies.share() as share:
                body = await incoming.read(share, codings)
                return bytes_reply(await generator.workers.run(lambda: make(body())))

        self.routes[path] = {"POST": handler}

    async def handle(self, incoming: Incoming) -> None:
        """Answers any request, until its reader has the answer.

        Raises ConnectionError when the client is gone, nothing else; where it is cancelled, so is the answer.
        """
        try:
            incoming.check_sender()
            handler = self._find(incoming)
            incoming.check_head()
            reply = await handler(incoming)
        except ConnectionError:
            raise
        except Exception as error:
            reply = error_reply(failure(error), self._envelope(incoming.path))
        if reply is not None:
            await incoming.send(reply)

    def route(self, path: str) -> str:
        """Returns the name under which requests to a path are counted."""
        if path in self.routes:
            return path
        return MODEL_ROUTE if path.startswith(MODEL_PREFIX) else OTHER_ROUTE

    def _envelope(self, path: str) -> Envelope:
        for prefix, envelope in self.envelopes.items():
            if path == prefix or path.startswith(prefix + "/"):
                return envelope
        return error_object

    def _find(self, incoming: Incoming) -> Handler:
        """Returns the request's handler. Raises RequestError (404, 405). Paths are compared as they are, once decoded: a
        slash too many is another path."""
        path = incoming.path
        methods: Mapping[str, Handler] | None = self.routes.get(path)
        if methods is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
            methods = {"GET": self.model}
        if methods is None:
            hint = self._hint(path)
            raise RequestError(f"there is no route {shown(path)!r}{hint}", status=404, code="not_found")
        handler = methods.get("GET" if incoming.method == "HEAD" else incoming.method)
        if handler is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            error = RequestError(f"this route allows {allowed}", status=405, code="method_not_allowed")
            raise Refusal(error, {"allow": allowed})
        return handler

    def _hint(self, path: str) -> str:
        """Returns what may have been meant, for the message: the usual slips are a base URL without /v1, or twice."""
        if path == "/":
            return "; the API is under /v1, GET /openapi.json describes it"
        plain = "/" + path.strip("/").removeprefix("v1/")
        near = next((route for route in (plain, "/v1" + plain) if route in self.routes), None)
        if near is not None:
            return f"; did you mean {near!r}?"
        return "; this server has Ollama's discovery alone, and generates under /v1" if path.startswith("/api/") else ""

    async def model(self, incoming: Incoming) -> Reply:
        return json_reply(find_model(incoming.path.removeprefix(MODEL_PREFIX), self.runtime.model))

    def reading(self) -> Reading:
        """Returns everything that is reported, as it is now."""
        admission, bodies, connections = self.generator.admission, self.generator.bodies, self.connections
        load = Load(
            admission_used=admission.used,
            admission_capacity=admission.capacity,
            body_bytes=bodies.used,
            body_bytes_capacity=bodies.capacity,
            connections=connections.used if connections else 0,
            connections_capacity=connections.capacity if connections else 0,
        )
        return self.metrics.read(self.runtime.model, self.runtime.stats(), load, self.runtime.fallbacks)

    async def report(self, incoming: Incoming) -> Reply:
        body, media = reports.metrics(self.reading(), query=incoming.query, accept=incoming.accept)
        return bytes_reply(body, headers={"content-type": media})

    async def describe(self, incoming: Incoming) -> Reply:
        """Answers with the API's description, which a worker makes for the first one who asks."""
        if self._description is None:
            from flare.protocols.openapi import document

            self._description = await self.generator.workers.run(lambda: document(self.runtime.model))
        return bytes_reply(self._description)

    def health(self) -> object:
        self.generator.check_ready()
        return {"status": "ok"}


def log_context(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what failed on a loop outside of any request, as everything that fails is logged."""
    error = context.get("exception")
    _log.error("%s%s", context["message"], "" if error is None else "\n" + for_log(error))
