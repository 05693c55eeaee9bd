"""The one place where failures become HTTP responses. Nothing of an unexpected exception reaches the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiohttp import web

from flare.errors import RequestError
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import encode_json

MAX_ERROR_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 500
HEADERS = {"Server": "flare", "Content-Type": "application/json"}
EXTRA_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

_log = logging.getLogger("flare.http")


class MethodNotAllowed(RequestError):
    """A route without the request's method; `allowed` is the value of the Allow header."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"this route allows {allowed}", status=405, code="method_not_allowed")
        self.allowed = allowed


def json_response(value: object) -> web.Response:
    return bytes_response(encode_json(value))


def bytes_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a JSON response from encoded bytes."""
    return web.Response(body=body, status=status, headers=HEADERS if headers is None else {**HEADERS, **headers})


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns the response of a refusal or failure, in the OpenAI envelope and at most 4 KiB long."""
    body = encode_json(error_object(error))
    if len(body) > MAX_ERROR_BYTES:
        text = str(error)[:MAX_MESSAGE_CHARACTERS]
        body = encode_json(error_object(RequestError(text, status=error.status, type=error.type, code=error.code)))
    extra = {"Allow": error.allowed} if isinstance(error, MethodNotAllowed) else EXTRA_HEADERS.get(error.status)
    return bytes_response(body, status=error.status, headers={**(extra or {}), **(headers or {})})


def failure(error: Exception) -> RequestError:
    """Returns what a client learns of an exception; what is unexpected goes to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.RequestPayloadError):
        return not_http()
    _log.error("a handler failed", exc_info=error)
    return RequestError("the server failed; its log says more", status=500, type="server_error")


def not_http() -> RequestError:
    return RequestError("the request is not well-formed HTTP, or its head is too long")
