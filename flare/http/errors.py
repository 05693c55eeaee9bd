"""Replies as HTTP responses, and the refusal of what is not HTTP."""

from __future__ import annotations

from aiohttp import web

from flare.errors import RequestError
from flare.service.exchange import Reply

SERVER = {"Server": "flare"}


def http_response(reply: Reply) -> web.Response:
    return web.Response(body=reply.body, status=reply.status, headers={**SERVER, **reply.headers})


def not_http() -> RequestError:
    return RequestError("the request is not well-formed HTTP, or its head is too long")
