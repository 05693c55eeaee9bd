"""What a generation endpoint is: it decodes a body, and encodes an answer as one object or as a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

import msgspec

from flare.conversation import Event, Failed, Finished, GenerationRequest, Text
from flare.served import ServedModel

encode_json = msgspec.json.Encoder().encode


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded body: the neutral request, and how the client wants the answer; `echo` puts the prompt before it."""

    generation: GenerationRequest
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What is the same in all objects of one response.

    `created` is in Unix seconds, `prompt_tokens` counts each prompt once.
    """

    id: str
    created: int
    model: ServedModel
    decoded: Decoded
    prompt_tokens: int

    @classmethod
    def begin(cls, prefix: str, model: ServedModel, decoded: Decoded, prompt_tokens: int) -> Response:
        id = prefix + uuid4().hex
        return cls(id=id, created=int(time.time()), model=model, decoded=decoded, prompt_tokens=prompt_tokens)


class StreamEncoder(Protocol):
    """Events to frames of a stream; called in the order of the events. `ended` turns true with the last one."""

    ended: bool

    def encode(self, event: Event) -> bytes: ...


class GenerationEndpoint(Protocol):
    """One route. `decode` raises RequestError; `encode` gets the events of an answer that did not fail."""

    path: str
    id_prefix: str

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded: ...

    def encode(self, response: Response, collected: Collected) -> bytes: ...

    def stream(self, response: Response) -> StreamEncoder: ...


@dataclass(slots=True)
class Collected:
    """A whole answer, gathered from its events: text pieces by choice, the end of each choice, or the failure."""

    choices: int
    texts: list[list[str]] = field(init=False)
    ends: list[Finished | None] = field(init=False)
    open: int = field(init=False)
    failed: Failed | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.texts = [[] for _ in range(self.choices)]
        self.ends = [None] * self.choices
        self.open = self.choices

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it was the last one."""
        if type(event) is Text:
            self.texts[event.choice].append(event.text)
            return False
        if type(event) is Finished:
            self.texts[event.choice].append(event.text)
            self.ends[event.choice] = event
            self.open -= 1
            return self.open == 0
        assert isinstance(event, Failed)
        self.failed = event
        return True

    def results(self) -> list[tuple[str, Finished]]:
        """Returns text and end of every choice, in order; the answer must be complete."""
        return [("".join(pieces), end) for pieces, end in zip(self.texts, self.ends, strict=True) if end is not None]
