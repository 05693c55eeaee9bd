"""What a generation endpoint is: it decodes a body, and encodes an answer as one object or as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from flare.conversation import (
    Called,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Logprobed,
    Observed,
    Reasoning,
    Scored,
    Text,
    ToolCall,
)
from flare.errors import RequestError
from flare.logprobs import TokenLogprobs
from flare.output import Piece
from flare.protocols.logprob_encoding import Spelling
from flare.served import ServedModel

encode_json = msgspec.json.Encoder().encode


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded body: the neutral request, and how the client wants the answer; `echo` puts the prompt before it.

    `tokens_as_ids`: where log probabilities name tokens, their ids do. `details` is the endpoint's own: what its encoders show
    of the request.
    """

    generation: GenerationRequest
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    tokens_as_ids: bool = False
    details: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What is the same in all objects of one response.

    `created` is in Unix seconds. `prompts` are the tokens of each prompt and `arrived_at` is when the request came, on the
    monotonic clock: for answers that show them. `echoed` are the texts that are put before the choices of each prompt.
    `spelling` says how it writes tokens.
    """

    id: str
    created: int
    model: ServedModel
    decoded: Decoded
    prompts: Sequence[list[int]]
    arrived_at: float = 0.0
    echoed: Sequence[str] = ()
    spelling: Spelling = field(default_factory=lambda: Spelling(bytes))

    @classmethod
    def begin(
        cls,
        endpoint: GenerationEndpoint,
        model: ServedModel,
        decoded: Decoded,
        prompts: Sequence[list[int]],
        arrived_at: float = 0.0,
        *,
        echoed: Sequence[str] = (),
        token_bytes: Callable[[int], bytes] = bytes,
    ) -> Response:
        return cls(
            id=endpoint.id_prefix + uuid4().hex,
            created=int(time.time()),
            model=model,
            decoded=decoded,
            prompts=prompts,
            arrived_at=arrived_at,
            echoed=echoed,
            spelling=Spelling(token_bytes, as_ids=decoded.tokens_as_ids),
        )

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompts have, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)


class StreamEncoder(Protocol):
    """Events to frames of a stream; called in the order of the events. `ended` turns true with the last one."""

    ended: bool

    def encode(self, event: Event) -> bytes: ...


class GenerationEndpoint(Protocol):
    """One route. `decode` raises RequestError; `encode` gets the events of an answer that did not fail; `error` makes
    the error envelope of the endpoint's protocol."""

    path: str
    id_prefix: str

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded: ...

    def admit(self, prompt_tokens: int, reply_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Raises RequestError when the request, now that its prompts are in tokens, does not fit the protocol's rules.
        `reply_tokens` is how many all its choices together may generate."""

    def encode(self, response: Response, collected: Collected) -> bytes: ...

    def stream(self, response: Response) -> StreamEncoder: ...

    def error(self, error: RequestError) -> dict[str, Any]: ...


class Outcome(NamedTuple):
    """One complete choice. `ids` and `times` (monotonic seconds, one a token) are empty unless they were asked for.

    So are `entries`, the log probabilities of its tokens, with the `offsets` in its own text at which they begin, and
    `scores`, those of its prompt from the second token on. `answers` has, for each block, the entries of its answer text.
    """

    blocks: list[Piece]
    end: Finished
    ids: list[int]
    times: list[float]
    entries: list[TokenLogprobs] = []
    offsets: list[int] = []
    scores: list[TokenLogprobs] = []
    answers: Sequence[list[TokenLogprobs]] = ()

    @property
    def text(self) -> str:
        """The answer text of all blocks."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str | None:
        """The reasoning of all blocks, None without any."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning") or None

    @property
    def calls(self) -> list[ToolCall]:
        return [block.call for block in self.blocks if block.call is not None]


def answering(event: Logprobed) -> list[TokenLogprobs]:
    """Returns the entries of tokens whose text begins in answer text."""
    return [entry for entry, answers in zip(event.entries, event.answers, strict=True) if answers]


class _Gathered:
    """One choice on its way: neighbouring pieces of one kind belong to one block."""

    __slots__ = ("answers", "blocks", "coming", "end", "entries", "ids", "offsets", "scores", "times")

    def __init__(self) -> None:
        self.blocks: list[tuple[Literal["text", "reasoning"], list[str]] | ToolCall] = []
        self.end: Finished | None = None
        self.ids: list[int] = []
        self.times: list[float] = []
        self.entries: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.scores: list[TokenLogprobs] = []
        self.answers: dict[int, list[TokenLogprobs]] = {}  # of answer text, by the number of its block
        self.coming: list[TokenLogprobs] = []  # of the answer text that comes next

    def add_entries(self, event: Logprobed) -> None:
        self.entries += event.entries
        self.offsets += event.offsets
        self.coming += answering(event)

    def add(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if not text:
            return
        last = self.blocks[-1] if self.blocks else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self.blocks.append((kind, [text]))
        if self.coming and kind == "text":
            self.answers.setdefault(len(self.blocks) - 1, []).extend(self.coming)
            self.coming = []

    def outcome(self) -> Outcome:
        assert self.end is not None, "the answer is not complete"
        blocks = [
            Piece(block[0], "".join(block[1])) if isinstance(block, tuple) else Piece("call", call=block)
            for block in self.blocks
        ]
        answers = [self.answers.get(number, []) for number in range(len(blocks))]
        return Outcome(blocks, self.end, self.ids, self.times, self.entries, self.offsets, self.scores, answers)


class Collected:
    """A whole answer, gathered from its events: the blocks of each choice in order, its end, or the failure."""

    def __init__(self, choices: int) -> None:
        self.open = choices
        self.failed: Failed | None = None
        self._choices = [_Gathered() for _ in range(choices)]

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it was the last one."""
        if isinstance(event, Failed):
            self.failed = event
            return True
        choice = self._choices[event.choice]
        if isinstance(event, Text):
            choice.add("text", event.text)
        elif isinstance(event, Reasoning):
            choice.add("reasoning", event.text)
        elif isinstance(event, Called):
            choice.blocks.append(event.call)
        elif isinstance(event, Observed):
            choice.ids += event.ids
            choice.times += [event.at] * len(event.ids)
        elif isinstance(event, Logprobed):
            choice.add_entries(event)
        elif isinstance(event, Scored):
            choice.scores += event.entries
        else:
            choice.add("text", event.text)
            choice.end = event
            self.open -= 1
        return self.open == 0

    def outcomes(self) -> list[Outcome]:
        """Returns every choice, in order; the answer must be complete."""
        return [choice.outcome() for choice in self._choices]
