"""The one place where failures become replies. Nothing of an unexpected exception reaches the client."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flare.errors import RequestError
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import encode_json
from flare.service.exchange import Reply, bytes_reply

MAX_ERROR_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 500
MAX_LOG_CHARACTERS = 20_000
EXTRA_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}

Envelope = Callable[[RequestError], dict[str, Any]]
"""Makes the error object of a protocol."""

_log = logging.getLogger("flare.service")


class Refusal(RequestError):
    """A refusal whose reply carries headers of its own, their names in small letters."""

    def __init__(self, message: str, *, status: int, headers: Mapping[str, str], code: str | None = None) -> None:
        super().__init__(message, status=status, code=code)
        self.headers = headers


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Returns the error object of the Ollama discovery routes; a missing key is told as on all other routes."""
    return error_object(error) if error.status == 401 else {"error": str(error)}


def error_reply(
    error: RequestError, headers: Mapping[str, str] | None = None, envelope: Envelope = error_object
) -> Reply:
    """Returns the reply of a refusal or failure, in a protocol's envelope and at most 4 KiB long."""
    body = encode_json(envelope(error))
    if len(body) > MAX_ERROR_BYTES:
        text = str(error)[:MAX_MESSAGE_CHARACTERS]
        body = encode_json(envelope(RequestError(text, status=error.status, type=error.type, code=error.code)))
    own = error.headers if isinstance(error, Refusal) else EXTRA_HEADERS.get(error.status, {})
    return bytes_reply(body, status=error.status, headers={**own, **(headers or {})})


def failure(error: BaseException) -> RequestError:
    """Returns what a client learns of an exception; what is unexpected goes to the log."""
    if isinstance(error, RequestError):
        return error
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
