"""The bodies of answers as JSON Schemas: the members that a client can rely on. There may be more, and more may come."""

from __future__ import annotations

from typing import get_args

from flare.conversation import Cause
from flare.protocols.schemas import (
    ANY,
    COUNT,
    MAYBE_TEXT,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    WARNINGS,
    Schema,
    any_of,
    array_of,
    members,
    ref,
    word,
    words,
)

RATE: Schema = {"type": ["number", "null"], "minimum": 0}
CAUSES = words(get_args(Cause))
ENDS = {"finish_reason": words(["stop", "length", "tool_calls"]), "stop_reason": CAUSES}
OBSERVED = {"token_ids": array_of(COUNT), "token_timestamps": array_of(NUMBER)}
BYTES = array_of({"type": "integer", "minimum": 0, "maximum": 255})
LOGPROB: Schema = {"type": "number", "maximum": 0}
RATED: dict[str, Schema] = {"token": TEXT, "logprob": LOGPROB, "bytes": BYTES}
CHAT_LOGPROBS = any_of(members({"content": array_of(ref("TokenLogprobs"))}), NULL)
TEXT_LOGPROBS = any_of(ref("TextLogprobs"), NULL)
PROMPT_LOGPROBS = {"prompt_logprobs": array_of(any_of(ref("PromptToken"), NULL))}
MESSAGE_EVENTS = (
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
)
EXTRAS = {"flare_context": ref("FlareContext"), "timings": ref("Timings")}


def _openai(object_name: str) -> dict[str, Schema]:
    return {
        "id": TEXT,
        "object": word(object_name),
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": TEXT,
    }


def _chunk(object_name: str, choice: dict[str, Schema]) -> Schema:
    """A chunk; the last one of a choice says why it ended, and one without choices has the usage of the answer."""
    end = {name: {"enum": [*schema["enum"], None]} for name, schema in ENDS.items()}
    item = members(
        {"index": COUNT, **choice, "finish_reason": end["finish_reason"]}, {"stop_reason": CAUSES, **OBSERVED}
    )
    usage = any_of(ref("Usage"), NULL)
    return members({**_openai(object_name), "choices": array_of(item)}, {"usage": usage, **EXTRAS, **WARNINGS})


