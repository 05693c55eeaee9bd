"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flare.conversation import Conversation, GenerationRequest
from flare.errors import RequestError
from flare.logprobs import LogprobsWanted
from flare.protocols import fields as shared
from flare.protocols import logprob_fields
from flare.protocols.chat_messages import ChatMessage, decode_message
from flare.protocols.chat_tools import OfferedTool, ToolChoice, decode_tools
from flare.protocols.chunks import ChunkEncoder, ChunkFormat, EntryLists
from flare.protocols.decoding import decode_body
from flare.protocols.encoding import (
    Observations,
    call_object,
    ending_members,
    error_object,
    finish_reason,
    prompt_member,
    total_usage,
)
from flare.protocols.endpoint import Collected, Decoded, Outcome, Response, encode_json
from flare.protocols.logprob_encoding import entry_list
from flare.protocols.refusals import no_template
from flare.protocols.thinking import decode_thinking
from flare.served import ServedModel


class ChatRequest(shared.CommonFields, kw_only=True):
    """The body of a Chat Completions request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: shared.PositiveTokens | None = None
    max_completion_tokens: shared.PositiveTokens | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_timestamps: bool | None = None
    thinking_token_budget: shared.PositiveTokens | None = None
    logprobs: bool | None = None
    top_logprobs: logprob_fields.Alternatives | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    include_reasoning: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None


UNBUILT = {name: neutral for name, neutral in shared.UNBUILT.items() if name != "thinking_token_budget"} | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
CHUNKS = ChunkFormat(
    object="chat.completion.chunk",
    text=b'"delta":{"content":',
    reasoning=b'"delta":{"reasoning_content":',
    call=b'"delta":{"tool_calls":[',
    close=b"}",
    role={"delta": {"role": "assistant", "content": ""}},
    nothing={"delta": {}},
    chat=True,
)

DECODER = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    """The endpoint, see `GenerationEndpoint`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded:
        request = decode_body(DECODER, body)
        shared.refuse_unbuilt(request, UNBUILT)
        if not model.has_template:
            raise no_template("messages")
        limit, limit_field = shared.output_limit(request)
        stops = shared.stop_strings(request.stop)
        token_stops = shared.token_stops(request, model.vocabulary, stops)
        asked = decode_thinking(request, model)
        conversation = Conversation(
            messages=[decode_message(message, f"messages[{i}]", model) for i, message in enumerate(request.messages)],
            thinking=asked.thinking,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=_continues(request, model),
            tools=decode_tools(request.tools, request.tool_choice, request.parallel_tool_calls, model),
            variables=asked.variables,
        )
        prompt_logprobs = logprob_fields.prompt_wanted(request.prompt_logprobs, model, stream=request.stream or False)
        observations = Observations(
            request.return_token_ids or False, request.return_token_timestamps or False, prompt_logprobs
        )
        return shared.decoded(
            request,
            GenerationRequest(
                prompts=[conversation],
                prompt_field="messages",
                n=request.n or 1,
                sampling=shared.sampling_request(request),
                max_tokens=limit,
                max_tokens_field=limit_field,
                stop=stops,
                stop_token_ids=token_stops.ids,
                stop_token_sequences=token_stops.sequences,
                ignore_eos=request.ignore_eos or False,
                constraint=shared.constraint_of(request, continue_final_message=request.continue_final_message),
                budget=shared.thinking_budget(request.thinking_token_budget, model),
                logprobs=_logprobs(request, model),
                prompt_logprobs=prompt_logprobs,
                observe=bool(observations),
            ),
            observations,
        )

    def admit(self, prompt_tokens: int, reply_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Takes any prompt that fits the context, which bounds the answer; log probabilities have limits of their own."""
        logprob_fields.check_size(decoded.generation, prompt_tokens, reply_tokens)  # its choices share one list

    def encode(self, response: Response, collected: Collected) -> bytes:
        outcomes = collected.outcomes()
        ends = [outcome.end for outcome in outcomes]
        shows: Observations = response.decoded.details
        logprobs = response.decoded.generation.logprobs is not None
        choices = [
            {
                "index": index,
                "message": _message(outcome),
                "logprobs": {"content": entry_list(response.spelling, outcome.entries)} if logprobs else None,
                "finish_reason": finish_reason(outcome.end),
                "stop_reason": outcome.end.cause,
                **shows.members(outcome.ids, outcome.times, response.arrived_at),
            }
            for index, outcome in enumerate(outcomes)
        ]
        return encode_json(
            {
                "id": response.id,
                "object": "chat.completion",
                "created": response.created,
                "model": response.model.id,
                "system_fingerprint": response.model.fingerprint,
                "choices": choices,
                **({"prompt_token_ids": response.prompts[0]} if shows.ids else {}),
                **prompt_member(response, outcomes[0]),
                "usage": total_usage(ends, response.decoded.generation.n, chat=True),
                **ending_members(ends, response.model),
            }
        )

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)

    def stream(self, response: Response) -> ChunkEncoder:
        return ChunkEncoder(response, CHUNKS, EntryLists(response))


def _logprobs(request: ChatRequest, model: ServedModel) -> LogprobsWanted | None:
    """Returns what is wanted for each token. Raises RequestError, also for alternatives without log probabilities."""
    if not request.logprobs and request.top_logprobs:
        text = f"top_logprobs: {request.top_logprobs} alternatives of no log probabilities; send logprobs: true with it"
        raise RequestError(text, param="top_logprobs")
    count = (request.top_logprobs or 0) if request.logprobs else None
    field = "top_logprobs" if request.top_logprobs and model.max_top_logprobs else "logprobs"
    return logprob_fields.wanted(count, field, request.logprob_token_ids, model, switch="logprobs: true")


def _continues(request: ChatRequest, model: ServedModel) -> bool:
    """Returns whether the last message is to be continued. Raises RequestError where it cannot be."""
    if not request.continue_final_message:
        return False
    last = request.messages[-1]
    if request.add_generation_prompt:
        text = "cannot be combined with add_generation_prompt; send one of them"
    elif model.continuation is None:
        text = "this model's chat template cannot continue a message; end with a user's message"
    elif last.role != "assistant":
        text = "the last message must be an assistant's"
    elif last.tool_calls:
        text = "a message with tool_calls cannot be continued"
    else:
        return True
    raise RequestError(f"continue_final_message: {text}", param="continue_final_message")


def _message(outcome: Outcome) -> dict[str, Any]:
    """Returns the message of a choice; what it does not have, content aside, is left out."""
    calls = outcome.calls
    text = outcome.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
        "annotations": [],
    }
    if outcome.reasoning is not None:
        message["reasoning_content"] = outcome.reasoning
    if calls:
        message["tool_calls"] = [call_object(call) for call in calls]
    return message
