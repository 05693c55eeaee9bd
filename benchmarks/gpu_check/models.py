"""The checkpoints of a bundle: tiny ones of every kind of dense model, and one whose steps are long enough to be timed.

The long one's weights are random tiles, repeated and shifted: they take the device as much memory and time as any, and the
bundle next to nothing, since repetitions compress away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.checkpoints import make_checkpoint, save_tokenizer

SHIFT = 32
"""Columns by which repeated rows of weights are shifted: a group of quantised weights, so that it stays one."""

LONG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16_384,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
"""135 million weights in layers and 34 million in the output: more than a device's caches hold, in any format."""


@dataclass(frozen=True, slots=True)
class Model:
    """A core of the bundle. kind: of tests/support/checkpoints.py, or "long". weights: as `ignition export` has it.
    settings: over those of the kind."""

    name: str
    kind: str
    dtype: str
    weights: str
    settings: Mapping[str, int] = field(default_factory=dict)


MODELS = (
    Model("llama-f32", "llama", "float32", "auto"),
    Model("qwen3-bf16", "qwen3", "bfloat16", "auto"),
    Model("mistral-f16", "mistral", "float16", "auto"),
    Model("biases-q8", "llama_biases", "bfloat16", "q8"),
    Model("qwen2-q4", "qwen2", "bfloat16", "q4"),
    Model("smollm3-fp8", "smollm3", "bfloat16", "fp8"),
    Model(
        "wide-heads-bf16",
        "llama",
        "bfloat16",
        "auto",
        {"head_dim": 512, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    Model("long-bf16", "long", "bfloat16", "auto"),
    Model("long-q8", "long", "bfloat16", "q8"),
    Model("long-q4", "long", "bfloat16", "q4"),
)


def write_checkpoint(model: Model, folder: Path) -> Path:
    """Writes a model's checkpoint into a new folder and returns it."""
    if model.kind == "long":
        return _write_long(folder)
    return make_checkpoint(folder, model.kind, dtype=model.dtype, **model.settings)


def _write_long(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LONG))
    save_tokenizer(folder)
    hidden, inner, head = (int(str(LONG[name])) for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = (head * int(str(LONG[f"num_{name}_heads"])) for name in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(0)

    def tiles(rows: int, columns: int, period: int = 64) -> torch.Tensor:
        tile = torch.randn(period, columns, generator=generator) * 1.2 / columns**0.5
        return torch.cat([tile.roll(SHIFT * number, 1) for number in range(rows // period)]).bfloat16()

    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {"model.norm.weight": torch.ones(hidden).bfloat16()}
    for layer in range(int(str(LONG["num_hidden_layers"]))):
        for name, (rows, columns) in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = tiles(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden).bfloat16()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = int(str(LONG["vocab_size"]))
        tensors[name] = tiles(rows, hidden, rows * SHIFT // hidden)  # so that no two tokens have the same
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
