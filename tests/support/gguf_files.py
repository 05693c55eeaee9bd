"""Writes tiny models as GGUF files with the `gguf` package, the way llama.cpp's converter lays them out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.checkpoints import BOS, IM_END, PAD, SPECIAL_TOKENS, VOCABULARY, make_model, make_tokenizer

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q5_k": gguf.GGMLQuantizationType.Q5_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
}


def make_gguf(path: Path, kind: str = "llama", *, encoding: str = "f32", seed: int = 0, **settings: Any) -> Path:
    """Writes a configuration of `tests.support.checkpoints` to `path`; matrices in `encoding` (not the K ones),
    vectors in f32.
    """
    model = make_model(kind, seed=seed, **settings)
    config = model.config
    name = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    write_settings(writer, config)
    write_tokenizer(writer)
    tied = config.tie_word_embeddings
    for key, parameter in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        stored, value = gguf_name(key), parameter.numpy()
        if name in ("llama", "smollm3") and ".attn_q." in stored:
            value = interleave(value, config.num_attention_heads)
        if name in ("llama", "smollm3") and ".attn_k." in stored:
            value = interleave(value, config.num_key_value_heads)
        kind_ = TYPES[encoding if value.ndim > 1 else "f32"]
        writer.add_tensor(stored, gguf.quants.quantize(value, kind_), raw_dtype=kind_)
    finish(writer)
    return path


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head: channel j, then channel j + half, for j in order."""
    rows = len(value) // heads
    order = [head * rows + half * rows // 2 + j for head in range(heads) for j in range(rows // 2) for half in (0, 1)]
    return value[order]


def gguf_name(key: str) -> str:
    """A Hugging Face tensor name in llama.cpp's spelling."""
    stem, _, suffix = key.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_INNER[rest]}.{suffix}"


def write_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """The hyperparameters of a transformers configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Llama 3's frequency scaling by wavelengths, one divisor for each frequency."""
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The shared byte-level tokenizer with its special tokens."""
    document = json.loads(make_tokenizer().to_str())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    assert len(tokens) == VOCABULARY
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes everything and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
