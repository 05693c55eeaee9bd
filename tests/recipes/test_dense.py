"""The dense recipe against transformers: logits, greedy tokens, frequencies; and every config that it must refuse."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import recipes
from flare.errors import InputError
from ignition.reference import ReferenceModel
from recipes import dense
from tests.recipes.families import CONFIGURATIONS, LLAMA3, VOCABULARY, YARN, make

TOLERANCE = 3e-5
PAGE_TOKENS = 4


def reference(tiny: Any, **options: Any) -> ReferenceModel:
    model = dense.configure(tiny.config)
    return ReferenceModel(dense.RECIPE, model, tiny.model.state_dict(), page_tokens=PAGE_TOKENS, **options)


def ragged_logits(model: ReferenceModel, sequences: list[list[int]], rng: random.Random) -> list[torch.Tensor]:
    """Feeds all sequences through ragged steps: random slots in random order, random chunks, pages in random order."""
    stride = max(-(-len(s) // PAGE_TOKENS) for s in sequences)
    pages = rng.sample(range(model.pages), len(sequences) * stride)
    table = [pages[slot * stride : (slot + 1) * stride] for slot in range(len(sequences))]
    done = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(done[slot] < len(s) for slot, s in enumerate(sequences)):
        waiting = [slot for slot, s in enumerate(sequences) if done[slot] < len(s)]
        tokens, positions, slots = [], [], []
        for slot in rng.sample(waiting, rng.randint(1, len(waiting))):
            end = min(len(sequences[slot]), done[slot] + rng.choice((1, 1, 1, 2, 5, 13)))
            tokens += sequences[slot][done[slot] : end]
            positions += range(done[slot], end)
            slots += [slot] * (end - done[slot])
            done[slot] = end
        rows = rng.sample(range(len(tokens)), len(tokens))
        logits = model.step(tokens, positions, slots, table, rows)
        by_token = dict(zip(rows, logits, strict=True))
        for index, slot in enumerate(slots):
            found[slot].append(by_token[index])
    return [torch.stack(rows) for rows in found]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_of_ragged_steps_are_those_of_transformers(name: str) -> None:
    """Prompts longer than any window and any original rope length, in chunks and token by token."""
    tiny = make(name)
    rng = random.Random(name)
    sequences = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (41, 9, 27)]
    for sequence, logits in zip(sequences, ragged_logits(reference(tiny), sequences, rng), strict=True):
        with torch.no_grad():
            expected = tiny.model(torch.tensor([sequence])).logits[0]
        assert expected.std() > 0.5, "the test's own model is too flat to tell anything"
        assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    tiny = make(name, seed=2)
    prompt = [random.Random(name).randrange(VOCABULARY) for _ in range(19)]
    expected = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert reference(tiny).greedy(prompt, 12)[0] == expected.tolist()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rope_frequencies_are_those_of_transformers_to_the_last_bit(name: str) -> None:
    tiny = make(name)
    rope = dense.configure(tiny.config).rope
    rotary = tiny.model.model.rotary_emb
    assert rotary.inv_freq.tolist() == list(rope.inv_freq)
    assert rotary.attention_scaling == rope.scale


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("theta", [10000, 10000.0, 500000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4},
        {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 32},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0},
    ],
)
def test_rope_of_real_sizes_in_the_older_spelling(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> None:
    config = {
        **LLAMA,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": 131072,
    }
    rope = dense.configure(config).rope
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(config)))
    assert rotary.inv_freq.tolist() == list(rope.inv_freq)
    assert rotary.attention_scaling == rope.scale


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layers_that_a_config_does_not_list_are_those_that_transformers_derives(name: str) -> None:
    """Saved configs list what transformers derived; older ones leave it out."""
    config = make(name).config
    given = CONFIGURATIONS[name][1]
    shorter = dict(config)
    for field in ("layer_types", "no_rope_layers"):
        if given.get(field) is None:
            shorter.pop(field, None)
    assert dense.configure(shorter) == dense.configure(config)


def test_max_context_is_what_the_config_reaches() -> None:
    assert dense.configure(LLAMA).max_context == 64
    assert dense.configure({**LLAMA, "rope_scaling": {**YARN, "factor": 8.0}}).max_context == 128
    assert dense.configure({**LLAMA, "rope_scaling": {**YARN, "factor": 2.0}}).max_context == 64
    assert dense.configure({**LLAMA, "rope_scaling": LLAMA3}).max_context == 64


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_weights_are_the_checkpoints_tensors(name: str) -> None:
    tiny = make(name)
    model = dense.configure(tiny.config)
    specs = dense.weights(model)
    stored = {key: tuple(tensor.shape) for key, tensor in tiny.model.state_dict().items()}
    named = {source: spec.shape for spec in specs.values() for source in spec.sources}
    assert {key: shape for key, shape in stored.items() if not dense.ignored(model, key)} == named
    assert dense.ignored(model, "lm_head.weight") == model.tied
    assert dense.ignored(model, "model.layers.0.self_attn.rotary_emb.inv_freq")


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"model_type": "gpt2"}, "model_type"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"hidden_act": ["silu"]}, "hidden_act"),
    (LLAMA, {"vocab_size": 0}, "vocab_size"),
    (LLAMA, {"vocab_size": "101"}, "vocab_size"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers"),
    (LLAMA, {"hidden_size": None}, "hidden_size"),
    (LLAMA, {"hidden_size": 50}, "hidden_size"),
    (LLAMA, {"hidden_size": 52}, "hidden_size"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads"),
    (LLAMA, {"head_dim": 15}, "head_dim"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
    (LLAMA, {"rope_theta": 10**400}, "rope_theta"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA, {"attention_bias": None}, "attention_bias"),
    (LLAMA, {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA, {"num_experts": 8}, "num_experts"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA, {"num_experts_per_tok": 2}, "num_experts_per_tok"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (LLAMA, {"attention_sinks": True}, "attention_sinks"),
    (LLAMA, {"attention_multiplier": 0.1}, "attention_multiplier"),
    (LLAMA, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    (LLAMA, {"residual_multiplier": 0.2}, "residual_multiplier"),
    (LLAMA, {"embedding_multiplier": 12}, "embedding_multiplier"),
    (LLAMA, {"logits_scaling": 8.0}, "logits_scaling"),
    (LLAMA, {"logit_scale": True}, "logit_scale"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
    (LLAMA, {"text_config": {}}, "text_config"),
    (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (LLAMA, {"sliding_window": 8}, "sliding_window"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    (LLAMA, {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    (LLAMA, {"a_field_invented_tomorrow": 0}, "a_field_invented_tomorrow"),
    (LLAMA, {"rope_theta": 1}, "rope_theta"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "rope_type"),
    (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "type"),
    (LLAMA, {"rope_scaling": {"factor": 2.0}}, "factor"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1, 1]}}, "mrope_section"),
    (LLAMA, {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor"),
    (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    (LLAMA, {"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "beta_fast"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA, {"rope_parameters": YARN, "rope_scaling": LLAMA3}, "rope_scaling"),
    (LLAMA, {"rope_parameters": {"full_attention": YARN}}, "full_attention"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window"),
    (MISTRAL, {"attention_bias": True}, "attention_bias"),
    (MISTRAL, {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types"),
    (MISTRAL, {"layer_types": [{}, [], None]}, "layer_types"),
    (MISTRAL, {"layer_types": 3}, "layer_types"),
    (MISTRAL, {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
    (QWEN2, {"attention_bias": False}, "attention_bias"),
    (QWEN2, {"use_sliding_window": 1}, "use_sliding_window"),
    (QWEN2, {"use_mrope": True}, "use_mrope"),
    (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    (QWEN2, {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    (SMOLLM3, {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
    (SMOLLM3, {"no_rope_layers": [[], {}, None]}, "no_rope_layers"),
    (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
]


@pytest.mark.parametrize(
    ("base", "change", "field"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_config_that_is_not_honoured_is_refused_by_field_and_value(
    base: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    dense.configure(base)
    with pytest.raises(InputError) as caught:
        dense.configure({**base, **change})
    message = str(caught.value)
    assert f": {field} is " in message
    assert "\n" not in message and ("supported: " in message or message.endswith("missing"))


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_size_is_named(field: str) -> None:
    with pytest.raises(InputError, match=f"config.json: {field} is missing"):
        dense.configure({name: value for name, value in LLAMA.items() if name != field})


def test_published_configs_are_taken_as_they_are() -> None:
    smollm2 = {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "mlp_bias": False,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    assert dense.configure(smollm2).tied
    qwen = {
        **QWEN2,
        "max_window_layers": 2,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "use_mrope": False,
        "attention_bias": True,
        "rope_theta": 1000000.0,
    }
    assert [layer.window for layer in dense.configure(qwen).layers] == [0, 0, 0]
    assert (dense.configure(qwen).qkv_bias, dense.configure(qwen).output_bias) == (True, False)
    smollm3 = {
        **SMOLLM3,
        "layer_types": ["full_attention"] * 3,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 0],
        "pretraining_tp": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    assert [layer.rope for layer in dense.configure(smollm3).layers] == [True, True, False]
    assert [layer.window for layer in dense.configure(MISTRAL).layers] == [4096] * 3
    mixed = {**MISTRAL, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert [layer.window for layer in dense.configure(mixed).layers] == [4096, 0, 4096]


def test_the_config_finds_the_recipe() -> None:
    assert recipes.find(LLAMA) == (dense.RECIPE, None)
    recipe, source = recipes.find("smollm2")
    assert recipe is dense.RECIPE and source is not None and source.checkpoint == "HuggingFaceTB/SmolLM2-135M-Instruct"
