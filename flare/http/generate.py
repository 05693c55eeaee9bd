"""The life of a generation request between its headers and its last byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from flare.config import ServerSettings
from flare.conversation import Event, Text
from flare.errors import RequestError
from flare.generation import Answer, Listener
from flare.http.admission import Admission
from flare.http.bodies import BodyMemory, content_coding, read_body
from flare.http.codings import decompress
from flare.http.errors import bytes_response, error_response, failure
from flare.http.sse import HEADERS, EventStream, Keeper
from flare.metrics import Metrics
from flare.protocols.endpoint import Collected, Decoded, GenerationEndpoint, Response
from flare.runtime import Prepared, Runtime

Asked = tuple[Decoded, Prepared, list[str]]
"""What a body asks for: decoded, in tokens, and the texts of the prompts where they are to be echoed."""


class Generator:
    """Serves the generation endpoints over one runtime. All on the event loop but `_prepare`, which the pool runs."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.admission = Admission(settings.max_requests)
        self.bodies = BodyMemory(settings.max_bodies_bytes)
        self.keeper = Keeper(settings.keepalive_comment_s)
        self.pool = ThreadPoolExecutor(settings.frontend_threads, thread_name_prefix="flare-frontend")
        self.answers: set[Answer] = set()
        self.metrics = Metrics()
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
        answer = response = None
        begun = False
        try:
            decoded, prepared, echoed = await self._read(request, endpoint)
            more = prepared.choices - 1
            self.admission.take(more, held=places)
            places += more
            response = Response.begin(
                endpoint.id_prefix,
                self.runtime.model,
                decoded,
                prepared.prompt_tokens,
                prepared.prompts,
                arrived_at,
            )
            with self.metrics.answer(prepared.choices, arrived_at) as meter:
                if decoded.stream:
                    stream = EventStream()
                    listener = stream_listener(stream, endpoint, response)
                    echo(echoed, prepared, listener)
                    answer = self._submit(prepared, meter.over(listener), stream.end, arrived_at)
                    begun = True
                    return await self._stream(request, stream, response)
                collected = Collected(prepared.choices)
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

                def listen(event: Event) -> None:
                    if collected.add(event) and not done.done():
                        done.set_result(None)

                def close() -> None:
                    if not done.done():
                        done.set_exception(RuntimeError("the answer could not be collected"))

                echo(echoed, prepared, listen)
                answer = self._submit(prepared, meter.over(listen), close, arrived_at)
                await done
                if collected.failed is not None:
                    raise collected.failed.error
                return bytes_response(endpoint.encode(response, collected), headers=request_id(response))
        except Exception as error:
            if response is None or begun:
                raise
            return error_response(failure(error), headers=request_id(response), envelope=endpoint.error)
        finally:
            if answer is not None:
                answer.cancel()
                self.answers.discard(answer)
            self.admission.give_back(places)

    async def _read(self, request: web.BaseRequest, endpoint: GenerationEndpoint) -> Asked:
        """Returns what the body asks for. The body counts as held until it is decoded."""
        settings = self.settings
        coding = content_coding(request)
        with self.bodies.share() as share:
            body = await read_body(
                request,
                share,
                settings.max_body_bytes,
                silence_s=settings.body_silence_s,
                total_s=settings.body_total_s,
            )
            return await asyncio.get_running_loop().run_in_executor(self.pool, self._prepare, endpoint, body, coding)

    def _prepare(self, endpoint: GenerationEndpoint, body: bytearray, coding: str) -> Asked:
        limit = self.settings.max_body_bytes
        decoded = endpoint.decode(decompress(body, coding, limit), self.runtime.model)
        prepared = self.runtime.prepare(decoded.generation)
        endpoint.admit(prepared.prompt_tokens, decoded, self.runtime.model)
        if not decoded.echo:
            return decoded, prepared, []
        echoed = self.runtime.prompt_texts(decoded.generation)
        size = sum(len(text.encode()) for text in echoed) * decoded.generation.n
        if size > limit:
            raise RequestError(f"echo: {size} bytes of prompts in all choices, the limit is {limit}", param="echo")
        return decoded, prepared, echoed

    def _submit(self, prepared: Prepared, listener: Listener, close: Callable[[], None], arrived_at: float) -> Answer:
        if self.closing:
            raise shutting_down()
        answer = self.runtime.submit(prepared, listener, arrived_at, close)
        self.answers.add(answer)
        return answer

    async def _stream(self, request: web.BaseRequest, stream: EventStream, response: Response) -> web.StreamResponse:
        reply = web.StreamResponse(headers=HEADERS | request_id(response))
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
        self.pool.shutdown(wait=False, cancel_futures=True)  # the loop must not wait for a worker


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


def echo(texts: list[str], prepared: Prepared, listener: Listener) -> None:
    """Begins every choice with its prompt, if `texts` has the prompts."""
    n = prepared.request.n
    for index in range(len(texts) * n):
        listener(Text(index, texts[index // n], 0, 0))


def request_id(response: Response) -> dict[str, str]:
    """Returns the header that every response to a submitted request carries."""
    return {"x-request-id": response.id}


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, type="server_error")
