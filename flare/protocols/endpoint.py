"""What a generation endpoint is: it decodes a body, and encodes an answer as one object or as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from flare.conversation import (
    Called,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Observed,
    Reasoning,
    Text,
    ToolCall,
)
from flare.errors import RequestError
from flare.output import Piece
from flare.served import ServedModel

encode_json = msgspec.json.Encoder().encode


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded body: the neutral request, and how the client wants the answer; `echo` puts the prompt before it.

    `details` is the endpoint's own: what its encoders show of the request.
    """

    generation: GenerationRequest
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    details: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What is the same in all objects of one response.

    `created` is in Unix seconds. `prompts` are the tokens of each prompt and `arrived_at` is when the request came, on the
    monotonic clock: for answers that show them.
    """

    id: str
    created: int
    model: ServedModel
    decoded: Decoded
    prompts: Sequence[list[int]]
    arrived_at: float = 0.0

    @classmethod
    def begin(
        cls,
        endpoint: GenerationEndpoint,
        model: ServedModel,
        decoded: Decoded,
        prompts: Sequence[list[int]],
        arrived_at: float = 0.0,
    ) -> Response:
        return cls(
            id=endpoint.id_prefix + uuid4().hex,
            created=int(time.time()),
            model=model,
            decoded=decoded,
            prompts=prompts,
            arrived_at=arrived_at,
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

    def admit(self, prompt_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Raises RequestError when the request, now that its prompt is in tokens, does not fit the protocol's rules."""

    def encode(self, response: Response, collected: Collected) -> bytes: ...

    def stream(self, response: Response) -> StreamEncoder: ...

    def error(self, error: RequestError) -> dict[str, Any]: ...


class Outcome(NamedTuple):
    """One complete choice. `ids` and `times` (monotonic seconds, one a token) are empty unless they were asked for."""

    blocks: list[Piece]
    end: Finished
    ids: list[int]
    times: list[float]

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


class _Gathered:
    """One choice on its way: neighbouring pieces of one kind belong to one block."""

    __slots__ = ("blocks", "end", "ids", "times")

    def __init__(self) -> None:
        self.blocks: list[tuple[Literal["text", "reasoning"], list[str]] | ToolCall] = []
        self.end: Finished | None = None
        self.ids: list[int] = []
        self.times: list[float] = []

    def add(self, kind: Literal["text", "reasoning"], text: str) -> None:
        if not text:
            return
        last = self.blocks[-1] if self.blocks else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self.blocks.append((kind, [text]))

    def outcome(self) -> Outcome:
        assert self.end is not None, "the answer is not complete"
        blocks = [
            Piece(block[0], "".join(block[1])) if isinstance(block, tuple) else Piece("call", call=block)
            for block in self.blocks
        ]
        return Outcome(blocks, self.end, self.ids, self.times)


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
        else:
            choice.add("text", event.text)
            choice.end = event
            self.open -= 1
        return self.open == 0

    def outcomes(self) -> list[Outcome]:
        """Returns every choice, in order; the answer must be complete."""
        return [choice.outcome() for choice in self._choices]
