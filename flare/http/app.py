"""The routes, and the one handler that every request goes through: key, route, answer or error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from flare.config import ServerSettings
from flare.errors import RequestError
from flare.http.auth import check_key
from flare.http.errors import MethodNotAllowed, error_response, failure, json_response
from flare.http.generate import Generator
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.models import find_model, model_list
from flare.runtime import Runtime

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

GENERATION = (ChatCompletions(), Completions())
MODEL_PREFIX = "/v1/models/"


class App:
    """Answers requests over one runtime. `routes` maps a path to its handlers by method; GET also serves HEAD."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.key = settings.api_key.encode()
        self.generator = Generator(runtime, settings)
        self.routes: dict[str, Mapping[str, Handler]] = {
            "/v1/models": {"GET": self.models},
            "/health": {"GET": self.health},
        }
        for endpoint in GENERATION:
            self.routes[endpoint.path] = {"POST": self.generator.handler(endpoint)}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request. Raises only when the client is gone."""
        try:
            check_key(request, self.key)
            return await self._find(request)(request)
        except ConnectionError:
            raise
        except Exception as error:
            return error_response(failure(error))

    def _find(self, request: web.BaseRequest) -> Handler:
        """Returns the request's handler. Raises RequestError (404, 405)."""
        path = request.path
        methods = self.routes.get(path)
        if methods is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
            methods = {"GET": self.model}
        if methods is None:
            raise RequestError("there is no such route", status=404, code="not_found")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            raise MethodNotAllowed(allowed)
        return handler

    async def models(self, request: web.BaseRequest) -> web.Response:
        return json_response(model_list(self.runtime.model))

    async def model(self, request: web.BaseRequest) -> web.Response:
        return json_response(find_model(request.path.removeprefix(MODEL_PREFIX), self.runtime.model))

    async def health(self, request: web.BaseRequest) -> web.Response:
        if self.runtime.healthy and not self.generator.closing:
            return json_response({"status": "ok"})
        raise RequestError("the model cannot run; the server must be restarted", status=503, type="server_error")
