"""GET /api/tags and POST /api/show: the loaded model for clients that find models the way Ollama lists them.

Discovery alone: generation goes through the other protocols. Nothing is guessed from the model's name; what the core does
not say is an empty label.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from flare.errors import RequestError
from flare.protocols.decoding import decode_body
from flare.protocols.endpoint import encode_json
from flare.protocols.models import known_model
from flare.served import ServedModel

UNKNOWN_TIME = "0001-01-01T00:00:00Z"
"""Ollama's clients want a time; this is the zero of theirs."""


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /api/show. `name` is what older clients call `model`. `verbose` changes nothing."""

    model: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    verbose: bool | None = None


_decoder = msgspec.json.Decoder(ShowRequest)


def tags(model: ServedModel) -> dict[str, Any]:
    """Returns the listing, which has the one model. Its digest changes with whatever else these routes say."""
    details, capabilities, info = _details(), _capabilities(model), _model_info(model)
    identity = [model.id, model.root, model.fingerprint, details, capabilities, info]
    entry = {
        "name": model.id,
        "model": model.id,
        "modified_at": UNKNOWN_TIME,
        "size": 0,
        "digest": hashlib.sha256(encode_json(identity)).hexdigest(),
        "details": details,
    }
    return {"models": [entry]}


def show(body: bytes | bytearray, model: ServedModel) -> dict[str, Any]:
    """Returns the model's metadata. `body` is uncompressed JSON.

    Raises RequestError: 400 for a body without a usable name, 404 for a name that is not the model's.
    """
    request = decode_body(_decoder, body)
    names = {name for name in (request.model, request.name) if isinstance(name, str)}
    if not names or "" in names:
        raise RequestError("model: the name of a model is required; GET /api/tags lists it", param="model")
    if len(names) > 1:
        raise RequestError("name: differs from model; send model alone", param="name")
    known_model(names.pop(), model)
    return {"details": _details(), "model_info": _model_info(model), "capabilities": _capabilities(model)}


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "flare",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(model: ServedModel) -> list[str]:
    tools = ["tools"] if model.takes_tools else []
    thinking = ["thinking"] if model.output.reasoning is not None else []
    return ["completion", *tools, *thinking]


def _model_info(model: ServedModel) -> dict[str, Any]:
    return {
        "general.name": model.id,
        "flare.context_length": model.context_length,
        "flare.vocab_size": model.vocabulary,
    }
