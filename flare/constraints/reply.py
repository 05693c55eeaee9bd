"""The mask of one reply under an output constraint: which tokens may come next."""

from __future__ import annotations

from ctypes import Array, c_uint8, memmove
from typing import TYPE_CHECKING, Literal, Protocol

from flare.constraints.vocabulary import Vocabulary
from flare.errors import MaskError
from flare.output import Output, OutputError, Way, Ways

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BREAKS = 8
"""Line breaks between reasoning and what follows it, where the answer does not begin with some itself."""


_TOO_COMPLEX = ("Current row has", "Too many items", "too many states", "too many expressions", "fuel")
"""What llguidance's errors hold where one of its limits was met."""


class Decoder(Protocol):
    """Tokens to text, incrementally."""

    def push(self, token: int) -> str: ...


class CallTracker:
    """Reads a reply's tokens as the client's answer is read; `decoder` and `output` are new ones."""

    __slots__ = ("_decoder", "_output")

    def __init__(self, decoder: Decoder, output: Output | None) -> None:
        self._decoder = decoder
        self._output = output

    def calling(self, token: int) -> Literal["no", "undecided", "yes"]:
        """Takes a token; returns whether a call has begun. Raises OutputError."""
        if self._output is None:
            return "no"
        for _ in self._output.push(token, self._decoder.push(token)):
            pass
        return self._output.calling


