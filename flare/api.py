"""The API within a process: the routes of the HTTP server, called as a function; same JSON, same events, no socket."""

from __future__ import annotations

import asyncio
import contextlib
import json as standard_json
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import unquote

import msgspec

from flare.config import ServerSettings
from flare.errors import FlareError, RequestError
from flare.protocols.refusals import shown
from flare.protocols.versions import HEADER as VERSION_HEADER
from flare.protocols.versions import check_version
from flare.runtime import Runtime
from flare.service.admission import Share, too_large
from flare.service.errors import Refusal
from flare.service.exchange import Body, Reply
from flare.service.routes import Service
from flare.service.stream import EventStream
from flare.sources import given_here

T = TypeVar("T")

SENTINEL = b"[DONE]"
UNNAMED = "message"
"""The name that the standard of server-sent events gives to an event without one."""


class Event(NamedTuple):
    """One event of a stream. `data` is decoded JSON, or the text "[DONE]" behind the last chunk of the routes that send it."""

    name: str
    data: Any


def parse_events(frames: bytes) -> Iterator[Event]:
    """Returns the events of whole frames as the encoders write them: at most one line of each kind, no comments."""
    for frame in frames.split(b"\n\n"):
        name, data = UNNAMED, b""
        for line in frame.split(b"\n"):
            kind, _, value = line.partition(b": ")
            if kind == b"event":
                name = value.decode()
            elif kind == b"data":
                data = value
        if frame:
            yield Event(name, data.decode() if data == SENTINEL else msgspec.json.decode(data))