ANSWERS: dict[str, Schema] = {
    "FlareContext": members(
        {"tokens_used": COUNT, "context_length": COUNT, "tokens_remaining": COUNT}, {"at_least": {"const": True}}
    ),
    "Timings": members(
        {
            "queued_ms": NUMBER,
            "prompt_n": COUNT,
            "prompt_ms": NUMBER,
            "prompt_per_second": RATE,
            "first_token_ms": NUMBER,
            "predicted_n": COUNT,
            "predicted_ms": NUMBER,
            "predicted_per_second": RATE,
        }
    ),
    "Warning": members({"type": word("cpu_fallback"), "cause": TEXT, "count": COUNT}),
    "Usage": members(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": members({"cached_tokens": COUNT}),
        },
        {"completion_tokens_details": members({"reasoning_tokens": COUNT})},
    ),
    "TokenLogprobs": members({**RATED, "top_logprobs": array_of(members(RATED))}),
    "TextLogprobs": members(
        {
            "tokens": array_of(TEXT),
            "token_logprobs": array_of(any_of(LOGPROB, NULL)),
            "top_logprobs": array_of(any_of({"type": "object", "additionalProperties": LOGPROB}, NULL)),
            "text_offset": array_of(COUNT),
        }
    ),
    "PromptToken": {
        "type": "object",
        "additionalProperties": members({"logprob": LOGPROB, "rank": COUNT, "decoded_token": TEXT}),
    },
    "ToolCall": members(
        {"id": TEXT, "type": word("function"), "function": members({"name": TEXT, "arguments": TEXT})},
    ),
    "ChatCompletion": members(
        {
            **_openai("chat.completion"),
            "choices": array_of(
                members(
                    {
                        "index": COUNT,
                        "message": members(
                            {"role": word("assistant"), "content": MAYBE_TEXT},
                            {"reasoning_content": MAYBE_TEXT, "tool_calls": array_of(ref("ToolCall"))},
                        ),
                        "logprobs": CHAT_LOGPROBS,
                        **ENDS,
                    },
                    OBSERVED,
                )
            ),
            "usage": ref("Usage"),
            **EXTRAS,
        },
        {"prompt_token_ids": array_of(COUNT), **PROMPT_LOGPROBS, **WARNINGS},
    ),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": OBJECT, "logprobs": CHAT_LOGPROBS}),
    "TextCompletion": members(
        {
            **_openai("text_completion"),
            "choices": array_of(
                members(
                    {"index": COUNT, "text": TEXT, "logprobs": TEXT_LOGPROBS, **ENDS}, {**OBSERVED, **PROMPT_LOGPROBS}
                )
            ),
            "usage": ref("Usage"),
            **EXTRAS,
        },
        WARNINGS,
    ),
    "TextCompletionChunk": _chunk("text_completion", {"text": TEXT, "logprobs": TEXT_LOGPROBS}),
    "Message": members(
        {
            "id": TEXT,
            "type": word("message"),
            "role": word("assistant"),
            "model": TEXT,
            "content": array_of(members({"type": words(["text", "thinking", "tool_use"])})),
            "stop_reason": words(["end_turn", "max_tokens", "stop_sequence", "tool_use"]),
            "stop_sequence": MAYBE_TEXT,
            "usage": members({"input_tokens": COUNT, "output_tokens": COUNT, "cache_read_input_tokens": COUNT}),
            **EXTRAS,
        },
        WARNINGS,
    ),
    "MessageEvent": members({"type": words(MESSAGE_EVENTS)}),
    "InputTokens": members({"input_tokens": COUNT}),
    "Response": members(
        {
            "id": TEXT,
            "object": word("response"),
            "created_at": COUNT,
            "model": TEXT,
            "status": words(["completed", "incomplete"]),
            "incomplete_details": ANY,
            "output": array_of(members({"type": words(["message", "reasoning", "function_call", "custom_tool_call"])})),
            "usage": members({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT}),
            "stop_reason": CAUSES,
            **EXTRAS,
        },
        WARNINGS,
    ),
    "ResponseEvent": members({"type": {"type": "string", "pattern": "^response\\."}, "sequence_number": COUNT}),
    "Decisions": members(
        {
            "model": TEXT,
            "answers": array_of(
                any_of(
                    members({"type": word("predicate"), "name": MAYBE_TEXT, "probability": NUMBER}),
                    members(
                        {
                            "type": word("choice"),
                            "name": MAYBE_TEXT,
                            "choice": {"type": ["string", "boolean"]},
                            "confidence": NUMBER,
                            "probabilities": array_of(
                                members({"value": {"type": ["string", "boolean"]}, "probability": NUMBER})
                            ),
                        }
                    ),
                    members(
                        {
                            "type": word("score"),
                            "name": MAYBE_TEXT,
                            "score": NUMBER,
                            "confidence": NUMBER,
                            "probabilities": array_of(members({"value": COUNT, "label": TEXT, "probability": NUMBER})),
                        }
                    ),
                )
            ),
            "usage": members(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": members({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": members({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            ),
        },
        WARNINGS,
    ),
    "Model": members(
        {
            "id": TEXT,
            "object": word("model"),
            "created": COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "max_model_len": COUNT,
            "context_length": COUNT,
            "thinking": OBJECT,
            "generation_defaults": OBJECT,
            "flare": OBJECT,
        }
    ),
    "ModelList": members({"object": word("list"), "data": array_of(ref("Model"))}),
    "ModelInfo": members(
        {
            "id": TEXT,
            "root": TEXT,
            "names": array_of(TEXT),
            "created": COUNT,
            "version": TEXT,
            "core": TEXT,
            "context_length": COUNT,
            "thinking": OBJECT,
            "generation_defaults": OBJECT,
            "flare": OBJECT,
        }
    ),
    "Status": members(
        {
            "status": words(["ok", "stopping", "failed"]),
            "version": TEXT,
            "uptime_seconds": NUMBER,
            "model": OBJECT,
            "target": members({"kind": words(["cpu", "cuda"]), "device": TEXT}),
            "engine": OBJECT,
            "requests": OBJECT,
            "first_response": OBJECT,
            "admission": OBJECT,
            "bodies": OBJECT,
            "connections": OBJECT,
            "cpu_fallback": members(
                {
                    "allowed": {"type": "boolean"},
                    "total": COUNT,
                    "events": array_of(members({"cause": TEXT, "count": COUNT})),
                }
            ),
        }
    ),
    "Health": members({"status": word("ok")}),
    "Metrics": {"type": "object"},
    "Description": members({"openapi": TEXT, "info": OBJECT, "paths": OBJECT}),
    "OllamaTags": members(
        {"models": array_of(members({"name": TEXT, "model": TEXT, "digest": TEXT, "details": OBJECT}))}
    ),
    "OllamaModel": members({"details": OBJECT, "model_info": OBJECT, "capabilities": array_of(TEXT)}),
    "Error": members(
        {
            "error": members(
                {"type": TEXT, "message": TEXT, "param": MAYBE_TEXT, "code": MAYBE_TEXT},
                {"flare_context": ref("FlareContext"), "levels": array_of(TEXT)},
            )
        }
    ),
    "MessagesError": members({"type": word("error"), "error": members({"type": TEXT, "message": TEXT})}),
    "OllamaError": members({"error": TEXT}),
}
"""Schemas by their names in the document."""
