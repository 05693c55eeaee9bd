"""GET /v1/models and /v1/models/{model}: the card of the loaded model. GET /v1/flare/model_info: what is ours of it."""

from __future__ import annotations

from typing import Any

from flare import __version__
from flare.core.sampling import NEUTRAL, VALID
from flare.errors import RequestError
from flare.protocols.refusals import shown
from flare.served import ServedModel

LIMIT_DEFAULTS = ("max_new_tokens", "max_length")
DEFAULT_SOURCE = "flare_default"


def model_card(model: ServedModel) -> dict[str, Any]:
    """Returns the model's card: the fields that vLLM's clients read, and what this server knows beyond them. It is the
    same until the server restarts."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "local",
        "root": model.root,
        "parent": None,
        "max_model_len": model.context_length,
        "context_length": model.context_length,
        "permission": [
            {
                "id": f"modelperm-{model.fingerprint}",
                "object": "model_permission",
                "created": model.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": model.max_top_logprobs > 0,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
        **_embedded(model),
    }


def model_info(model: ServedModel) -> dict[str, Any]:
    """Returns what cards embed, with the names that select the model and what runs it."""
    return {
        "id": model.id,
        "root": model.root,
        "names": list(dict.fromkeys(model.names)),
        "created": model.created,
        "version": __version__,
        "core": model.fingerprint,
        "context_length": model.context_length,
        **_embedded(model),
    }


def _embedded(model: ServedModel) -> dict[str, Any]:
    """The parts of a card that are not OpenAI's or vLLM's."""
    defaults = {name: model.sampling_default(name) for name in NEUTRAL} | {"seed": model.defaults.get("seed")}
    limits = {name: model.defaults.get(name) for name in LIMIT_DEFAULTS}
    sources = {name: model.sources.get(name, DEFAULT_SOURCE) for name in (*NEUTRAL, *LIMIT_DEFAULTS)}
    return {
        "thinking": dict(model.thinking),
        "generation_defaults": {**defaults, **limits, "sources": sources},
        "flare": {
            "target": model.target,
            "device": model.device,
            "vocab_size": model.vocabulary,
            "max_top_logprobs": model.max_top_logprobs,
            "max_concurrency": model.max_concurrency,
            "prefill_chunk_size": model.prefill_chunk,
            "default_max_tokens": _default_max_tokens(model),
            "max_tokens_cap": model.max_tokens_cap,
            "sampling_defaults": defaults,
            "sampling_ranges": {name: _range(model, name) for name in NEUTRAL},
            "sampling_policy": "open" if model.ranges is None else "author",
            "thinking_token_budget": model.thinking_token_budget,
            "max_images_per_prompt": 0,
            "max_image_tokens_per_prompt": 0,
            "image_feature_window_tokens": 0,
            "max_image_tokens_per_image": 0,
            "max_image_pixels": 0,
            "max_image_bytes": 0,
            "input_modalities": ["text"],
            "output_modalities": ["text"],
        },
    }


def _default_max_tokens(model: ServedModel) -> int:
    """The budget of an empty prompt: a longer one has less of the context, and of `max_length`."""
    bounds = [model.context_length, model.defaults.get("max_length")]
    cap = model.max_tokens_cap
    bounds.append(cap if cap is not None else model.defaults.get("max_new_tokens"))
    return min(bound for bound in bounds if bound is not None)


def _range(model: ServedModel, name: str) -> dict[str, float] | None:
    """Returns a parameter's inclusive bounds, null where it is fixed."""
    bounds = VALID[name] if model.ranges is None else model.ranges.get(name)
    return None if bounds is None else {"min": bounds[0], "max": bounds[1]}


def model_list(model: ServedModel) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(model)]}


def find_model(name: str, model: ServedModel) -> dict[str, Any]:
    """Returns the card for the model's name or an alias. Raises RequestError (404) for another name."""
    known_model(name, model)
    return model_card(model)


def known_model(name: str, model: ServedModel) -> None:
    """Raises RequestError (404) for a name that is neither the checkpoint's nor an alias."""
    if name not in model.names:
        raise RequestError(
            f"model {shown(name)!r} is not served here; this server serves {model.id!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
