"""The parts wired together: a core, its replay, the engine, the tokenizer and the template, behind one object.

The HTTP server and the terminal are thin callers of `Runtime`: `prepare` turns a neutral request into tokens (any
thread, takes its time), `submit` hands it to the engine, `receive` takes its deliveries on the caller's thread.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Thread
from typing import TYPE_CHECKING, Any

from flare.config import RuntimeSettings
from flare.conversation import Conversation, GenerationRequest, RawPrompt
from flare.errors import RequestError
from flare.failures import log_failure
from flare.fallbacks import Fallbacks
from flare.generation import Answer, Choice, Listener
from flare.loading import load_text, served_model
from flare.output import Ways, make_output, reply_ways
from flare.prompting import Prompt, render_conversation
from flare.report import Laps
from flare.scored_prompt import ScoredChoice, ScoredPrompt
from flare.served import ServedModel
from flare.thinking_budget import closing, tokens_to_close_after

if TYPE_CHECKING:
    from flare.constraints import CompiledConstraint
    from flare.engine import Delivery, EngineStats
    from flare.text.stops import StopSet
    from flare.text.template import ChatTemplate
    from flare.text.tokenizer import Tokenizer

MAX_CHOICES = 128
"""The most choices of one request, prompts times n, where the engine holds as many."""

_log = logging.getLogger("flare.runtime")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in tokens. `prompts` has one entry a prompt; every one of its n choices shares the list.

    `opens_reasoning`: the conversation's prompt ends within reasoning, which is closed behind `close_after` tokens.
    `constraints` bound the answers, one each, to which a conversation's replies come by `ways`.
    """

    request: GenerationRequest
    prompts: list[list[int]]
    limits: list[int | None]
    sampling: Any
    stop_tokens: frozenset[int]
    opens_reasoning: bool = False
    close_after: int | None = None
    stops: StopSet[str] | None = None
    stop_sequences: StopSet[tuple[int, ...]] | None = None
    constraints: Sequence[CompiledConstraint] = ()
    ways: Ways | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def reply_tokens(self, context: int) -> int:
        """Returns how many tokens all choices together may generate in a context of so many tokens."""
        pairs = zip(self.prompts, self.limits, strict=True)
        rooms = ((context - len(prompt), limit) for prompt, limit in pairs)
        return self.request.n * sum(room if limit is None else min(room, limit) for room, limit in rooms)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.request.n


