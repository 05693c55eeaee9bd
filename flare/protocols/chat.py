"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flare.conversation import Conversation, GenerationRequest, Message, Role
from flare.errors import RequestError
from flare.protocols import fields as shared
from flare.protocols.decoding import decode_body, shown
from flare.protocols.encoding import (
    FINISH_REASONS,
    ChunkEncoder,
    context_object,
    error_object,
    timings_object,
    total_usage,
)
from flare.protocols.endpoint import Collected, Decoded, Response, encode_json
from flare.protocols.thinking import decode_thinking
from flare.served import ServedModel


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message. `cache_control` is a hint without an effect."""

    type: str
    text: str | None = None
    cache_control: Any = None
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message as clients send it, and as they send back what this server answered."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class ChatRequest(shared.CommonFields, kw_only=True):
    """The body of a Chat Completions request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    top_logprobs: Any = None
    add_generation_prompt: bool | None = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None


UNBUILT = dict(shared.UNBUILT) | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNBUILT_MESSAGE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_call_id": (),
    "tool_calls": ([],),
    "refusal": (),
}
UNBUILT_PART: dict[str, tuple[Any, ...]] = {"file": (), "image_url": (), "input_audio": (), "refusal": ()}
ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}

DECODER = msgspec.json.Decoder(ChatRequest)


class ChatCompletions:
    """The endpoint, see `GenerationEndpoint`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded:
        request = decode_body(DECODER, body)
        shared.refuse_unbuilt(request, UNBUILT)
        if not model.has_template:
            text = "messages: this core has no chat template; send the rendered text to /v1/completions"
            raise RequestError(text, param="messages")
        limit, limit_field = shared.output_limit(request, least=1)
        conversation = Conversation(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)],
            thinking=decode_thinking(request, [level["id"] for level in model.thinking["levels"]]),
            add_generation_prompt=request.add_generation_prompt is not False,
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
                stop=shared.stop_strings(request),
                stop_token_ids=shared.stop_tokens(request, model.vocabulary),
                ignore_eos=request.ignore_eos or False,
            ),
        )

    def encode(self, response: Response, collected: Collected) -> bytes:
        outcomes = collected.outcomes()
        ends = [outcome.end for outcome in outcomes]
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": outcome.text, "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": FINISH_REASONS[outcome.end.cause],
                "stop_reason": outcome.end.cause,
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
                "usage": total_usage(ends, response.decoded.generation.n, reasoning=0),
                "flare_context": context_object(ends, response.model),
                "timings": timings_object(ends),
            }
        )

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)

    def stream(self, response: Response) -> ChunkEncoder:
        return ChunkEncoder(
            response,
            "chat.completion.chunk",
            text_member=(b'"delta":{"content":', b"}"),
            no_delta={"delta": {}},
            role_delta={"delta": {"role": "assistant", "content": ""}, "logprobs": None},
            reasoning=0,
        )


def _message(message: ChatMessage, path: str) -> Message:
    """Returns the neutral message. Raises RequestError naming the field that cannot be taken."""
    role = ROLES.get(message.role)
    if role is None:
        text = f"{path}.role: {shown(message.role)!r} is not one of {', '.join(ROLES)}"
        raise RequestError(text, param=f"{path}.role")
    shared.refuse_unbuilt(message, UNBUILT_MESSAGE, f"{path}.")
    if message.content is None:
        raise RequestError(f"{path}.content: this field is required", param=f"{path}.content")
    if isinstance(message.content, str):
        content = message.content
    else:
        parts = (_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content))
        content = "\n\n".join(parts)
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return Message(role, content, reasoning if role == "assistant" else None)


def _part(part: ContentPart, path: str) -> str:
    if part.type != "text":
        text = f"{path}.type: {shown(part.type)!r} parts are not supported by this model; only text is"
        raise RequestError(text, param=f"{path}.type", code="unsupported_parameter")
    shared.refuse_unbuilt(part, UNBUILT_PART, f"{path}.")
    if part.text is None:
        raise RequestError(f"{path}.text: this field is required", param=f"{path}.text")
    return part.text
