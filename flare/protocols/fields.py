"""The request fields that Chat Completions and Completions share, and what becomes of those without an effect here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from flare.conversation import Constraint, GenerationRequest, SamplingRequest, ThinkingBudget
from flare.errors import RequestError
from flare.protocols.encoding import Observations
from flare.protocols.endpoint import Decoded
from flare.protocols.formats import Format, FormatFields, asked_constraint
from flare.protocols.logprob_fields import Alternatives
from flare.protocols.refusals import unsupported
from flare.served import ServedModel

TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 4096
MAX_TOKEN_STOPS = 16
"""Entries of `stop_token_ids` and `stop_token_sequences` together."""
MAX_STOP_SEQUENCE = 64
"""Tokens of one sequence."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted: chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(FormatFields, kw_only=True):
    """How tokens are drawn, which end a reply, and what bounds it, on every endpoint; None is "not sent"."""

    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Seed | None = None
    stop_token_ids: list[TokenCount] | None = None
    stop_token_sequences: list[list[TokenCount]] | None = None
    ignore_eos: bool | None = None


class CommonFields(SamplingFields, kw_only=True):
    """Fields of both endpoints; None is "not sent". `Any` marks those of UNBUILT and of the thinking controls."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop: str | list[str] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: list[TokenCount] | None = None
    prompt_logprobs: Alternatives | None = None

    reasoning_effort: Any = None
    thinking_level: Any = None
    reasoning: Any = None
    enable_thinking: Any = None
    thinking: Any = None
    chat_template_kwargs: Any = None

    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    cache_salt: Any = None
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    include_stop_str_in_output: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    logits_processors: Any = None
    min_tokens: Any = None
    priority: Any = None
    repetition_detection: Any = None
    request_id: Any = None
    response_format: Format | None = None
    service_tier: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    suffix: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


INERT: Mapping[str, str] = {
    "model": "the loaded model always answers; its own name is returned",
    "user": "not stored",
    "metadata": "not stored",
    "safety_identifier": "not stored",
    "prompt_cache_key": "no cache of prefixes is kept yet",
    "prompt_cache_retention": "no cache of prefixes is kept yet",
    "prompt_cache_options": "no cache of prefixes is kept yet",
}
"""Fields that are checked for their type and then have no effect, with the reason."""

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "priority": (0,),
    "repetition_detection": (),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields without their part of the engine: null and these neutral values pass, anything else is refused by name."""


def refuse_unbuilt(request: msgspec.Struct, table: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raises RequestError for the first field of `table` that asks for something. 1 and true are different values."""
    for name, neutral in table.items():
        value = getattr(request, name)
        if value is None or any(type(value) is type(item) and value == item for item in neutral):
            continue
        raise unsupported(prefix + name)


def sampling_request(fields: SamplingFields) -> SamplingRequest:
    return SamplingRequest(
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        seed=fields.seed,
    )


def output_limit(fields: CommonFields) -> tuple[int | None, str]:
    """Returns the request's token limit and its field's name: `max_tokens` before `max_completion_tokens`."""
    if fields.max_tokens is not None:
        return fields.max_tokens, "max_tokens"
    return fields.max_completion_tokens, "max_completion_tokens"


def stop_strings(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Returns the stop strings of the field `name`. Raises RequestError for too many, too long or empty ones."""
    stops = [stop] if isinstance(stop, str) else stop or ()
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"{name}: {len(stops)} strings, the limit is {MAX_STOP_STRINGS}", param=name)
    if "" in stops:
        raise RequestError(f"{name}: a stop string must not be empty", param=name)
    size = sum(len(stop.encode()) for stop in stops)
    if size > MAX_STOP_BYTES:
        raise RequestError(f"{name}: {size} bytes of UTF-8 in all, the limit is {MAX_STOP_BYTES}", param=name)
    return tuple(stops)


class TokenStops(NamedTuple):
    """The token stops of a request: single tokens, and sequences of at least two."""

    ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]


def token_stops(fields: SamplingFields, vocabulary: int, stops: Sequence[str], name: str = "stop") -> TokenStops:
    """Returns `stop_token_ids` and `stop_token_sequences`; `stops` are the request's stop strings, of the field `name`.

    Raises RequestError for too many, for empty or too long sequences, for ids outside the vocabulary, and beside strings.
    """
    ids, sequences = fields.stop_token_ids or [], fields.stop_token_sequences or []
    field = "stop_token_sequences" if sequences else "stop_token_ids"
    if len(ids) + len(sequences) > MAX_TOKEN_STOPS:
        counted = f"{len(ids)} ids" if not sequences else f"{len(sequences)} sequences"
        beside = f" beside {len(ids)} stop_token_ids" if sequences and ids else ""
        raise RequestError(f"{field}: {counted}{beside}, the limit is {MAX_TOKEN_STOPS} in all", param=field)
    _check_ids(ids, "stop_token_ids", vocabulary)
    for index, sequence in enumerate(sequences):
        where = f"stop_token_sequences[{index}]"
        if not 1 <= len(sequence) <= MAX_STOP_SEQUENCE:
            text = f"{where}: {len(sequence)} ids, a sequence has 1 to {MAX_STOP_SEQUENCE}"
            raise RequestError(text, param=where)
        _check_ids(sequence, where, vocabulary)
    if (ids or sequences) and stops:
        raise RequestError(f"{field}: cannot be combined with {name}; send one of them", param=field)
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    return TokenStops(frozenset([*ids, *single]), tuple(tuple(s) for s in sequences if len(s) > 1))


def _check_ids(ids: Sequence[int], where: str, vocabulary: int) -> None:
    for token in ids:
        if token >= vocabulary:
            text = f"{where}: {token} is outside the vocabulary of {vocabulary} tokens"
            raise RequestError(text, param=where)


def thinking_budget(tokens: int | None, model: ServedModel) -> ThinkingBudget | None:
    """Returns the budget that a request's `thinking_token_budget` asks for, or else the server's."""
    tokens = tokens if tokens is not None else model.thinking_token_budget
    return None if tokens is None else ThinkingBudget(tokens)


def token_stop_fields(fields: SamplingFields) -> dict[str, Any]:
    """What of these fields cannot stand beside an output constraint."""
    return {name: getattr(fields, name) for name in ("stop_token_ids", "stop_token_sequences", "ignore_eos")}


def constraint_of(fields: CommonFields, **others: Any) -> Constraint | None:
    """Returns what a request demands of its answer, see `asked_constraint`."""
    others = {"stop": fields.stop, **token_stop_fields(fields), **others}
    return asked_constraint(fields, fields.response_format, "response_format", **others)


def decoded(
    fields: CommonFields, generation: GenerationRequest, observations: Observations, *, echo: bool = False
) -> Decoded:
    """Returns a decoded request with its stream options; those of a request that does not stream have no effect."""
    options = fields.stream_options or StreamOptions()
    return Decoded(
        generation=generation,
        stream=fields.stream or False,
        include_usage=options.include_usage or False,
        continuous_usage=options.continuous_usage_stats or False,
        echo=echo,
        tokens_as_ids=fields.return_tokens_as_token_ids or False,
        details=observations,
    )
