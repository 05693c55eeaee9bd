"""The life of a request for decisions: its questions are asked one after the other, each as a generation of one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from flare.conversation import Event, Failed, Finished, GenerationRequest, Logprobed, RawPrompt, SamplingRequest
from flare.decisions.distribution import Distribution, read_distribution
from flare.decisions.endpoint import DecisionEndpoint
from flare.decisions.prompt import Compiler, Read
from flare.decisions.questions import Inquiry, Usage
from flare.fallbacks import Fallback
from flare.logprobs import LogprobsWanted, TokenLogprobs
from flare.service.errors import Refusal, failure
from flare.service.exchange import Body, Incoming, bytes_reply
from flare.service.generate import ID_HEADERS, Generator


class Asked(NamedTuple):
    """What a body asks for, its first question ready to be asked, and the others, each compiled when it is taken."""

    inquiry: Inquiry
    first: Read
    others: Iterator[Read]


class Decider:
    """Serves the endpoints of decisions with a generator's runtime, places and counters. On the event loop but for `_prepare`
    and the compiling of questions, which the workers run."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        runtime = generator.runtime
        self._compiler = Compiler(runtime.model, runtime.tokenizer, runtime.template)

    def handler(self, endpoint: DecisionEndpoint) -> Callable[[Incoming], Awaitable[None]]:
        """Returns the handler of an endpoint's route."""
        return partial(self.decide, endpoint)

    async def decide(self, endpoint: DecisionEndpoint, incoming: Incoming) -> None:
        """Answers a request, until its reader has the answer.

        It holds one place however many questions it has, since one of them runs at a time. Whatever ends this coroutine ends
        the question that runs, and no other is asked.
        """
        arrived_at = time.monotonic()
        generator = self._generator
        generator.check_ready()
        with generator.admission.share() as places:
            places.take(1)
            with generator.bodies.share() as share:
                body = await incoming.read(share, None)
                asked = await generator.workers.run(partial(self._prepare, endpoint, body))
            headers = dict.fromkeys([*ID_HEADERS, *endpoint.id_headers], endpoint.id_prefix + uuid4().hex)
            try:
                answer = await self._answer(endpoint, asked, arrived_at)
            except Exception as error:
                raise Refusal(failure(error), headers) from None
            await incoming.send(bytes_reply(answer, headers=headers))

    def _prepare(self, endpoint: DecisionEndpoint, body: Body) -> Asked:
        inquiry = endpoint.decode(body(), self._generator.runtime.model)
        reads = self._compiler.compile(inquiry)
        return Asked(inquiry, next(reads), reads)

    async def _answer(self, endpoint: DecisionEndpoint, asked: Asked, arrived_at: float) -> bytes:
        """Asks every question, and returns the encoded answer. A worker compiles the next one when it is due, so that
        nothing is done for a reader that has gone."""
        inquiry, distributions = asked.inquiry, []
        prompt = cached = generated = 0
        fallbacks: tuple[Fallback, ...] = ()
        read: Read | None = asked.first
        while read is not None:
            distribution, end = await self._ask(read, inquiry.state_field, arrived_at)
            distributions.append(distribution)
            prompt += end.prompt_tokens
            cached += end.cached_tokens
            generated += end.completion_tokens
            fallbacks += end.fallbacks
            read = await self._generator.workers.run(partial(next, asked.others, None))
        usage = Usage(prompt, cached, generated, fallbacks)
        return endpoint.encode(inquiry, distributions, usage, self._generator.runtime.model)

    async def _ask(self, read: Read, field: str, arrived_at: float) -> tuple[Distribution, Finished]:
        """Asks one question. What the model draws has no effect: its distribution is the answer."""
        generator = self._generator
        request = GenerationRequest(
            prompts=[RawPrompt(read.prompt.tolist())],
            prompt_field=field,
            sampling=SamplingRequest(seed=0),
            max_tokens=1,
            ignore_eos=True,  # the token that ends a reply has no log probabilities
            logprobs=LogprobsWanted(ids=read.labels),
        )
        entry: TokenLogprobs | None = None
        done: asyncio.Future[Failed | Finished | None] = asyncio.get_running_loop().create_future()

        def listen(event: Event) -> None:
            nonlocal entry
            if isinstance(event, Logprobed):
                entry = event.entries[0]
            elif isinstance(event, Failed | Finished) and not done.done():
                done.set_result(event)

        def close() -> None:
            if not done.done():
                done.set_result(None)

        with (
            generator.metrics.answer(1, arrived_at) as meter,
            generator.running(generator.runtime.prepare(request), listen, close, arrived_at),
        ):
            end = await done
            if isinstance(end, Failed):
                raise end.error
            if end is None or entry is None:
                raise RuntimeError("a question came to its end without log probabilities")
            distribution = read_distribution(entry.values[: len(read.labels)])
            meter.ended(end)
        return distribution, end
