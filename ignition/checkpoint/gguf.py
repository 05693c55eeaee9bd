"""A GGUF model as a checkpoint: its metadata in config.json's vocabulary, its tensors under Hugging Face names.

Each architecture says how llama.cpp's converter wrote it. Llama and SmolLM3 turn query and key channels pairwise, so
their converter interleaved the rows of each head; reading undoes that. Qwen2 and Qwen3 turn halves, as Hugging Face
does.

What is not understood is refused by name: a key of the architecture that this table lacks would mean another model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flare.core.manifest_checks import is_id
from flare.errors import InputError
from ignition.checkpoint.gguf_fields import Fields, shortest
from ignition.checkpoint.gguf_file import GgufTensor, read_gguf
from ignition.checkpoint.gguf_rope import rope_settings
from ignition.checkpoint.gguf_tokenizer import convert_tokenizer
from ignition.checkpoint.interface import Checkpoint
from ignition.checkpoint.tensors import LazyTensor


@dataclass(frozen=True)
class _Architecture:
    """`config` holds what the architecture implies and the file does not say."""

    model_type: str
    model_class: str
    interleaved: bool
    config: dict[str, Any]


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", True, {}),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", False, {"use_sliding_window": False}),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", False, {"use_sliding_window": False}),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", True, {"use_sliding_window": False}),
}
_SMOLLM3_NOPE_INTERVAL = 4  # llama.cpp's smollm3 has no key for it: every fourth layer goes without positions

# Keys below the architecture's prefix that are read, and those that say nothing new about a dense decoder.
_READ_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal", "expert_count",
    "expert_used_count", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.([a-z_]{1,40})\.(weight|bias)")

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def open_file(path: Path) -> Checkpoint:
    """Opens a GGUF file of one of the architectures above. Raises InputError naming file, field, value and limit."""
    fields = Fields(read_gguf(path))
    name, architecture = _architecture(fields)
    heads = {"q": fields.count(f"{name}.attention.head_count")}
    heads["k"] = fields.count(f"{name}.attention.head_count_kv", heads["q"])
    tokenizer = convert_tokenizer(fields)
    tensors = _tensors(fields, architecture, heads)
    config = _config(fields, name, architecture, heads, tensors)
    config |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    vocabulary = config["vocab_size"]
    if tokenizer.size > vocabulary:
        raise InputError(
            f"{path}: tokenizer.ggml.tokens has {tokenizer.size} entries, token_embd.weight only {vocabulary} rows"
        )
    template = fields.text("tokenizer.chat_template", None)
    title = fields.text("general.name", None)
    return Checkpoint(
        name=title if title and is_id(title) else path.stem,
        source=str(path),
        config=config,
        tensors=tensors,
        tokenizer_json=tokenizer.json,
        tokenizer_config=tokenizer.config,
        chat_template=template,
        chat_template_source=None if template is None else "tokenizer.chat_template",
        generation_config=_generation_config(fields, tokenizer.ends),
        notices=_notices(fields),
    )


def _architecture(fields: Fields) -> tuple[str, _Architecture]:
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise fields.fail("general.type", "only whole models are read")
    if fields.metadata.get("split.count", 1) != 1:
        raise fields.fail("split.count", "join the parts first (llama-gguf-split --merge)")
    name = fields.text("general.architecture", None) or ""
    if name not in _ARCHITECTURES:
        raise fields.fail("general.architecture", f"readable are {', '.join(_ARCHITECTURES)}")
    for key in fields.metadata:
        if key.startswith(name + ".") and key[len(name) + 1 :] not in _READ_KEYS:
            raise fields.fail(key, f"this setting is not understood for architecture {name}")
    if fields.count(f"{name}.expert_count", 0, least=0):
        raise fields.fail(f"{name}.expert_count", "mixtures of experts are not read")
    if not fields.boolean(f"{name}.attention.causal", True):
        raise fields.fail(f"{name}.attention.causal", "only causal decoders are read")
    return name, _ARCHITECTURES[name]


# ---- configuration


def _config(
    fields: Fields, name: str, architecture: _Architecture, heads: dict[str, int], tensors: dict[str, LazyTensor]
) -> dict[str, Any]:
    hidden = fields.count(f"{name}.embedding_length")
    layers = fields.count(f"{name}.block_count")
    found = sum(".input_layernorm." in tensor for tensor in tensors)
    if layers != found:
        raise fields.fail(f"{name}.block_count", f"the file has the tensors of {found} layers")
    head_dim = fields.count(f"{name}.attention.key_length", hidden // heads["q"] or None)
    if fields.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise fields.fail(f"{name}.attention.value_length", f"it must equal the key length {head_dim}")
    if fields.count(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise fields.fail(
            f"{name}.rope.dimension_count", f"it must equal the head length {head_dim}; partial rotation is not read"
        )
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise InputError(f"{fields.path}: tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": embedding.rows,
        "hidden_size": hidden,
        "intermediate_size": fields.count(f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.count(f"{name}.context_length"),
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        **rope_settings(fields, name, head_dim),
        **architecture.config,
    }
    window = fields.count(f"{name}.attention.sliding_window", 0, least=0)
    if window and name == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    elif window:
        raise fields.fail(f"{name}.attention.sliding_window", "which layers it holds for is not said")
    if name == "smollm3":
        config["no_rope_layers"] = [int((layer + 1) % _SMOLLM3_NOPE_INTERVAL != 0) for layer in range(layers)]
        config["no_rope_layer_interval"] = _SMOLLM3_NOPE_INTERVAL
    return config


def _generation_config(fields: Fields, ends: list[int]) -> dict[str, Any]:
    """Ends of generation and the sampling settings that newer files carry."""
    settings: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for key, name in _SAMPLING.items():
        value = fields.metadata.get(key)
        if value is not None:
            if type(value) not in (int, float):
                raise fields.fail(key, "a number is needed")
            settings[name] = value if type(value) is int else shortest(value)
    return settings


def _notices(fields: Fields) -> tuple[str, ...]:
    lines = []
    if fields.metadata["tokenizer.ggml.model"] == "gpt2" and "tokenizer.ggml.pre" not in fields.metadata:
        lines.append(
            "tokenizer.ggml.pre is missing: text is split the default way, which may not be the model's; "
            "convert the model anew"
        )
    return tuple(lines)


# ---- tensors


def _tensors(fields: Fields, architecture: _Architecture, heads: dict[str, int]) -> dict[str, LazyTensor]:
    tensors = {}
    for stored in fields.stored.values():
        if stored.name == "rope_freqs.weight":
            continue  # part of the configuration: gguf_rope.py
        name = _huggingface_name(fields, stored)
        if name in tensors:
            raise InputError(f"{fields.path}: tensor {stored.name} is the second one that stands for {name}")
        interleaved = 0
        if architecture.interleaved and (kind := _rotated(stored.name)):
            interleaved = heads[kind]
            if stored.shape[0] % (2 * interleaved):
                raise InputError(
                    f"{fields.path}: tensor {stored.name} has {stored.shape[0]} rows, not a pair for each of "
                    f"{interleaved} heads"
                )
        tensors[name] = LazyTensor(name, stored.shape, stored.encoding, stored.data, interleaved)
    return tensors


def _rotated(name: str) -> str | None:
    """ "q" or "k" for a query's or key's projection."""
    match = _LAYER_NAME.fullmatch(name)
    return match[2][-1] if match and match[2] in ("attn_q", "attn_k") else None


def _huggingface_name(fields: Fields, stored: GgufTensor) -> str:
    if stored.name in _OUTER_TENSORS:
        return _OUTER_TENSORS[stored.name]
    match = _LAYER_NAME.fullmatch(stored.name)
    if match is None or match[2] not in _LAYER_TENSORS:
        raise InputError(
            f"{fields.path}: tensor {stored.name} is not understood for {fields.metadata['general.architecture']}"
        )
    return f"model.layers.{int(match[1])}.{_LAYER_TENSORS[match[2]]}.{match[3]}"
