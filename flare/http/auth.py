"""The serving key: a bearer token on every route but /health."""

from __future__ import annotations

import hmac

from aiohttp import web

from flare.errors import RequestError

OPEN_PATHS = frozenset({"/health"})


def check_key(request: web.BaseRequest, key: bytes) -> None:
    """Raises RequestError (401) unless the request carries `Authorization: Bearer KEY`. An empty key asks for nothing.

    The comparison takes the same time wherever the keys differ.
    """
    if not key or request.path in OPEN_PATHS:
        return
    values = request.headers.getall("Authorization", [])
    given = b""
    if len(values) == 1:
        scheme, _, rest = values[0].partition(" ")
        if scheme.lower() == "bearer":
            given = rest.strip().encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, key):
        raise RequestError(
            "a valid key is required: send the header Authorization: Bearer KEY",
            status=401,
            type="authentication_error",
            code="invalid_api_key",
        )
