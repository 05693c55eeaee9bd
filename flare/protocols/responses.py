"""POST /v1/responses: the whole conversation in, ordered output items out; nothing is kept between requests."""

from __future__ import annotations

from typing import Any

from flare.conversation import GenerationRequest
from flare.errors import RequestError
from flare.protocols import logprob_fields
from flare.protocols.decoding import decode_body
from flare.protocols.encoding import error_object
from flare.protocols.endpoint import Collected, Decoded, Response, encode_json
from flare.protocols.fields import (
    refuse_unbuilt,
    sampling_request,
    stop_strings,
    thinking_budget,
    token_stop_fields,
    token_stops,
)
from flare.protocols.formats import asked_constraint
from flare.protocols.refusals import no_template
from flare.protocols.responses_decoding import (
    DECODER,
    check_metadata,
    check_reasoning,
    check_text,
    decode_conversation,
    logprobs_wanted,
)
from flare.protocols.responses_encoding import finished_object, output_items, request_members
from flare.protocols.responses_fields import UNBUILT
from flare.protocols.responses_stream import ResponseStream
from flare.served import ServedModel


class Responses:
    """The endpoint, see `GenerationEndpoint`."""

    path = "/v1/responses"
    id_prefix = "resp_"

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Decoded:
        request = decode_body(DECODER, body)
        refuse_unbuilt(request, UNBUILT)
        check_reasoning(request)
        check_text(request)
        check_metadata(request.metadata)
        if not model.has_template:
            raise no_template("input")
        stops = stop_strings(request.stop)
        tokens = token_stops(request, model.vocabulary, stops)
        generation = GenerationRequest(
            prompts=[decode_conversation(request, model)],
            prompt_field="input",
            sampling=sampling_request(request),
            max_tokens=request.max_output_tokens,
            max_tokens_field="max_output_tokens",
            stop=stops,
            stop_token_ids=tokens.ids,
            stop_token_sequences=tokens.sequences,
            ignore_eos=request.ignore_eos or False,
            constraint=asked_constraint(
                request,
                request.text and request.text.format,
                "text.format",
                stop=request.stop,
                **token_stop_fields(request),
            ),
            budget=thinking_budget(request.thinking_token_budget, model),
            logprobs=logprobs_wanted(request, model),
        )
        members = request_members(request, model.resolve_sampling(generation.sampling))
        as_ids = request.return_tokens_as_token_ids or False
        return Decoded(generation=generation, stream=request.stream or False, tokens_as_ids=as_ids, details=members)

    def admit(self, prompt_tokens: int, reply_tokens: int, decoded: Decoded, model: ServedModel) -> None:
        """Takes any prompt that fits the context, which bounds the answer; log probabilities have a limit of their own."""
        logprob_fields.check_size(decoded.generation, 0, reply_tokens)

    def encode(self, response: Response, collected: Collected) -> bytes:
        (outcome,) = collected.outcomes()
        return encode_json(finished_object(response, output_items(response, outcome), outcome.end))

    def stream(self, response: Response) -> ResponseStream:
        return ResponseStream(response)

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)
