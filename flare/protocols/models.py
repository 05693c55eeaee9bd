"""GET /v1/models and /v1/models/{model}: the card of the loaded model."""

from __future__ import annotations

from typing import Any

from flare.errors import RequestError
from flare.protocols.decoding import shown
from flare.served import NEUTRAL, ServedModel

LIMIT_DEFAULTS = ("max_new_tokens", "max_length")
DEFAULT_SOURCE = "flare_default"


def model_card(model: ServedModel) -> dict[str, Any]:
    """Returns the model's card: the fields that vLLM's clients read, and what this server knows beyond them."""
    ranges = {name: _range(model, name) for name in NEUTRAL}
    defaults = {name: model.sampling_default(name) for name in NEUTRAL} | {"seed": model.defaults.get("seed")}
    limits = {name: model.defaults.get(name) for name in LIMIT_DEFAULTS}
    sources = {name: model.sources.get(name, DEFAULT_SOURCE) for name in (*NEUTRAL, *LIMIT_DEFAULTS)}
    cap = model.max_tokens_cap
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
                "allow_logprobs": False,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
        "thinking": dict(model.thinking),
        "generation_defaults": {**defaults, **limits, "sources": sources},
        "flare": {
            "vocab_size": model.vocabulary,
            "max_top_logprobs": 0,
            "max_concurrency": model.max_concurrency,
            "prefill_chunk_size": model.prefill_chunk,
            "default_max_tokens": cap if cap is not None else model.defaults.get("max_new_tokens"),
            "max_tokens_cap": cap,
            "sampling_defaults": defaults,
            "sampling_ranges": ranges,
            "thinking_token_budget": None,
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


def _range(model: ServedModel, name: str) -> dict[str, float] | str | None:
    """Returns a parameter's bounds, null where it is fixed, "open" where every valid value passes."""
    if model.ranges is None:
        return "open"
    bounds = model.ranges.get(name)
    return None if bounds is None else {"min": bounds[0], "max": bounds[1]}


def model_list(model: ServedModel) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(model)]}


def find_model(name: str, model: ServedModel) -> dict[str, Any]:
    """Returns the card for the model's name or an alias. Raises RequestError (404) for another name."""
    if name not in model.names:
        raise RequestError(
            f"model {shown(name)!r} is not served here; this server serves {model.id!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return model_card(model)
