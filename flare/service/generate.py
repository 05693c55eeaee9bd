"""The life of a generation request between its head and the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from flare.config import ServerSettings
from flare.conversation import Event, Text
from flare.errors import RequestError
from flare.generation import Answer, Listener
from flare.metrics import Metrics
from flare.protocols.endpoint import Collected, Decoded, GenerationEndpoint, Response
from flare.runtime import Prepared, Runtime
from flare.service.admission import Admission, BodyMemory
from flare.service.errors import error_reply, failure
from flare.service.exchange import EVENTS_TYPE, Body, Incoming, Reply, bytes_reply
from flare.service.stream import EventStream

Asked = tuple[Decoded, Prepared, list[str]]
"""What a body asks for: decoded, in tokens, and the texts of the prompts where they are to be echoed."""


class Generator:
    """Serves the generation endpoints over one runtime. All on the event loop but `_prepare`, which the pool runs."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.admission = Admission(settings.max_requests)
        self.bodies = BodyMemory(settings.max_bodies_bytes)
        self.pool = ThreadPoolExecutor(settings.frontend_threads, thread_name_prefix="flare-frontend")
        self.answers: set[Answer] = set()
        self.metrics = Metrics()
        self.closing = False

    def handler(self, endpoint: GenerationEndpoint) -> Callable[[Incoming], Awaitable[Reply | None]]:
        """Returns the handler of an endpoint's route."""

        async def generate(incoming: Incoming) -> Reply | None:
            return await self.generate(incoming, endpoint)

        return generate

    async def generate(self, incoming: Incoming, endpoint: GenerationEndpoint) -> Reply | None:
        """Answers a request: returns the reply, or None once a stream has been sent to its end.

        The request holds one place while its body is read, and as many as it has choices until its answer is delivered.
        Whatever ends this coroutine ends the answer.
        """
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
            decoded, prepared, echoed = await self._read(incoming, endpoint)
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
                    await incoming.stream({"content-type": EVENTS_TYPE, **request_id(response)}, stream)
                    return None
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
                return bytes_reply(endpoint.encode(response, collected), headers=request_id(response))
        except Exception as error:
            if response is None or begun:
                raise
            return error_reply(failure(error), headers=request_id(response), envelope=endpoint.error)
        finally:
            if answer is not None:
                answer.cancel()
                self.answers.discard(answer)
            self.admission.give_back(places)

    async def _read(self, incoming: Incoming, endpoint: GenerationEndpoint) -> Asked:
        """Returns what the body asks for. The body counts as held until it is decoded."""
        with self.bodies.share() as share:
            body = await incoming.read(share, None)
            return await asyncio.get_running_loop().run_in_executor(self.pool, self._prepare, endpoint, body)

    def _prepare(self, endpoint: GenerationEndpoint, body: Body) -> Asked:
        model = self.runtime.model
        decoded = endpoint.decode(body(), model)
        prepared = self.runtime.prepare(decoded.generation)
        endpoint.admit(prepared.prompt_tokens, decoded, model)
        if not decoded.echo:
            return decoded, prepared, []
        echoed = self.runtime.prompt_texts(decoded.generation)
        size = sum(len(text.encode()) for text in echoed) * decoded.generation.n
        limit = self.settings.max_body_bytes
        if size > limit:
            raise RequestError(f"echo: {size} bytes of prompts in all choices, the limit is {limit}", param="echo")
        return decoded, prepared, echoed

    def _submit(self, prepared: Prepared, listener: Listener, close: Callable[[], None], arrived_at: float) -> Answer:
        if self.closing:
            raise shutting_down()
        answer = self.runtime.submit(prepared, listener, arrived_at, close)
        self.answers.add(answer)
        return answer

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
