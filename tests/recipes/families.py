"""The configurations of every family that the dense recipe takes, as variations of the tiny checkpoints."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import transformers

from tests.support.checkpoints import VOCABULARY, make_model

__all__ = ["CONFIGURATIONS", "LLAMA3", "VOCABULARY", "YARN", "Tiny", "make"]

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (kind of tiny checkpoint, settings over it)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": None}),
    "llama-tied": ("llama_tied", {}),
    "llama-biases": ("llama_biases", {}),
    "llama-head-dim": ("llama", {"head_dim": 20, "rms_norm_eps": 1e-2}),
    "llama-linear": ("llama_linear", {}),
    "llama-llama3": ("llama_llama3", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama_yarn", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama_yarn", {"rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.8}}),
    "llama-yarn-attention-factor": ("llama_yarn", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "llama-yarn-betas": (
        "llama_yarn",
        {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 0.5, "truncate": False}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-layer-types": ("mistral", {"sliding_window": 7, "layer_types": MIXED}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED}),
    "smollm3": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False, "mlp_bias": True}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
    "smollm3-all-nope": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 1}),
}


class Tiny(NamedTuple):
    """config: what its config.json holds. model: the transformers model, float32, on the CPU."""

    config: dict[str, Any]
    model: transformers.PreTrainedModel


def make(name: str, seed: int = 1) -> Tiny:
    """The random model of one configuration: three layers, no end token. The same seed gives the same weights."""
    kind, settings = CONFIGURATIONS[name]
    model = make_model(kind, seed=seed, num_hidden_layers=3, eos_token_id=None, **settings)
    if model.config.model_type == "mistral" and "layer_types" in settings:
        # transformers reads such a config.json as a Ministral, which has the same tensors.
        config = {**json.loads(model.config.to_json_string()), "model_type": "ministral"}
        ministral = transformers.MinistralForCausalLM(transformers.MinistralConfig(**config)).eval()
        ministral.load_state_dict(model.state_dict())
        model = ministral
    return Tiny(json.loads(model.config.to_json_string()), model)
