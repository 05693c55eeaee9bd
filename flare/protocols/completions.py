"""POST /v1/completions: raw prompts, text or token ids, one or several."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flare.conversation import GenerationRequest, RawPrompt
from flare.errors import RequestError
from flare.protocols import fields as shared
from flare.protocols import logprob_fields
from flare.protocols.chunks import ChunkEncoder, ChunkFormat, ColumnLists, columns_of
from flare.protocols.decoding import decode_body
from flare.protocols.encoding import (
    Observations,
    ending_members,
    error_object,
    finish_reason,
    prompt_member,
    total_usage,
)
from flare.protocols.endpoint import Collected, Decoded, Outcome, Response, encode_json
from flare.protocols.logprob_encoding import Columns
from flare.protocols.thinking import decode_thinking
from flare.served import ServedModel


class CompletionRequest(shared.CommonFields, kw_only=True):
    """The body of a Completions request. The thinking fields are checked, but raw text has no template to take them."""

    prompt: str | list[str | int | list[int]]
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: logprob_fields.Alternatives | None = None
    parallel_tool_calls: Any = None
    prompt_embeds: Any = None
    return_token_timestamps: Any = None
    tool_choice: Any = None
    tools: Any = None


UNBUILT = {name: neutral for name, neutral in shared.UNBUILT.items() if name not in ("best_of", "echo")} | {
    "add_special_tokens": (True,),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "return_token_timestamps": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
CHUNKS = ChunkFormat(object="text_completion", text=b'"text":', close=b"", nothing={"text": ""}, chat=False)

DECODER = msgspec.json.Decoder(CompletionRequest)


class Completions:
    """The endpoint, see `GenerationEndpoint`."""

    path = "/v1/completions"
    id_prefix = "cmpl-"

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded:
        request = decode_body(DECODER, body)
        shared.refuse_unbuilt(request, UNBUILT)
        n = request.n or 1
        if request.best_of not in (None, n):
            raise RequestError(f"best_of: {request.best_of} must equal n, {n}; choices are not ranked", param="best_of")
        decode_thinking(request, model)
        limit, limit_field = shared.output_limit(request)
        stops = shared.stop_strings(request.stop)
        token_stops = shared.token_stops(request, model.vocabulary, stops)
        logprobs = logprob_fields.wanted(
            request.logprobs, "logprobs", request.logprob_token_ids, model, switch="logprobs"
        )
        scored = logprob_fields.prompt_wanted(request.prompt_logprobs, model, stream=request.stream or False)
        echoed = request.logprobs if request.echo else None
        if echoed is not None:
            logprob_fields.check_prompt(echoed, "echo", model)
        shown = echoed if scored is None else scored
        return shared.decoded(
            request,
            GenerationRequest(
                prompts=[RawPrompt(content) for content in _prompts(request.prompt, model)],
                prompt_field="prompt",
                n=n,
                sampling=shared.sampling_request(request),
                max_tokens=limit,
                max_tokens_field=limit_field,
                stop=stops,
                stop_token_ids=token_stops.ids,
                stop_token_sequences=token_stops.sequences,
                ignore_eos=request.ignore_eos or False,
                logprobs=logprobs,
                prompt_logprobs=None if shown is None else max(shown, echoed or 0),
                constraint=shared.constraint_of(request),
                observe=request.return_token_ids or False,
            ),
            Observations(ids=request.return_token_ids or False, prompt_logprobs=shown),
            echo=request.echo or False,
        )

    def admit(self, prompt_tokens: int, reply_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Takes any prompt that fits the context, which bounds the answer; log probabilities have limits of their own."""
        generation = decoded.generation
        field = "prompt_logprobs" if generation.logprobs is None or not decoded.echo else "echo"
        logprob_fields.check_size(generation, prompt_tokens * generation.n, reply_tokens, field)

    def encode(self, response: Response, collected: Collected) -> bytes:
        outcomes = collected.outcomes()
        ends = [outcome.end for outcome in outcomes]
        shows: Observations = response.decoded.details
        logprobs = response.decoded.generation.logprobs is not None
        n = response.decoded.generation.n
        choices = [
            {
                "index": index,
                "text": outcome.text,
                "logprobs": _columns(response, index, outcome).take() if logprobs else None,
                "finish_reason": finish_reason(outcome.end),
                "stop_reason": outcome.end.cause,
                **({"prompt_token_ids": response.prompts[index // n]} if shows.ids else {}),
                **shows.members(outcome.ids, outcome.times, response.arrived_at),
                **prompt_member(response, outcome),
            }
            for index, outcome in enumerate(outcomes)
        ]
        return encode_json(
            {
                "id": response.id,
                "object": "text_completion",
                "created": response.created,
                "model": response.model.id,
                "system_fingerprint": response.model.fingerprint,
                "choices": choices,
                "usage": total_usage(ends, n, chat=False),
                **ending_members(ends, response.model),
            }
        )

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)

    def stream(self, response: Response) -> ChunkEncoder:
        return ChunkEncoder(response, CHUNKS, ColumnLists(response))


def _columns(response: Response, index: int, outcome: Outcome) -> Columns:
    """Returns the log probabilities of a complete choice."""
    columns = columns_of(response, index)
    columns.add_prompt(outcome.scores if response.decoded.echo else ())
    columns.add(outcome.entries, outcome.offsets)
    return columns


def _prompts(prompt: str | list[Any], model: ServedModel) -> list[str | list[int]]:
    """Returns the prompts one by one. Raises RequestError for empty, mixed or out-of-vocabulary ones."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: an empty list; send text or token ids", param="prompt")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise RequestError(f"prompt[{index}]: one list holds one kind of prompt", param=f"prompt[{index}]")
    if kind is int:
        _check_tokens(prompt, "prompt", model)
        return [prompt]
    if kind is list:
        for index, tokens in enumerate(prompt):
            if not tokens:
                raise RequestError(f"prompt[{index}]: an empty list of token ids", param=f"prompt[{index}]")
            _check_tokens(tokens, f"prompt[{index}]", model)
    return list(prompt)


def _check_tokens(tokens: list[int], path: str, model: ServedModel) -> None:
    if 0 <= min(tokens) and max(tokens) < model.vocabulary:
        return
    index, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < model.vocabulary)
    seen = token if abs(token) < 2**64 else "a huge number"
    text = f"{path}[{index}]: {seen} is outside the vocabulary of {model.vocabulary} tokens"
    raise RequestError(text, param=f"{path}[{index}]")
