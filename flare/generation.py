"""One answer on its way: tokens from the engine become text, stops are matched, and neutral events go to a listener.

Everything here runs on the thread that receives the engine's deliveries (the server's event loop, or the terminal's
main thread); only `Engine.submit` and `Engine.cancel` cross threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from flare.conversation import Called, Cause, Event, Failed, Finished, Observed, Reasoning, Text, Timings
from flare.errors import RequestError
from flare.failures import log_failure
from flare.fallbacks import Fallback, Fallbacks
from flare.output import Output, OutputError, Piece

if TYPE_CHECKING:
    from flare.engine import Delivery, Engine

Listener = Callable[[Event], None]

NATURAL = ("stop_token", "stop_sequence")
"""Causes by which an answer is complete; the others cut it."""

NO_TOKEN = -1
"""Stands for the token of text that the decoder held back to the end; the output machine counts no negative token."""

_log = logging.getLogger("flare.generation")


class Decoder(Protocol):
    """Tokens to text, incrementally."""

    def ahead(self, token: int) -> tuple[int, bool]: ...

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Stops(Protocol):
    """Text to the text before a stop string, incrementally."""

    def push(self, text: str) -> tuple[str, str | None]: ...

    def flush(self) -> str: ...


class Choice:
    """One choice of an answer, fed by one engine request.

    `completion_tokens` counts every token up to the one that ended the choice, that one included. `output` is None where
    all text is answer. `user_stops` are stop tokens that the client asked for, the model's own left out.
    """

    __slots__ = (
        "_ids",
        "_unreported",
        "answer",
        "calls",
        "completion_tokens",
        "decoder",
        "ended",
        "index",
        "output",
        "request",
        "stops",
        "user_stops",
    )

    def __init__(
        self,
        answer: Answer,
        index: int,
        request: Any,
        decoder: Decoder,
        stops: Stops | None,
        output: Output | None,
        user_stops: frozenset[int],
    ) -> None:
        self.answer = answer
        self.index = index
        self.request = request
        self.decoder = decoder
        self.stops = stops
        self.output = output
        self.user_stops = user_stops
        self.completion_tokens = 0
        self.calls = 0
        self.ended = False
        self._unreported = 0
        self._ids: list[int] = []

    def receive(self, delivery: Delivery) -> None:
        """Takes what one step brought for this choice's engine request."""
        if self.ended:
            return
        if delivery.error is not None:
            self.answer.fail(RequestError(delivery.error, status=500, type="server_error"))
            return
        try:
            if self.output is None and not self.answer.observe:
                self._receive_text(delivery)
            else:
                self._receive_pieces(delivery)
        except OutputError as error:
            self.answer.fail(RequestError(str(error), status=500, type="server_error", code="invalid_output"))

    def _receive_text(self, delivery: Delivery) -> None:
        """The short way: no output syntax, nothing observed, one event a step."""
        push, stops = self.decoder.push, self.stops
        text, tokens = "", 0
        for token in delivery.tokens:
            tokens += 1
            piece = push(token)
            if stops is not None:
                piece, matched = stops.push(piece)
                if matched is not None:
                    self._unreported = tokens
                    self._stop(text + piece, matched)
                    return
            text += piece
        if delivery.finished is None:
            self.completion_tokens += tokens
            self.answer.listener(Text(self.index, text, tokens, self.request.cached_tokens))
            return
        self._unreported = tokens
        self._take_stop_tokens(delivery)
        piece, matched = self.decoder.flush(), None
        if stops is not None:
            piece, matched = stops.push(piece)
            if matched is None:
                piece += stops.flush()
        self._end(delivery, text + piece, matched)

    def _receive_pieces(self, delivery: Delivery) -> None:
        """The way through the output machine: an event a piece."""
        for token in delivery.tokens:
            self._unreported += 1
            if self.answer.observe:
                self._ids.append(token)
            if self._pass_on(self._pieces(token, self.decoder.push(token))):
                return
        if delivery.finished is None:
            if self._unreported:
                self._emit(Text, "")
            return
        self._take_stop_tokens(delivery)
        if self._pass_on(self._pieces(NO_TOKEN, self.decoder.flush())):
            return
        if self.output is not None:
            natural = delivery.finished.value in NATURAL
            if self._pass_on(self.output.end(natural=natural)):
                return
        self._end(delivery, "" if self.stops is None else self.stops.flush(), None)

    def _pieces(self, token: int, text: str) -> Iterable[Piece]:
        if self.output is not None:
            return self.output.push(token, text)
        return (Piece("text", text),) if text else ()

    def _pass_on(self, pieces: Iterable[Piece]) -> bool:
        """Makes events of pieces; returns whether a stop string ended the choice. Stops act on answer text alone."""
        stops = self.stops
        for piece in pieces:
            if piece.kind == "text":
                text, matched = piece.text, None
                if stops is not None:
                    text, matched = stops.push(text)
                if matched is not None:
                    self._complain()
                    self._stop(text, matched)
                    return True
                if text:
                    self._emit(Text, text)
                continue
            if stops is not None and (held := stops.flush()):
                self._emit(Text, held)
            self._emit_beside(piece)
        return False

    def _complain(self) -> None:
        """Raises OutputError where an answer that a stop string ends is none; what is held back comes after the stop."""
        if self.output is not None:
            for _ in self.output.end(natural=True):
                pass

    def _emit_beside(self, piece: Piece) -> None:
        """Makes the event of a piece that is no answer text."""
        if piece.kind == "reasoning":
            self._emit(Reasoning, piece.text)
        else:
            assert piece.call is not None
            self.calls += 1
            self._emit(Called, piece.call)

    def _emit(self, kind: Any, content: Any) -> None:
        tokens, self._unreported = self._unreported, 0
        self.completion_tokens += tokens
        self._observe()
        self.answer.listener(kind(self.index, content, tokens, self.request.cached_tokens))

    def _observe(self) -> None:
        if self._ids:
            ids, self._ids = self._ids, []
            self.answer.listener(Observed(self.index, ids, monotonic()))

    def _stop(self, text: str, matched: str) -> None:
        self.answer.stop_engine(self)
        self._finish(text, "stop_sequence", matched, by_user=True)

    def _take_stop_tokens(self, delivery: Delivery) -> None:
        """Counts the tokens that ended the reply; they are never shown."""
        self._unreported += len(delivery.stop_tokens)
        if self.answer.observe:
            self._ids += delivery.stop_tokens

    def _end(self, delivery: Delivery, text: str, matched: str | None) -> None:
        assert delivery.finished is not None
        cause: Cause = delivery.finished.value if matched is None else "stop_sequence"
        stop = delivery.stop_tokens  # a sequence is always the user's
        by_user = matched is not None or len(stop) > 1 or not self.user_stops.isdisjoint(stop)
        self._finish(text, cause, matched, by_user=by_user)

    def _finish(self, text: str, cause: Cause, matched: str | None, *, by_user: bool) -> None:
        self._observe()
        tokens, self._unreported = self._unreported, 0
        self.completion_tokens += tokens
        request, first = self.request, self.request.first_token_at
        timings = Timings()
        if first:
            arrived = self.answer.arrived_at
            last = request.finished_at or monotonic()
            timings = Timings(request.queued_seconds, request.prefill_seconds, first - arrived, last - first)
        event = Finished(
            choice=self.index,
            text=text,
            tokens=tokens,
            cause=cause,
            stop=matched,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            completion_tokens=self.completion_tokens,
            timings=timings,
            reasoning_tokens=0 if self.output is None else self.output.reasoning_tokens,
            called=self.calls > 0 and cause in NATURAL and not by_user,
            fallbacks=self.answer.fallbacks_so_far(),
        )
        self.answer.finished(event)
        self.ended = True  # not before: an answer whose listener raised is still there to be failed


