"""The neutral request and the neutral events: what every endpoint decodes into and encodes from.

A decoder fills `GenerationRequest` with what the client said, and None for what it left to the model. It holds nothing
of the endpoint's JSON. The answer comes back as `Text`, `Reasoning`, `Called`, `Finished` and `Failed`, in order for
each choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from flare.errors import RequestError
from flare.fallbacks import Fallback
from flare.grammar import TextGrammar
from flare.logprobs import LogprobsWanted, TokenLogprobs

Role = Literal["system", "developer", "user", "assistant", "tool"]
Cause = Literal["stop_token", "stop_sequence", "max_tokens", "context_full", "cancelled"]

MAX_TOOL_NAME = 128
"""Characters of a tool's name. Any printable name is taken: the narrower alphabets are those of other servers."""

MAX_ARGUMENTS_BYTES = 8 << 20
"""UTF-8 bytes of one call's arguments, whether a client sends them back or the model writes them."""

MAX_NESTING = 64
"""Arrays and objects inside each other, in a tool's parameters and in a call's arguments."""


def qualified(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def name_fault(name: str) -> str | None:
    """Returns what is wrong with the name of a tool or of a called one, None where nothing is.

    The same holds for tools that are offered, for calls in histories and for calls that a model makes: what goes out can
    come back.
    """
    if not name:
        return "it is empty"
    if len(name) > MAX_TOOL_NAME:
        return f"it has {len(name)} characters, the limit is {MAX_TOOL_NAME}"
    return None if name.isprintable() else "it holds characters that cannot be printed"


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made. `arguments` is the text of a JSON object; of a `custom` tool, its input as is."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    custom: bool = False


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; several text parts are already joined with blank lines.

    `calls` are an assistant's. A message of role tool is the result of the call `call_id`; `name` is the called tool's
    where the client says it.
    """

    role: Role
    text: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function that the client offers; `parameters` is its JSON Schema. A `custom` tool takes one text instead, which
    must be of its `grammar`, if it has one."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    namespace: str | None = None
    custom: bool = False
    grammar: TextGrammar | None = None


class Tools(msgspec.Struct, frozen=True, dict=True):
    """The tools of a request. `choice` "named" goes with the one tool `name`; `parallel` allows several calls."""

    offered: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    namespace: str | None = None
    parallel: bool = True

    @cached_property
    def declared(self) -> Mapping[str, Tool]:
        """The offered tools by the names that the model knows; made once, however many choices read it."""
        return {qualified(tool.namespace, tool.name): tool for tool in self.offered}


class Thinking(msgspec.Struct, frozen=True):
    """What the client asked of the thinking controls, None where it said nothing.

    `level_field` and `switch_field` are the request fields that said so, for error texts. `nearest`: a level that the
    template lacks is mapped to the nearest one that it has, instead of being refused.
    """

    level: str | None = None
    level_field: str = "reasoning_effort"
    switch: bool | None = None
    switch_field: str = "enable_thinking"
    nearest: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True):
    """How many tokens of reasoning a reply may begin with, at least 1, before it has to close it. A `hint` has no effect where
    the model's reasoning cannot be closed; any other is refused there."""

    tokens: int
    hint: bool = False


class Boundary(msgspec.Struct, frozen=True):
    """A place that the client expects to be a prefix of later requests: `characters` into the text of a message."""

    message: int
    characters: int


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the chat template renders. `continue_final`: its last message is to be continued, not answered.
    `variables` are further ones of the template, beside the thinking controls."""

    messages: list[Message]
    thinking: Thinking = Thinking()
    add_generation_prompt: bool = True
    continue_final: bool = False
    tools: Tools = Tools()
    boundaries: tuple[Boundary, ...] = ()
    variables: dict[str, Any] = {}


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


class Constraint(msgspec.Struct, frozen=True):
    """What the answer has to be: any JSON object, JSON of a schema, or a text of a grammar. Reasoning and calls stay free.

    `definition` is the schema as decoded JSON, or the grammar's text; `field` is the client's name for it, for error texts.
    `instruct`: a conversation's system prompt says so too. `enforced` is what `flare.constraints.checked_schema` makes of a
    schema.
    """

    kind: Literal["json_object", "json_schema", "lark", "regex"]
    definition: Any = None
    field: str = "response_format"
    instruct: bool = False
    enforced: Any = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that generation needs to know.

    Choices are numbered prompt by prompt: choice = prompt index * n + index. `max_tokens` counts generated tokens;
    `max_tokens_field` and `prompt_field` are the client's names for them, for error texts. Sequences of stop tokens have at
    least two each. `budget` is of conversations.
    `logprobs` asks for `Logprobed` events, `prompt_logprobs` for `Scored` ones with so many alternatives a token (0 to 20);
    then `max_tokens` may be 0. `observe` asks for `Observed` events.
    """

    prompts: list[Conversation] | list[RawPrompt]
    prompt_field: str
    n: int = 1
    sampling: SamplingRequest = SamplingRequest()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    budget: ThinkingBudget | None = None
    constraint: Constraint | None = None
    logprobs: LogprobsWanted | None = None
    prompt_logprobs: int | None = None
    observe: bool = False


class Observed(msgspec.Struct, frozen=True, gc=False):
    """Token ids that the next events of the choice make visible, and when they came, on the monotonic clock."""

    choice: int
    ids: list[int]
    at: float


class Scored(msgspec.Struct, frozen=True):
    """Log probabilities of the next tokens of the choice's prompt, from its second token on; they come before any of the
    reply."""

    choice: int
    entries: list[TokenLogprobs]


class Logprobed(msgspec.Struct, frozen=True):
    """Log probabilities of tokens that the next events of the choice make visible, or have made so; in order of the tokens.

    A token that ends the choice, and one that was forced, has none. `answers` says of each whether its text begins in
    answer text: not in reasoning, a call or a delimiter. `offsets` says where its text begins, in characters of all text of
    the reply.
    """

    choice: int
    entries: list[TokenLogprobs]
    answers: list[bool]
    offsets: list[int]


class Text(msgspec.Struct, frozen=True, gc=False):
    """`tokens` more tokens of a choice, and the answer text that they made visible (may be empty).

    `cached_tokens` is how many tokens of the choice's prompt came from a cache.
    """

    choice: int
    text: str
    tokens: int
    cached_tokens: int


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """As `Text`, of the model's reasoning."""

    choice: int
    text: str
    tokens: int
    cached_tokens: int


class Called(msgspec.Struct, frozen=True):
    """`tokens` more tokens of a choice, and the call that they completed."""

    choice: int
    call: ToolCall
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
    """The end of a choice. `text` is answer text that was still held back; `completion_tokens` counts all tokens of the
    choice, `reasoning_tokens` those of them that are reasoning.

    `tokens` are those that no event before has reported, `stop` is the stop string that matched, if one did. `called`:
    calls complete the answer, and neither a limit nor the user's stop ended it. `fallbacks` are those that occurred meanwhile.
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
    reasoning_tokens: int = 0
    called: bool = False
    fallbacks: tuple[Fallback, ...] = ()


class Failed(msgspec.Struct, frozen=True):
    """The whole answer failed; no event follows."""

    error: RequestError


Event = Observed | Scored | Logprobed | Text | Reasoning | Called | Finished | Failed
