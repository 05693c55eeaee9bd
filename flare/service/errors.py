"""The one place where failures become replies. Nothing of an unexpected exception reaches the client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flare.errors import RequestError
from flare.failures import for_log
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import encode_json
from flare.service.exchange import Reply, bytes_reply

MAX_ERROR_BYTES = 4096
MAX_MESSAGE_CHARACTERS = 500
EXTRA_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}

NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""Heard by OpenAI's and Anthropic's SDKs, which else ask again after every 500: what the model wrote is what it would write."""

Envelope = Callable[[RequestError], dict[str, Any]]
"""Makes the error object of a protocol."""

_log = logging.getLogger("flare.service")


class Refusal(RequestError):
    """A refusal or failure whose reply carries headers of its own, their names in small letters."""

    def __init__(self, error: RequestError, headers: Mapping[str, str]) -> None:
        super().__init__(
            str(error), status=error.status, type=error.type, param=error.param, code=error.code, extra=error.extra
        )
        self.headers = headers


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Returns the error object of the Ollama discovery routes; a missing key is told as on all other routes."""
    return error_object(error) if error.status == 401 else {"error": str(error)}


def error_reply(error: RequestError, envelope: Envelope = error_object) -> Reply:
    """Returns the reply of a refusal or failure, in a protocol's envelope and at most 4 KiB long."""
    body = encode_json(envelope(error))
    if len(body) > MAX_ERROR_BYTES:
        text = str(error)[:MAX_MESSAGE_CHARACTERS]
        body = encode_json(envelope(RequestError(text, status=error.status, type=error.type, code=error.code)))
    own = error.headers if isinstance(error, Refusal) else {}
    more = NO_RETRY if error.code == "invalid_output" else EXTRA_HEADERS.get(error.status, {})
    return bytes_reply(body, status=error.status, headers={**more, **own})


def failure(error: BaseException) -> RequestError:
    """Returns what a client learns of an exception; what is unexpected goes to the log."""
    if isinstance(error, RequestError):
        return error
    _log.error("a handler failed\n%s", for_log(error))
    return RequestError("the server failed; its log says more", status=500, type="server_error")
