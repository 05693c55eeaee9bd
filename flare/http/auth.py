"""The serving key that a request carries in its headers."""

from __future__ import annotations

import hmac

from aiohttp import web

from flare.errors import RequestError
from flare.protocols.versions import is_messages

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Aggregate state without anything of a request, for probes that have no key."""


def check_key(request: web.BaseRequest, key: bytes) -> None:
    """Raises RequestError (401) unless the request carries the key. An empty key asks for nothing.

    The key comes as `Authorization: Bearer KEY`, on the Messages routes also as `x-api-key: KEY`; a request with both
    has it in both. No header may come twice. A comparison takes the same time wherever the keys differ. The message says
    whether a key is missing or wrong, the status and the code do not.
    """
    path = request.path
    if not key or path in OPEN_PATHS:
        return
    bearers = request.headers.getall("Authorization", [])
    keys = request.headers.getall("x-api-key", []) if is_messages(path) else []
    given = [_bearer(value) for value in bearers] + [value.strip() for value in keys]
    matches = [hmac.compare_digest(value.encode("utf-8", "surrogateescape"), key) for value in given]
    if not any(given):
        text = "a key is required"
    elif len(bearers) > 1 or len(keys) > 1:
        text = "a header with the key comes more than once"
    elif not all(matches):
        text = "the key is not this server's"
    else:
        return
    also = " (or x-api-key: KEY; where both are sent, both must match)" if is_messages(path) else ""
    raise RequestError(
        f"{text}; send the header Authorization: Bearer KEY{also}",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )


def _bearer(value: str) -> str:
    """Returns the key in a value of Authorization, nothing for another scheme."""
    scheme, _, rest = value.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else ""
