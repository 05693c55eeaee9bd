"""The life of a generation request between its headers and its last byte."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from flare.config import ServerSettings
from flare.conversation import Event
from flare.errors import RequestError
from flare.generation import Answer, Listener
from flare.http.admission import Admission
from flare.http.bodies import content_coding, decompress, read_body
from flare.http.errors import bytes_response
from flare.http.sse import HEADERS, EventStream, Keeper
from flare.protocols.endpoint import Collected, Decoded, GenerationEndpoint, Response
from flare.runtime import Prepared, Runtime


class Generator:
    """Serves the generation endpoints over one runtime. All on the event loop but `_prepare`, which the pool runs."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.admission = Admission(settings.max_requests)
        self.keeper = Keeper(settings.keepalive_comment_s)
        self.pool = ThreadPoolExecutor(settings.frontend_threads, thread_name_prefix="flare-frontend")
        self.answers: set[Answer] = set()
        self.closing = False

    def handler(self, endpoint: GenerationEndpoint) -> Any:
        """Returns the aiohttp handler of an endpoint."""

        async def generate(request: web.BaseRequest) -> web.StreamResponse:
            return await self.generate(request, endpoint)

        return generate

    async def generate(self, request: web.BaseRequest, endpoint: GenerationEndpoint) -> web.StreamResponse:
        arrived_at = time.monotonic()
        if self.closing:
            raise shutting_down()
        if not self.runtime.healthy:
            raise RequestError("the model cannot run; the server must be restarted", status=503, type="server_error")
        places = 1
        self.admission.take(places)
        answer = None
        try:
            coding = content_coding(request)
            body = await read_body(request, self.settings.max_body_bytes, self.settings.body_silence_s)
            work = asyncio.get_running_loop().run_in_executor(self.pool, self._prepare, endpoint, body, coding)
            decoded, prepared = await work
            del body
            more = prepared.choices - 1
            self.admission.take(more, held=places)
            places += more
            response = Response.begin(endpoint.id_prefix, self.runtime.model, decoded, prepared.prompt_tokens)
            if decoded.stream:
                stream = EventStream()
                answer = self._submit(prepared, stream_listener(stream, endpoint, response), arrived_at)
                return await self._stream(request, stream, response)
            collected = Collected(prepared.choices)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def listen(event: Event) -> None:
                if collected.add(event) and not done.done():
                    done.set_result(None)

            answer = self._submit(prepared, listen, arrived_at)
            await done
            if collected.failed is not None:
                raise collected.failed.error
            return bytes_response(endpoint.encode(response, collected), headers={"x-request-id": response.id})
        finally:
            if answer is not None:
                answer.cancel()
                self.answers.discard(answer)
            self.admission.give_back(places)

    def _prepare(self, endpoint: GenerationEndpoint, body: bytearray, coding: str) -> tuple[Decoded, Prepared]:
        decoded = endpoint.decode(decompress(body, coding, self.settings.max_body_bytes), self.runtime.model)
        return decoded, self.runtime.prepare(decoded.generation)

    def _submit(self, prepared: Prepared, listener: Listener, arrived_at: float) -> Answer:
        if self.closing:
            raise shutting_down()
        answer = self.runtime.submit(prepared, listener, arrived_at)
        self.answers.add(answer)
        return answer

    async def _stream(self, request: web.BaseRequest, stream: EventStream, response: Response) -> web.StreamResponse:
        reply = web.StreamResponse(headers=HEADERS | {"x-request-id": response.id})
        self.keeper.streams.add(stream)
        try:
            await reply.prepare(request)
            await stream.pump(reply)
            await reply.write_eof()
        finally:
            self.keeper.streams.discard(stream)
        return reply

    def fail_all(self, error: RequestError) -> None:
        """Ends every answer with an error; later requests are refused."""
        self.closing = True
        for answer in list(self.answers):
            answer.fail(error)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def stream_listener(stream: EventStream, endpoint: GenerationEndpoint, response: Response) -> Listener:
    """Returns the listener that encodes events into a stream, and ends it behind the last one."""
    encoder = endpoint.stream(response)
    encode, push = encoder.encode, stream.push

    def listen(event: Event) -> None:
        frames = encode(event)
        if frames:
            push(frames)
        if encoder.ended:
            stream.end()

    return listen


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, type="server_error")
