"""What passes between a transport and the service: a request with its body, and the reply to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from flare.errors import FlareError
from flare.protocols.endpoint import encode_json
from flare.service.admission import Share
from flare.service.stream import EventStream

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream; charset=utf-8"

Body = Callable[[], bytes | bytearray]
"""Gives a body that has come, decompressed. For the worker pool. Raises RequestError."""


class Incoming(Protocol):
    """A request as its transport hands it on; used on the event loop. `path` is decoded and without the query, `query` as
    it was sent."""

    method: str
    path: str
    query: str

    @property
    def accept(self) -> str:
        """All values of the header of this name, joined by commas."""
        ...

    def check_sender(self) -> None:
        """Raises RequestError (401) when whoever sent the request may not ask for anything."""

    def check_head(self) -> None:
        """Raises RequestError for headers with which the route, which exists, does not take a body."""

    async def read(self, share: Share, codings: Sequence[str] | None) -> Body:
        """Reads the body, whose bytes are taken from `share` as they come. `codings` are the content codings that the route
        takes, None stands for all. Raises RequestError for a body that is too large, too slow or in another coding."""
        ...

    async def send(self, reply: Reply) -> None:
        """Sends a whole reply, until its reader has it. Raises ConnectionError when the client goes away, or is cancelled;
        nothing else."""

    async def stream(self, headers: Mapping[str, str], stream: EventStream) -> None:
        """Sends the reply's head and then the frames, until they end. Raises ConnectionError when the client goes away, or is
        cancelled; nothing else."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply: `headers` by their names in small letters, `body` JSON unless `content-type` says otherwise."""

    status: int
    body: bytes = field(repr=False)
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        """Returns the decoded body. Raises FlareError for one that is not JSON, and where HEAD left it out."""
        if not self.body:
            raise FlareError("the reply has no body, as HEAD asks; read its status and headers, or ask with GET")
        if self.headers["content-type"] != JSON_TYPE:
            raise FlareError(f"the reply is {self.headers['content-type']}, not JSON; read its text")
        return msgspec.json.decode(self.body)

    def __iter__(self) -> Iterator[Any]:
        """Raises FlareError: who iterates asked for a stream, and got a refusal or forgot `stream`."""
        raise FlareError(f"the reply is one object with status {self.status} and no stream of events; read json()")


def bytes_reply(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Returns a reply of encoded JSON; `headers` may name another type."""
    return Reply(status, body, {"content-type": JSON_TYPE, **(headers or {})})


def json_reply(value: object) -> Reply:
    return bytes_reply(encode_json(value))
