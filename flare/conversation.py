"""The neutral request and the neutral events: what every endpoint decodes into and encodes from.

A decoder fills `GenerationRequest` with what the client said, and None for what it left to the model. It holds nothing
of the endpoint's JSON. The answer comes back as `Text`, `Finished` and `Failed`, in order for each choice.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from flare.errors import RequestError

Role = Literal["system", "developer", "user", "assistant"]
Cause = Literal["stop_token", "stop_sequence", "max_tokens", "context_full", "cancelled"]


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; several text parts are already joined with blank lines."""

    role: Role
    text: str
    reasoning: str | None = None


class Thinking(msgspec.Struct, frozen=True):
    """What the client asked of the thinking controls, None where it said nothing.

    `level_field` and `switch_field` are the request fields that said so, for error texts.
    """

    level: str | None = None
    level_field: str = "reasoning_effort"
    switch: bool | None = None
    switch_field: str = "enable_thinking"


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the chat template renders."""

    messages: list[Message]
    thinking: Thinking = Thinking()
    add_generation_prompt: bool = True


class RawPrompt(msgspec.Struct, frozen=True):
    """A prompt given as text or as token ids; no template is applied."""

    content: str | list[int]


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields as sent; None is left to the model's defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that generation needs to know.

    Choices are numbered prompt by prompt: choice = prompt index * n + index. `max_tokens` counts generated tokens;
    `max_tokens_field` and `prompt_field` are the client's names for them, for error texts.
    """

    prompts: list[Conversation] | list[RawPrompt]
    prompt_field: str
    n: int = 1
    sampling: SamplingRequest = SamplingRequest()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class Text(msgspec.Struct, frozen=True, gc=False):
    """`tokens` more tokens of a choice, and the text that they made visible (may be empty).

    `cached_tokens` is how many tokens of the choice's prompt came from a cache.
    """

    choice: int
    text: str
    tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Seconds of one choice.

    `queued`: from submission to a slot. `prompt`: from the slot to the first token. `first_token`: from the request's
    arrival to the first token. `predicted`: from the first token to the end.
    """

    queued: float = 0.0
    prompt: float = 0.0
    first_token: float = 0.0
    predicted: float = 0.0


class Finished(msgspec.Struct, frozen=True):
    """The end of a choice. `text` is what was still held back; `completion_tokens` counts all of the choice's tokens.

    `tokens` are those not yet reported by a `Text` event, `stop` is the stop string that matched, if one did.
    """

    choice: int
    text: str
    tokens: int
    cause: Cause
    stop: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings


class Failed(msgspec.Struct, frozen=True):
    """The whole answer failed; no event follows."""

    error: RequestError


Event = Text | Finished | Failed
