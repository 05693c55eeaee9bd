"""Bodies of Messages and what becomes of them, for the tests of their decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.conversation import Conversation
from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.messages_thinking import Marker
from tests.support.live_server import make_model

USER = {"role": "user", "content": "hi"}
MODEL = make_model(output=OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")), continuation="<|im_end|>\n")
EPHEMERAL = {"type": "ephemeral"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [{"name": "a", "description": "d", "input_schema": SCHEMA}, {"name": "b", "type": "custom", "input_schema": {}}]


def decode(model: Any = MODEL, **fields: Any) -> Any:
    return Messages().decode(json.dumps({"max_tokens": 5, "messages": [USER], **fields}).encode(), model).generation


def conversation(*messages: Any, model: Any = MODEL, **fields: Any) -> Conversation:
    (prompt,) = decode(model, messages=list(messages), **fields).prompts
    return prompt


def refusal(model: Any = MODEL, **fields: Any) -> RequestError:
    """The refusal of a message, which is also that of its count; both in one short line that names the field."""
    body = json.dumps({"max_tokens": 5, "messages": [USER], **fields}).encode()
    with pytest.raises(RequestError) as caught:
        Messages().decode(body, model)
    with pytest.raises(RequestError) as counted:
        CountTokens().count(body, model)
    error = caught.value
    assert str(counted.value) == str(error)
    assert error.status == 400 and error.type == "invalid_request_error"
    assert error.param and str(error).startswith(error.param + ": ")
    assert "\n" not in str(error) and len(str(error)) < 300 and "msgspec" not in str(error)
    return error


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **({} if content is None else {"content": content}), **more}


def call(id: str, name: str = "f", input: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input or {}}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def marked(value: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": str(Marker(value))}