class Answer:
    """All choices of one request, and where their events go.

    `arrived_at` is on the monotonic clock. What `fallbacks` records from now on is told with the ends of choices. `observe` and
    `logprobs`: the listener wants `Observed` and `Logprobed` events too.
    After the last choice's `Finished`, after `Failed` and after `cancel` the listener hears nothing more. `close` is called
    instead of a `Failed` that the listener could not take: it ends what the client waits for without a word.
    """

    def __init__(
        self,
        engine: Engine,
        listener: Listener,
        arrived_at: float,
        close: Callable[[], None],
        *,
        observe: bool = False,
        logprobs: bool = False,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        self.engine = engine
        self.listener = listener
        self.arrived_at = arrived_at
        self.close = close
        self.observe = observe
        self.logprobs = logprobs
        self._fallbacks = fallbacks or Fallbacks()
        self._fallbacks_before = self._fallbacks.counts()
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.ended = False

    def add(
        self,
        index: int,
        request: Any,
        decoder: Decoder,
        stops: Stops | None,
        output: Output | None = None,
        user_stops: frozenset[int] = frozenset(),
    ) -> Choice:
        kind = Choice
        if self.logprobs:
            from flare.rated_choice import RatedChoice

            kind = RatedChoice
        choice = kind(self, index, request, decoder, stops, output, user_stops)
        self.choices.append(choice)
        self.open_choices += 1
        return choice

    def fallbacks_so_far(self) -> tuple[Fallback, ...]:
        """Returns what ran on the processor for want of something better since the answer was submitted."""
        return self._fallbacks.since(self._fallbacks_before)

    def finished(self, event: Finished) -> None:
        """Passes on the end of one choice; the answer ends with its last choice."""
        self.listener(event)
        self.open_choices -= 1
        if not self.open_choices:
            self.ended = True

    def fail(self, error: RequestError) -> None:
        """Ends the whole answer with an error and cancels what still runs. Does nothing after the end, never raises."""
        if self.ended:
            return
        self.cancel()
        try:
            self.listener(Failed(error))
        except Exception:
            log_failure(_log, "an answer's failure could not be reported")
            self.close()

    def cancel(self) -> None:
        """Ends the answer without another event: the engine drops its requests. Does nothing after the end."""
        if self.ended:
            return
        self.ended = True
        for choice in self.choices:
            if not choice.ended:
                choice.ended = True
                self.engine.cancel(choice.request.id)

    def stop_engine(self, choice: Choice) -> None:
        """Tells the engine that a stop string ended a choice."""
        from flare.engine import StopCause

        self.engine.cancel(choice.request.id, StopCause.STOP_SEQUENCE)
