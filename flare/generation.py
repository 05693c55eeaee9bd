"""One answer on its way: tokens from the engine become text, stops are matched, and neutral events go to a listener.

Everything here runs on the thread that receives the engine's deliveries (the server's event loop, or the terminal's
main thread); only `Engine.submit` and `Engine.cancel` cross threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from flare.conversation import Cause, Event, Failed, Finished, Text, Timings
from flare.errors import RequestError

if TYPE_CHECKING:
    from flare.engine import Delivery, Engine

Listener = Callable[[Event], None]

_log = logging.getLogger("flare.generation")


class Decoder(Protocol):
    """Tokens to text, incrementally."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Stops(Protocol):
    """Text to the text before a stop string, incrementally."""

    def push(self, text: str) -> tuple[str, str | None]: ...

    def flush(self) -> str: ...


class Choice:
    """One choice of an answer, fed by one engine request.

    `completion_tokens` counts every token up to the one that ended the choice, that one included.
    """

    __slots__ = ("answer", "completion_tokens", "decoder", "ended", "index", "request", "stops")

    def __init__(self, answer: Answer, index: int, request: Any, decoder: Decoder, stops: Stops | None) -> None:
        self.answer = answer
        self.index = index
        self.request = request
        self.decoder = decoder
        self.stops = stops
        self.completion_tokens = 0
        self.ended = False

    def receive(self, delivery: Delivery) -> None:
        """Takes what one step brought for this choice's engine request."""
        if self.ended:
            return
        if delivery.error is not None:
            self.answer.fail(RequestError(delivery.error, status=500, type="server_error"))
            return
        push, stops = self.decoder.push, self.stops
        text, tokens = "", 0
        for token in delivery.tokens:
            tokens += 1
            piece = push(token)
            if stops is not None:
                piece, matched = stops.push(piece)
                if matched is not None:
                    self.answer.stop_engine(self)
                    self._finish(text + piece, tokens, "stop_sequence", matched)
                    return
            text += piece
        if delivery.finished is None:
            self.completion_tokens += tokens
            self.answer.listener(Text(self.index, text, tokens, self.request.cached_tokens))
            return
        if delivery.stop_token is not None:
            tokens += 1  # counted, never shown
        piece, matched = self.decoder.flush(), None
        if stops is not None:
            piece, matched = stops.push(piece)
            if matched is None:
                piece += stops.flush()
        cause: Cause = delivery.finished.value if matched is None else "stop_sequence"
        self._finish(text + piece, tokens, cause, matched)

    def _finish(self, text: str, tokens: int, cause: Cause, matched: str | None) -> None:
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
        )
        self.answer.finished(event)
        self.ended = True  # not before: an answer whose listener raised is still there to be failed


class Answer:
    """All choices of one request, and where their events go.

    `arrived_at` is on the monotonic clock. After the last choice's `Finished`, after `Failed` and after `cancel` the
    listener hears nothing more. `close` is called instead of a `Failed` that the listener could not take: it ends what
    the client waits for without a word.
    """

    def __init__(self, engine: Engine, listener: Listener, arrived_at: float, close: Callable[[], None]) -> None:
        self.engine = engine
        self.listener = listener
        self.arrived_at = arrived_at
        self.close = close
        self.choices: list[Choice] = []
        self.open_choices = 0
        self.ended = False

    def add(self, index: int, request: Any, decoder: Decoder, stops: Stops | None) -> Choice:
        choice = Choice(self, index, request, decoder, stops)
        self.choices.append(choice)
        self.open_choices += 1
        return choice

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
            _log.exception("an answer's failure could not be reported")
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