class InProcess:
    """A core that answers requests of this process, made by `flare.open`; every method may be called from any thread.

    It must be closed, by `close` or as a context manager: its threads hold it, so that dropping it frees neither them nor the
    core's memory. The answers come from a thread with an event loop of its own.
    """

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.service = Service(runtime, settings)
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call] = set()
        # Of the two states of closing, and of what is given to the loop before the second.
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._closing = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="flare-api", daemon=True)
        self._thread.start()
        self.service.start(self._loop)

    def _run(self) -> None:
        loop = self._loop
        loop.run_forever()
        loop.run_until_complete(cancel_others())  # readers that came when everything else had ended
        loop.close()

    def request(
        self, path: str, json: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply | EventReply:
        """Answers a request to any route, as over HTTP: refusals and failures are replies with their status and error.

        `path` may have a query. `json` is what the body is made from, or bytes, which are taken as they are; `method` is POST
        with a body and GET without one unless it is given. Of `headers` these count: Accept, and anthropic-version, which may
        be missing here. There is no key to check. Waits for the whole answer, or, where the body says `stream`, until it is
        queued; the reply's events then come as they are made.

        Raises FlareError once this is closed, and TypeError or ValueError for `json` that no JSON can be made from.
        """
        body = b"" if json is None else bytes(json) if isinstance(json, bytes | bytearray) else _encoded(json)
        call = _Call(self, method or ("GET" if json is None else "POST"), path, headers or {}, body)
        with self._lock:
            if self._closing:
                raise FlareError("this runtime is closed; open the core again")
            self._loop.call_soon_threadsafe(call.start)
        try:
            begun = call.begun.result()
        except BaseException:
            call.cancel()
            raise
        return begun if isinstance(begun, Reply) else EventReply(begun, call)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns what it returns. Raises FlareError when this is closed before its end."""
        with self._lock:
            if self._stopped:
                work.close()
                raise closed()
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except CancelledError:
            raise closed() from None

    def close(self) -> None:
        """Ends every answer with an error, and frees the core. Streams that are being read get their last events; of others
        the rest is lost. Closing again does nothing, and goes on where an exception, such as an interrupt, ended it before."""
        with self._lock:
            self._closing = True
        with self._ending:
            if not self._stopped:
                self.run(self.service.stop(self._drain()))
            with self._lock:
                self._stopped = True
                with contextlib.suppress(RuntimeError):  # the loop is closed already
                    self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self.runtime.close()

    async def _drain(self) -> None:
        busy = [call.task for call in self._calls if not call.paused]
        if busy:
            await asyncio.wait(busy, timeout=self.settings.shutdown_s)
        left = [call.task for call in self._calls]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventReply:
    """The reply of a stream: an iterator over its events, for one thread at a time.

    Who stops early closes it, or leaves its `with` block; that ends the answer, and frees its place, as a client does that
    hangs up. Dropping it does the same, later.
    """

    status = 200

    def __init__(self, headers: Mapping[str, str], call: _Call) -> None:
        self.headers = headers
        self._call = call
        self._events: deque[Event] = deque()
        self._ended = False
        self._reading = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """Raises FlareError when the answer was ended from elsewhere, such as by closing the runtime."""
        with self._reading:
            while not self._events:
                if self._ended:
                    raise StopIteration
                frames, self._ended = self._call.next_frames()
                self._events.extend(parse_events(frames))
            return self._events.popleft()

    def json(self) -> Any:
        """Raises FlareError: a stream is no JSON object."""
        raise FlareError("the reply is a stream of events; iterate over it, or ask without `stream`")

    def close(self) -> None:
        """Ends the answer and waits until its place is free. What was not read is lost."""
        self._call.cancel()
        self._call.finished.wait()
        with self._reading:
            self._events.clear()
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class _Call:
    """One request, see `Incoming`: started on the loop, waited for by the caller's thread.

    `begun` gets the reply, or a stream's headers once that is queued. `finished` is set when nothing of the request is left.
    `paused`: a stream that nobody reads at the moment.
    """

    def __init__(self, owner: InProcess, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        given = {name.lower(): value for name, value in headers.items()}
        path, _, self.query = path.partition("?")
        self.method = method.upper()
        self.path = unquote(path)
        self.accept = given.get("accept", "")
        self.begun: Future[Reply | Mapping[str, str]] = Future()
        self.finished = threading.Event()
        self.task: asyncio.Task[None]
        self._owner = owner
        self._versions = [given[VERSION_HEADER]] if VERSION_HEADER in given else []
        self._coding = given.get("content-encoding", "identity")
        self._body = body
        self._stream = EventStream()
        self._delivered: asyncio.Future[None] | None = None
        self._readers = 0

    @property
    def paused(self) -> bool:
        return self._delivered is not None and not self._readers

    def start(self) -> None:
        """Begins to answer; on the loop."""
        self.task = asyncio.ensure_future(self._answer())
        self._owner._calls.add(self)
        self.task.add_done_callback(self._end)

    async def _answer(self) -> None:
        await self._owner.service.handle(self)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._owner._calls.discard(self)
        self._stream.end()  # for a reader that still waits
        self.finished.set()
        if not self.begun.done():
            error = None if task.cancelled() else task.exception()
            self.begun.set_exception(error or closed())

    def cancel(self) -> None:
        """Ends the request, wherever it is; from any thread, and without waiting."""
        if not self.finished.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._owner._loop.call_soon_threadsafe(lambda: self.task.cancel())

    def check_sender(self) -> None:
        """Takes anyone: whoever calls has the core anyway."""

    def check_head(self) -> None:
        if self._versions:
            check_version(self.path, self._versions)
        if self._coding != "identity":
            text = f"Content-Encoding: {shown(self._coding)} is for bodies over HTTP; leave it out"
            raise Refusal(RequestError(text, status=415), {"accept-encoding": "identity"})

    async def read(self, share: Share, codings: Sequence[str] | None) -> Body:
        limit = self._owner.settings.max_body_bytes
        body, self._body = self._body, b""  # a stream lives on without it
        if len(body) > limit:
            raise too_large(limit)
        share.take(len(body))
        return lambda: body

    async def send(self, reply: Reply) -> None:
        self.begun.set_result(replace(reply, body=b"") if self.method == "HEAD" else reply)

    async def stream(self, headers: Mapping[str, str], stream: EventStream) -> None:
        self._stream = stream
        self._delivered = asyncio.get_running_loop().create_future()
        self.begun.set_result(headers)
        await self._delivered

    def next_frames(self) -> tuple[bytes, bool]:
        """Waits for the next frames of the stream; returns them, and whether they are the last.

        Raises FlareError when the request was ended from elsewhere. Whatever else interrupts the wait ends the request, since
        frames may be lost.
        """
        try:
            return self._owner.run(self._take())
        except BaseException:
            self.cancel()
            raise

    async def _take(self) -> tuple[bytes, bool]:
        assert self._delivered is not None
        self._readers += 1
        try:
            frames = await self._stream.take()
        finally:
            self._readers -= 1
        if self.finished.is_set():
            raise closed()
        last = self._stream.ended and self._stream.drained
        if last and not self._delivered.done():
            self._delivered.set_result(None)
        return frames, last


async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def closed() -> FlareError:
    return FlareError("the answer was ended before its last event: it, or the runtime, was closed")


def _encoded(value: Any) -> bytes:
    """Returns JSON as a client would send it: numbers that are none go out as they are written, and are refused."""
    return standard_json.dumps(value, separators=(",", ":")).encode()


def open_core(core: str | os.PathLike[str], settings: Mapping[str, Any]) -> InProcess:
    """Loads a core, see `flare.open`."""
    configuration = given_here(os.fspath(core), settings)
    server = configuration.server()
    with configuration.naming():
        return InProcess(Runtime.load(configuration.runtime()), server)
