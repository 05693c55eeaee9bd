"""The life of a generation request between its head and the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from flare.config import ServerSettings
from flare.conversation import Event, Text
from flare.errors import RequestError
from flare.generation import Answer, Listener
from flare.metrics import AnswerMeter, Metrics
from flare.protocols.endpoint import Collected, Decoded, GenerationEndpoint, Response
from flare.runtime import Prepared, Runtime
from flare.service.admission import Quota
from flare.service.errors import Refusal, failure
from flare.service.exchange import EVENTS_TYPE, Body, Incoming, bytes_reply
from flare.service.stream import EventStream
from flare.service.workers import Workers

ID_HEADERS = ("x-request-id", "request-id")
"""What the id of a response is called: OpenAI's SDKs read the one, Anthropic's the other."""


class Asked(NamedTuple):
    """What a body asks for: decoded, in tokens, and the texts of the prompts where they are to be echoed."""

    decoded: Decoded
    prepared: Prepared
    echoed: list[str]


class Generator:
    """Serves the generation endpoints over one runtime. All on the event loop but `_prepare`, which the workers run."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.admission = Quota(settings.max_requests, "choices")
        self.bodies = Quota(settings.max_bodies_bytes, "bytes of bodies")
        self.workers = Workers(settings.frontend_threads)
        self.answers: set[Answer] = set()
        self.metrics = Metrics()
        self.closing = False

    def check_ready(self) -> None:
        """Raises RequestError (503) where no generation would begin: the server stops, or its model cannot run."""
        if self.closing:
            raise shutting_down()
        self.runtime.check_ready()

    def handler(self, endpoint: GenerationEndpoint) -> Callable[[Incoming], Awaitable[None]]:
        """Returns the handler of an endpoint's route."""
        return partial(self.generate, endpoint)

    async def generate(self, endpoint: GenerationEndpoint, incoming: Incoming) -> None:
        """Answers a request, until its reader has the answer.

        The request holds one place while its body is read, and as many as it has choices until its answer is delivered.
        Whatever ends this coroutine ends the answer.
        """
        arrived_at = time.monotonic()
        self.check_ready()
        with self.admission.share() as places:
            places.take(1)
            asked = await self._read(incoming, endpoint)
            prepared = asked.prepared
            places.take(prepared.choices - 1)
            response = Response.begin(
                endpoint,
                self.runtime.model,
                asked.decoded,
                prepared.prompts,
                arrived_at,
                echoed=asked.echoed,
                token_bytes=self.runtime.tokenizer.token_bytes,
            )
            answer = self._stream if asked.decoded.stream else self._collect
            try:
                with self.metrics.answer(prepared.choices, arrived_at) as meter:
                    await answer(incoming, endpoint, response, asked, meter)
            except ConnectionError:
                raise
            except Exception as error:
                raise Refusal(failure(error), request_id(response)) from None

    async def _stream(
        self, incoming: Incoming, endpoint: GenerationEndpoint, response: Response, asked: Asked, meter: AnswerMeter
    ) -> None:
        """Answers with events as they come."""
        stream = EventStream()
        listener = stream_listener(stream, endpoint, response)
        echo(asked, listener)
        with self.running(asked.prepared, meter.over(listener), stream.end, response.arrived_at):
            await incoming.stream({"content-type": EVENTS_TYPE, **request_id(response)}, stream)

    async def _collect(
        self, incoming: Incoming, endpoint: GenerationEndpoint, response: Response, asked: Asked, meter: AnswerMeter
    ) -> None:
        """Answers in one piece."""
        collected = Collected(asked.prepared.choices)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def listen(event: Event) -> None:
            if collected.add(event) and not done.done():
                done.set_result(None)

        def close() -> None:
            if not done.done():
                done.set_exception(RuntimeError("the answer could not be collected"))

        echo(asked, listen)
        with self.running(asked.prepared, meter.over(listen, whole=True), close, response.arrived_at):
            await done
        if collected.failed is not None:
            raise collected.failed.error
        body = await self._encode(endpoint, response, collected)
        for outcome in collected.outcomes():
            meter.ended(outcome.end)
        await incoming.send(bytes_reply(body, headers=request_id(response)))

    async def _encode(self, endpoint: GenerationEndpoint, response: Response, collected: Collected) -> bytes:
        """Returns the body of a complete answer. One with log probabilities may be long: a worker makes it."""
        generation = response.decoded.generation
        if generation.logprobs is None and generation.prompt_logprobs is None:
            return endpoint.encode(response, collected)
        return await self.workers.run(partial(endpoint.encode, response, collected))

    @contextmanager
    def running(
        self, prepared: Prepared, listener: Listener, close: Callable[[], None], arrived_at: float
    ) -> Iterator[None]:
        """An answer that the model works on; the end of the block ends it, if it has not come to its own."""
        self.check_ready()
        answer = self.runtime.submit(prepared, listener, arrived_at, close)
        self.answers.add(answer)
        try:
            yield
        finally:
            answer.cancel()
            self.answers.discard(answer)

    async def _read(self, incoming: Incoming, endpoint: GenerationEndpoint) -> Asked:
        """Returns what the body asks for. The body counts as held until it is decoded."""
        with self.bodies.share() as share:
            body = await incoming.read(share, None)
            return await self.workers.run(partial(self._prepare, endpoint, body))

    def _prepare(self, endpoint: GenerationEndpoint, body: Body) -> Asked:
        model = self.runtime.model
        decoded = endpoint.decode(body(), model)
        prepared = self.runtime.prepare(decoded.generation)
        endpoint.admit(prepared.prompt_tokens, prepared.reply_tokens(model.context_length), decoded, model)
        if not decoded.echo:
            return Asked(decoded, prepared, [])
        echoed = self.runtime.prompt_texts(decoded.generation)
        size = sum(len(text.encode()) for text in echoed) * decoded.generation.n
        limit = self.settings.max_body_bytes
        if size > limit:
            raise RequestError(f"echo: {size} bytes of prompts in all choices, the limit is {limit}", param="echo")
        return Asked(decoded, prepared, echoed)

    def fail_all(self, error: RequestError) -> None:
        """Ends every answer with an error; later requests are refused."""
        self.closing = True
        for answer in list(self.answers):
            answer.fail(error)


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


def echo(asked: Asked, listener: Listener) -> None:
    """Begins every choice with its prompt, where that is asked for."""
    n = asked.prepared.request.n
    for index in range(len(asked.echoed) * n):
        listener(Text(index, asked.echoed[index // n], 0, 0))


def request_id(response: Response) -> dict[str, str]:
    """Returns the headers that every response to a submitted request carries."""
    return dict.fromkeys(ID_HEADERS, response.id)


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, type="server_error")