class Runtime:
    """A loaded core, ready to generate. Thread-safe but for `receive`, which has one caller at a time."""

    def __init__(
        self,
        *,
        replay: Any,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model: ServedModel,
        max_waiting: int = 1024,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        from flare.constraints import Constraints, Vocabulary
        from flare.engine import Engine, EngineLimits

        self.replay = replay
        self.tokenizer = tokenizer
        self.template = template
        self.model = model
        self.fallbacks = fallbacks or Fallbacks()
        self.engine = Engine(replay, EngineLimits(max_waiting=max_waiting), self._deliver, self._settled)
        self._dispatch: Callable[[list[Delivery]], None] = self.receive
        self._ids = count(1)
        self.constraints = Constraints(Vocabulary(tokenizer, model.vocabulary, model.eos, model.output.spelled))
        self._forms = False
        self._preparing: Thread | None = None

    @classmethod
    def load(cls, settings: RuntimeSettings, laps: Laps | None = None) -> Runtime:
        """Opens a core and everything that serving needs; `laps` takes the time of each part.

        Raises CoreError for a bad core, InputError for what this machine cannot do.
        """
        from flare.core.directory import open_core

        laps = laps or Laps()
        core = open_core(settings.core, verify=settings.verify)
        laps.mark("core")
        tokenizer, template = load_text(core)
        laps.mark("tokenizer")
        from flare.backend import choose_backend

        fallbacks = Fallbacks(allowed=settings.cpu_fallback)
        backend = choose_backend(core, settings, fallbacks)
        try:
            model = served_model(
                core,
                settings,
                kv_pages=backend.kv_pages,
                decode_weight_bytes=backend.target.decode_weight_bytes,
                target=backend.kind,
                device=backend.device,
            )
            replay = backend.open()
        except BaseException:
            backend.close()
            raise
        laps.notes.append(f"target: {backend.kind} on {backend.device}, {backend.kv_pages} kv pages")
        laps.mark("kernels")
        if settings.check:
            from flare.replay.oracle import check_core

            try:
                with fallbacks.uncounted():
                    found = check_core(core, backend.target, replay, backend.architecture)
                laps.notes.append(f"check: {found}")
            except BaseException:
                replay.close()
                raise
            laps.mark("check")
        return cls(
            replay=replay,
            tokenizer=tokenizer,
            template=template,
            model=model,
            max_waiting=settings.max_waiting,
            fallbacks=fallbacks,
        )

    def start(self, dispatch: Callable[[list[Delivery]], None] | None = None, *, forms: bool = False) -> None:
        """Starts the engine's thread. `dispatch` is called there once a step and must see to it that `receive` gets the
        batch on the caller's thread; without it `receive` runs on the engine's thread. `forms`: requests may want forms of
        answers, and what these need is made before they do, when nothing runs."""
        if dispatch is not None:
            self._dispatch = dispatch
        self._forms = forms and self.constraints.possible
        self.engine.start()

    def _deliver(self, batch: list[Delivery]) -> None:
        self._dispatch(batch)

    def _settled(self) -> None:
        """Has the tables for forms of answers made, once, when nothing runs, so that neither a start nor the first request of a
        form waits for them. They take a second or more, and hold the interpreter's lock for most of it: a request that comes
        just then may wait for that."""
        if self._forms and self._preparing is None:
            # No daemon, as the engine's thread is, from which it would come: the library calls Python, and a thread that is
            # taken away there, within native code, crashes the process that ends.
            self._preparing = Thread(target=self._prepare_forms, name="flare-forms", daemon=False)
            try:
                self._preparing.start()
            except RuntimeError:  # no more threads: the first such request makes them
                self._preparing = None

    def _prepare_forms(self) -> None:
        try:
            self.constraints.prepare()
        except Exception:
            log_failure(
                _log, "the tables for forms of answers could not be made; the next request of a form tries again"
            )

    def receive(self, batch: list[Delivery]) -> None:
        """Passes a step's deliveries on to their choices. A failure in one answer ends that answer only."""
        for delivery in batch:
            choice = delivery.request.sink
            try:
                choice.receive(delivery)
            except Exception:
                log_failure(_log, "an answer failed while its tokens became text")
                choice.answer.fail(RequestError("the answer could not be encoded", status=500, type="server_error"))

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Renders, tokenizes and resolves a request against the model. Raises RequestError when it cannot run."""
        from flare.engine import SamplingParams
        from flare.text.stops import StopSet

        asked, limit = len(request.prompts) * request.n, min(MAX_CHOICES, self.engine.capacity)
        if asked > limit:
            field = "n" if request.n > 1 else request.prompt_field
            raise RequestError(f"{field}: {asked} choices in all, the limit is {limit}; ask for less", param=field)
        model = self.model
        values = model.resolve_sampling(request.sampling)
        seed = request.sampling.seed
        if seed is None:
            seed = model.defaults.get("seed")
        if seed is None:
            seed = secrets.randbits(63)
        least = 0 if request.max_tokens == 0 and request.prompt_logprobs is not None else 1
        prompts, within = self._prompts(request, least)
        limits = [model.resolve_limit(request, len(prompt)) for prompt in prompts]
        for prompt in prompts:
            model.check_room(len(prompt), request.prompt_field, least=least)
        stop_tokens = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | model.eos
        close_after = tokens_to_close_after(request.budget, model.output, opens_reasoning=within)
        constraints, ways = self._constrain(request, asked)
        return Prepared(
            request,
            prompts,
            limits,
            SamplingParams(**values, seed=seed),
            stop_tokens,
            within,
            close_after,
            StopSet(request.stop) if request.stop else None,
            StopSet(request.stop_token_sequences) if request.stop_token_sequences else None,
            constraints,
            ways,
        )

    def _constrain(self, request: GenerationRequest, choices: int) -> tuple[Sequence[CompiledConstraint], Ways | None]:
        """Returns the request's constraint, compiled for each choice, and how a conversation's reply comes to the answer
        that it bounds."""
        asked = request.constraint
        if asked is None:
            return (), None
        ways = None
        if isinstance(prompt := request.prompts[0], Conversation):
            ways = reply_ways(self.model.output, prompt.tools)
            if ways is None:
                text = "this model's replies cannot be held to a form, since their frames are no tokens; leave it out"
                raise RequestError(f"{asked.field}: {text}", param=asked.field, code="unsupported_parameter")
        return self.constraints.compile(asked, choices), ways

    def count_tokens(self, request: GenerationRequest) -> int:
        """Returns how many tokens the prompts have, of any length. Raises RequestError as `prepare` does for all else."""
        self.model.resolve_sampling(request.sampling)
        prompts, within = self._prompts(request, None)
        tokens_to_close_after(request.budget, self.model.output, opens_reasoning=within)
        return sum(map(len, prompts))

    def _prompts(self, request: GenerationRequest, least: int | None) -> tuple[list[list[int]], bool]:
        """Returns the prompts, and whether the first one, a conversation's then, ends within reasoning. None is encoded where
        the length of one shows that it leaves no room for `least` tokens; None: prompts may have any length."""
        if least is not None:
            for prompt in request.prompts:
                if isinstance(prompt, RawPrompt) and isinstance(text := prompt.content, str):
                    fewest = self.tokenizer.fewest_tokens(text)
                    self.model.check_room(fewest, request.prompt_field, least=least, counted=False)
        found = [self._prompt(prompt, request, least) for prompt in request.prompts]
        return [prompt.tokens for prompt in found], found[0].opens_reasoning

    def _prompt(self, prompt: Conversation | RawPrompt, request: GenerationRequest, least: int | None) -> Prompt:
        field = request.prompt_field
        if isinstance(prompt, Conversation):
            assert self.template is not None
            bound = request.constraint
            return render_conversation(prompt, field, self.model, self.tokenizer, self.template, bound, least)
        if isinstance(prompt.content, list):
            return Prompt(prompt.content)
        tokens = self.tokenizer.encode(prompt.content, special=True, add_special_tokens=True)
        if not tokens and self.model.bos is not None:
            tokens = [self.model.bos]
        if not tokens:
            raise RequestError(f"{field}: an empty prompt, and this model has no token for its start", param=field)
        return Prompt(tokens)

    def prompt_texts(self, request: GenerationRequest) -> list[str]:
        """Returns the text of every raw prompt: as it was sent, or what its tokens say, special tokens spelled out."""
        from flare.text.detokenizer import Detokenizer

        texts = []
        for prompt in request.prompts:
            assert isinstance(prompt, RawPrompt)
            if isinstance(prompt.content, str):
                texts.append(prompt.content)
            else:
                decoder = Detokenizer(self.tokenizer, hidden=frozenset())
                texts.append("".join([decoder.push(token) for token in prompt.content]) + decoder.flush())
        return texts

    def submit(
        self,
        prepared: Prepared,
        listener: Listener,
        arrived_at: float,
        close: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Hands every choice to the engine, on the thread that calls `receive`; events go to `listener`.

        `arrived_at` is when the request came, on the monotonic clock. `close` is called when `listener` cannot even take
        the answer's failure. Raises RequestError when the engine cannot take them all, or a node of the step may not be
        interpreted; none of them runs then.
        """
        self.fallbacks.check()
        from flare.constraints import CallTracker
        from flare.engine import Delivery, Request, StopCause
        from flare.text.detokenizer import Detokenizer
        from flare.text.stops import StopMatcher

        request = prepared.request
        logprobs = request.logprobs is not None
        answer = Answer(
            self.engine,
            listener,
            arrived_at,
            close,
            observe=request.observe,
            logprobs=logprobs,
            fallbacks=self.fallbacks,
        )
        user_stops = request.stop_token_ids if request.ignore_eos else request.stop_token_ids - self.model.eos
        hidden = self.tokenizer.special_ids - self.model.output.spelled
        unsent: list[Request] = []
        scored: list[Choice] = []
        for index in range(prepared.choices):
            place = index // request.n
            prompt, limit = prepared.prompts[place], prepared.limits[place]
            sampling = prepared.sampling.advanced(index)
            child = Request(next(self._ids), prompt, limit, sampling, stop_tokens=prepared.stop_tokens)
            decoder = partial(Detokenizer, self.tokenizer, previous=prompt[-1], hidden=hidden)
            stops = None if prepared.stops is None else StopMatcher(prepared.stops)
            if prepared.stop_sequences is not None:
                child.stop_sequences = StopMatcher(prepared.stop_sequences)
            output = machine = None
            if isinstance(conversation := request.prompts[place], Conversation):
                machine = partial(
                    make_output,
                    self.model.output,
                    conversation.tools,
                    opens_reasoning=prepared.opens_reasoning,
                    call_prefix=f"call_{secrets.token_hex(12)}",
                    continues=conversation.continue_final,
                    structured=request.constraint is not None,
                    breaks=bool(prepared.constraints) and prepared.constraints[index].breaks,
                )
                output = machine()
                if prepared.close_after is not None:
                    child.forced = closing(prepared.close_after, self.model.output, decoder, machine)
            child.logprobs = request.logprobs
            if prepared.constraints:
                tracker = None
                if machine is not None and prepared.ways is not None and prepared.ways.undecided:
                    tracker = CallTracker(decoder(), machine())
                child.grammar = prepared.constraints[index].start(
                    prepared.ways, opens_reasoning=prepared.opens_reasoning, tracker=tracker
                )
            child.sink = choice = answer.add(index, child, decoder(), stops, output, user_stops)
            unsent.append(child)
            if request.prompt_logprobs is not None:
                if index % request.n == 0:
                    child.score, scored = request.prompt_logprobs, []
                    scores = ScoredPrompt(scored, len(prompt) - 1)
                scored.append(choice)
                if len(prompt) > 1:
                    child.sink = ScoredChoice(choice, scores)
        try:
            self.engine.submit(*(child for child in unsent if child.max_new_tokens != 0 or child.score is not None))
            for child in unsent:
                if child.max_new_tokens == 0 and child.score is None:
                    child.sink.receive(Delivery(child, [], StopCause.MAX_TOKENS))
        except Exception:
            answer.cancel()
            raise
        return answer

    def check_ready(self) -> None:
        """Raises RequestError (503) once no request is accepted any more."""
        self.engine.check_ready()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Cancels what runs, ends the engine's thread and frees the core's memory."""
        self.engine.close()
        if self._preparing is not None:
            self._preparing.join()
        self.replay.close()
