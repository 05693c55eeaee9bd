"""The one place where failures become HTTP responses. Nothing of an unexpected exception reaches the client."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from flare.errors import RequestError
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import encode_json

MAX_ERROR_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 500
MAX_LOG_CHARACTERS = 20_000
HEADERS = {"Server": "flare", "Content-Type": "application/json"}
EXTRA_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

Envelope = Callable[[RequestError], dict[str, Any]]
"""Makes the error object of a protocol."""

_log = logging.getLogger("flare.http")


class Refusal(RequestError):
    """A refusal whose response carries headers of its own."""

    def __init__(self, message: str, *, status: int, headers: Mapping[str, str], code: str | None = None) -> None:
        super().__init__(message, status=status, code=code)
        self.headers = headers


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Returns the error object of the Ollama discovery routes; a missing key is told as on all other routes."""
    return error_object(error) if error.status == 401 else {"error": str(error)}


def json_response(value: object) -> web.Response:
    return bytes_response(encode_json(value))


def bytes_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a JSON response from encoded bytes."""
    return web.Response(body=body, status=status, headers=HEADERS if headers is None else {**HEADERS, **headers})


def error_response(
    error: RequestError, headers: Mapping[str, str] | None = None, envelope: Envelope = error_object
) -> web.Response:
    """Returns the response of a refusal or failure, in a protocol's envelope and at most 4 KiB long."""
    body = encode_json(envelope(error))
    if len(body) > MAX_ERROR_BYTES:
        text = str(error)[:MAX_MESSAGE_CHARACTERS]
        body = encode_json(envelope(RequestError(text, status=error.status, type=error.type, code=error.code)))
    own = error.headers if isinstance(error, Refusal) else EXTRA_HEADERS.get(error.status, {})
    return bytes_response(body, status=error.status, headers={**own, **(headers or {})})


def failure(error: Exception) -> RequestError:
    """Returns what a client learns of an exception; what is unexpected goes to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.RequestPayloadError):
        return not_http()
    _log.error("a handler failed\n%s", for_log(error))
    return RequestError("the server failed; its log says more", status=500, type="server_error")


def for_log(error: BaseException) -> str:
    """Returns an exception with its traceback, fit for a log: bounded, printable, and indented line by line, so that a
    client's text in it can never look like a record of its own."""
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_LOG_CHARACTERS:
        half = MAX_LOG_CHARACTERS // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    lines = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n".join(f"  | {line}" for line in lines if line)


def not_http() -> RequestError:
    return RequestError("the request is not well-formed HTTP, or its head is too long")
