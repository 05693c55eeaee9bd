"""Makes tiny random checkpoints of every configuration that the dense decoder recipe reads, with transformers.

    make_checkpoint(directory, "qwen3")                 one model.safetensors, float32
    make_checkpoint(directory, "llama", shards=True)    several shards and their index

All are seeded, a few hundred kilobytes, and share one byte-level BPE tokenizer of 384 tokens with a ChatML template.
Norm weights and biases are random too, so that a forgotten one shows; weights are scaled so that logits spread and
greedy tokens are no coin toss.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY = 384
PAD, BOS, IM_START, IM_END = 0, 1, 2, 3
SPECIAL_TOKENS = ["<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the other dogs look on and bark at the moon.",
    "A small model answers a question: what is the capital of France? The capital of France is Paris.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, i + 1))\n",
    "In 1984, 365 days made a year; in 2024 there were 366. Prices rose by 3.14 percent, to 27,000 in all.",
    "Once upon a time there was a model that told the time, and the time it told was always the same time.",
    "Größe, naïve, café, 日本語, русский язык, 🙂: some of these words are rare, and some of them are not.",
    '{"name": "value", "list": [1, 2, 3], "nested": {"key": true, "other": null}}',
]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **settings}}


# kind -> (model_type, settings over _SHAPE)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
        | {"head_dim": 32},
    ),
    "llama_linear": ("llama", _rope("linear", factor=4.0)),
    "llama_yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True}),
}

# Arguments of make_checkpoint for cores that a cuda target is compiled for: of one kind, so that it is compiled once.
TINY_CUDA: dict[str, Any] = {
    "kind": "llama_biases",
    "dtype": "bfloat16",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
}


def make_checkpoint(
    directory: Path,
    kind: str = "llama",
    *,
    dtype: str = "float32",
    shards: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Writes a checkpoint of a named configuration into `directory` (made when missing) and returns it.

    `dtype` is a torch name: float32, bfloat16 or float16. `settings` override single entries of the configuration.
    """
    model = make_model(kind, seed=seed, **settings).to(_torch_dtype(dtype))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="100KB" if shards else "1GB")
    save_tokenizer(directory)
    return directory


def make_model(kind: str = "llama", *, seed: int = 0, **settings: Any) -> Any:
    """The transformers model itself, float32, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = CONFIGURATIONS[kind]
    config = AutoConfig.for_model(model_type, **(_SHAPE | own | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def save_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[IM_END],
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)


@cache
def make_tokenizer() -> Any:
    """A `tokenizers.Tokenizer`: byte-level BPE trained on a few sentences, exactly VOCABULARY tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