class ReplyMask:
    """See `flare.engine.TokenMask`. Belongs to one thread at a time.

    reasoning: everything may come but what ends the reply, until the token, or else the text, that closes reasoning.
    lead: the answer's first tokens, or the text of a way to somewhere else, see `Ways`. opening: a call's opener has come
    whose call is not certain. answer: the grammar, and behind its end only what ends the reply. free: a call has begun, and
    its own format rules to the end.
    """

    __slots__ = (
        "_alive",
        "_breaks",
        "_close",
        "_gap",
        "_matcher",
        "_phase",
        "_tail",
        "_tracker",
        "_vocabulary",
        "_ways",
        "_waiting",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        ways: Ways | None,
        *,
        opens_reasoning: bool,
        tracker: CallTracker | None,
        gap: int,
    ) -> None:
        """`ways` is None where the grammar holds from the first token on, as for raw prompts. `tracker` reads formats of
        calls whose openers may turn out to be text; without one every opener begins a call. `gap`: so many line breaks may
        stand between reasoning and what follows it."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ways = ways or Ways()
        self._tracker = tracker
        self._gap = gap
        self._phase: Literal["reasoning", "lead", "opening", "answer", "free"] = "answer"
        self._waiting: list[tuple[bytes, Way]] = []  # what is missing of the texts of ways
        self._alive = True  # the grammar may have begun
        self._breaks = 0  # line breaks that may still come
        self._tail = b""  # of the reasoning, as far as its closing text may have begun in it
        self._close = (self._ways.close or "").encode()
        if ways is None:
            return
        if opens_reasoning and ways.close is not None:
            self._reason()
        else:
            self._lead(ways.first, ways.direct_first, 0)

    def fill(self, address: int, words: int) -> bool:
        """Writes the mask. Raises MaskError where the grammar takes too much to go on with."""
        if self._phase == "answer":
            self._fill_answer(address, words)
        elif self._phase == "lead":
            self._fill_lead(address, words)
        elif self._phase == "free":
            return False
        else:
            memmove(address, self._vocabulary.unstopped, 4 * words)
            if self._phase == "reasoning":
                self._forbid(address)
        return True

    def accept(self, token: int) -> None:
        """Takes the token that came. Raises MaskError for one that may not come."""
        match self._phase:
            case "answer":
                self._accept_answer(token)
            case "lead":
                self._accept_lead(token)
            case "reasoning":
                self._accept_reasoning(token)
            case "opening":
                self._track(token)

    # Reasoning

    def _reason(self) -> None:
        self._phase, self._tail = "reasoning", b""

    def _forbid(self, address: int) -> None:
        """Takes from the mask what would end reasoning and go on in the same token, or leave its frame."""
        bits = _bits(address, self._vocabulary.words)
        if self._ways.framed:
            for token in self._vocabulary.markers:
                if self._vocabulary.text(token) != self._close:
                    bits[token >> 3] &= ~(1 << (token & 7))
            return
        if self._ways.close_token is not None or not self._close:
            return
        for length in range(len(self._close)):
            if self._tail.endswith(self._close[:length]):
                for token in self._vocabulary.beyond(self._close[length:]):
                    if self._vocabulary.text(token)[len(self._close) - length :].strip(b"\n"):
                        bits[token >> 3] &= ~(1 << (token & 7))

    def _accept_reasoning(self, token: int) -> None:
        if token in self._vocabulary.stops:
            raise _forbidden()
        if self._track(token):
            return
        if self._ways.close_token is not None:
            ended = token == self._ways.close_token
        elif self._ways.framed:
            ended = self._vocabulary.text(token) == self._close and token in self._vocabulary.markers
        else:
            # A delimiter that is a special token has no text of its own.
            text = self._vocabulary.text(token) or (
                self._close if token == self._vocabulary.token(self._close) else b""
            )
            data = self._tail + text
            ended = self._close in data
            self._tail = data[max(0, len(data) - len(self._close) + 1) :]
            if ended and data[data.index(self._close) + len(self._close) :].strip(b"\n"):
                raise _forbidden()
        if ended:
            self._lead(self._ways.behind, self._ways.direct_behind, 0 if self._ways.framed else self._gap)

    def _track(self, token: int) -> bool:
        """Sees whether a call has begun, so that its own format rules. Raises MaskError where an opener led to none."""
        if self._tracker is None:
            if self._phase == "opening":
                self._phase = "free"
            return self._phase == "free"
        try:
            calling = self._tracker.calling(token)
        except OutputError:
            calling = "yes"  # where the answer is read it fails as well, and says why
        if calling == "yes":
            self._phase = "free"
        elif calling == "no" and self._phase == "opening":
            text = "the model began a tool call and went on with something else, under an output constraint"
            raise MaskError(text)
        return calling != "no"

    # What may lead on from the beginning, or from the end of reasoning

    def _lead(self, ways: tuple[Way, ...], direct: bool, breaks: int) -> None:
        self._phase, self._alive, self._breaks = "lead", direct, breaks
        self._waiting = [(way.text.encode(), way) for way in ways]
        if direct and not self._waiting and not breaks:
            self._phase = "answer"

    def _fill_lead(self, address: int, words: int) -> None:
        if self._alive:
            self._fill_answer(address, words)
        else:
            memmove(address, bytes(4 * words), 4 * words)
        bits = _bits(address, words)
        vocabulary = self._vocabulary
        for missing, way in self._waiting:
            if way.token is not None:
                tokens = [way.token]
            else:
                tokens = list(vocabulary.leading(missing))
                if way.to != "answer":
                    tokens += vocabulary.beyond(missing)
            for token in tokens:
                bits[token >> 3] |= 1 << (token & 7)
        if self._breaks:
            for token in vocabulary.breaks:
                bits[token >> 3] |= 1 << (token & 7)

    def _accept_lead(self, token: int) -> None:
        text = self._vocabulary.text(token)
        waiting: list[tuple[bytes, Way]] = []
        reached: Way | None = None
        for missing, way in self._waiting:
            if way.token is not None:
                reached = way if token == way.token else reached
            elif text and missing.startswith(text):
                if text == missing:
                    reached = way
                else:
                    waiting.append((missing[len(text) :], way))
            elif text.startswith(missing) and way.to != "answer":
                reached = way
        calling = self._tracker is not None and self._tracker.calling(token)
        if reached is not None:
            self._reach(reached, calling)
            return
        if self._alive and self._matcher.validate_tokens([token]):
            self._accept_answer(token)
            self._waiting, self._breaks = waiting, 0
            if not waiting:
                self._phase = "answer"
        elif waiting:
            self._alive, self._waiting, self._breaks = False, waiting, 0
        elif self._breaks and text and not text.strip(b"\n"):
            self._breaks = max(0, self._breaks - len(text))
        else:
            raise _forbidden()

    def _reach(self, way: Way, calling: object) -> None:
        self._waiting, self._breaks = [], 0
        if way.to == "reasoning":
            self._reason()
        elif way.to == "answer":
            self._phase, self._alive = "answer", True
        else:
            self._phase = "free" if self._tracker is None or calling == "yes" else "opening"

    # The answer

    def _fill_answer(self, address: int, words: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, 4 * words)
        if self._matcher.is_error():
            raise self._failed()

    def _accept_answer(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise self._failed()

    def _failed(self) -> MaskError:
        """Returns what the matcher failed at, in our words."""
        error = self._matcher.get_error()
        if any(words in error for words in _TOO_COMPLEX):
            return MaskError("the output constraint became too complex while the model wrote; simplify it")
        return _forbidden()


def _forbidden() -> MaskError:
    return MaskError("no token of this model leads on under the output constraint")


def _bits(address: int, words: int) -> Array[c_uint8]:
    return (c_uint8 * (4 * words)).from_address(address)
