"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from flare.conversation import GenerationRequest
from flare.errors import RequestError
from flare.protocols.endpoint import Collected, Decoded, Response, encode_json
from flare.protocols.fields import refuse_unbuilt, sampling_request, stop_strings, token_stop_fields, token_stops
from flare.protocols.formats import asked_constraint
from flare.protocols.messages_decoding import decode_conversation
from flare.protocols.messages_encoding import MessageStream, message_error, message_object
from flare.protocols.messages_fields import UNBUILT, UNBUILT_OUTPUT, CountRequest, MessagesRequest, decode_request
from flare.protocols.messages_thinking import asked_budget
from flare.protocols.refusals import no_template
from flare.served import ServedModel

CLIENT_MARGIN = 1000
"""Tokens that clients keep free when they ask again for less than was too much. With no more room than this they would
have nothing left to ask for."""

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


class Messages:
    """The endpoint, see `GenerationEndpoint`."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded:
        request = decode_request(_decoder, body)
        return Decoded(generation=_generation(request, model, request.max_tokens), stream=request.stream or False)

    def admit(self, prompt_tokens: int, reply_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Raises RequestError when prompt and `max_tokens` together are over the context and the client can ask again.

        The words are those that clients of this protocol parse to do so. Where the context is almost full, it bounds the
        answer instead.
        """
        asked, room = decoded.generation.max_tokens, model.context_length - prompt_tokens
        if asked is None or asked <= room or room <= CLIENT_MARGIN:
            return
        text = (
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {asked} > {model.context_length}, "
            "decrease input length or `max_tokens` and try again"
        )
        raise RequestError(text, param="max_tokens")

    def encode(self, response: Response, collected: Collected) -> bytes:
        (outcome,) = collected.outcomes()
        return encode_json(message_object(response, outcome))

    def stream(self, response: Response) -> MessageStream:
        return MessageStream(response)

    def error(self, error: RequestError) -> dict[str, Any]:
        return message_error(error)


class CountTokens:
    """How many tokens the prompt of a Messages request has, whatever concerns its answer."""

    path = "/v1/messages/count_tokens"

    def count(self, body: bytes | bytearray, model: ServedModel) -> GenerationRequest:
        """Returns the request whose prompt is to be counted; it may be longer than the context, since nothing answers it.

        Raises RequestError as for the message itself.
        """
        return _generation(decode_request(_count_decoder, body), model, 0)

    def encode(self, prompt_tokens: int) -> bytes:
        return encode_json({"input_tokens": prompt_tokens})


def _generation(request: CountRequest, model: ServedModel, max_tokens: int) -> GenerationRequest:
    refuse_unbuilt(request, UNBUILT)
    if request.output_config is not None:
        refuse_unbuilt(request.output_config, UNBUILT_OUTPUT, "output_config.")
    if not model.has_template:
        raise no_template("messages")
    stops = stop_strings(request.stop_sequences, "stop_sequences")
    tokens = token_stops(request, model.vocabulary, stops, "stop_sequences")
    conversation = decode_conversation(request, model)
    constraint = asked_constraint(
        request,
        request.output_config and request.output_config.format,
        "output_config.format",
        stop_sequences=request.stop_sequences,
        **token_stop_fields(request),
    )
    if constraint is not None and conversation.continue_final:
        text = f"messages: an assistant's last message cannot be combined with {constraint.field}; end with a user's"
        raise RequestError(text, param="messages")
    return GenerationRequest(
        prompts=[conversation],
        prompt_field="messages",
        sampling=sampling_request(request),
        max_tokens=max_tokens,
        stop=stops,
        stop_token_ids=tokens.ids,
        stop_token_sequences=tokens.sequences,
        ignore_eos=request.ignore_eos or False,
        constraint=constraint,
        budget=asked_budget(request.thinking, request.thinking_token_budget, model),
    )
