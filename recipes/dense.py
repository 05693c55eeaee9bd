"""The generic dense decoder: Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM2 (a Llama) and SmolLM3.

They are one computation with switches: grouped-query attention with rotary positions (some layers without, some with a
sliding window, Qwen3 with a norm on every query and key head), then a gated SiLU MLP, each after an RMS norm and added
to the residual stream. What the config of a family leaves out takes the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ignition import ops
from recipes import KvSpec, Recipe, Role, StepIO, WeightSpec
from recipes.fields import Fields
from recipes.rope import Rope, read_rope


@dataclass(frozen=True, slots=True)
class Layer:
    """rope: whether queries and keys are rotated. window: how many positions a token sees, itself included; 0: all."""

    rope: bool
    window: int


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A configured model. Sizes in elements; `max_context` in tokens; `eps` of every norm."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_context: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: Rope
    layers: tuple[Layer, ...]


Windows = Literal["none", "all", "upper", "nope"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model_type fixes; the rest are defaults of its config.

    biases: which of attention_bias and mlp_bias the config may set. nope: whether it may name layers without rope.
    windows: which layers slide when the config has a window and no layer_types: none (the family has no windows), all,
    upper (from max_window_layers on), nope (those without rope); in the last two `use_sliding_window` switches them on.
    unread: fields that the family's files carry and its model in transformers never reads.
    """

    architecture: str
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10_000.0
    head_dim: int | None = None
    windows: Windows = "none"
    nope: bool = False
    unread: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", biases=("attention_bias", "mlp_bias")),
    "mistral": _Family("MistralForCausalLM", windows="all"),
    "ministral": _Family("MinistralForCausalLM", windows="all"),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, windows="upper"),
    "qwen3": _Family("Qwen3ForCausalLM", biases=("attention_bias",), qk_norm=True, head_dim=128, windows="upper"),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        biases=("attention_bias", "mlp_bias"),
        tied=True,
        theta=2_000_000.0,
        windows="nope",
        nope=True,
        unread=("max_window_layers", "pretraining_tp"),
    ),
}

_IRRELEVANT = frozenset(
    # What other stages read, or nobody: token ids, storage types, training, labels, tools' own notes.
    """
    architectures transformers_version torch_dtype dtype use_cache tokenizer_class transformers.js_config
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    initializer_range attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop embd_pdrop
    attn_pdrop _name_or_path _attn_implementation_autoset name_or_path unsloth_fixed unsloth_version finetuning_task
    task_specific_params problem_type id2label label2id num_labels output_attentions output_hidden_states return_dict
    return_dict_in_generate torchscript use_bfloat16 gradient_checkpointing chunk_size_feed_forward is_decoder
    tie_last_hidden_states max_sequence_length model_max_length
    """.split()
    # Sampling defaults that old files keep here.
    + """
    temperature top_p top_k min_p typical_p repetition_penalty do_sample num_beams num_beam_groups num_return_sequences
    max_length min_length max_new_tokens length_penalty diversity_penalty early_stopping no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty output_scores
    """.split()
)

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (0, 1),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
    "use_mrope": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
}

_REFUSED = {
    "quantization_config": "unquantised checkpoints (F32, BF16, F16) and GGUF files",
    "auto_map": "models without code of their own",
    "num_experts_per_tok": "dense models only, no experts",
    "moe_intermediate_size": "dense models only, no experts",
    "final_logit_softcapping": "no soft-capping",
    "attn_logit_softcapping": "no soft-capping",
    "attention_multiplier": "attention scaled by head_dim ** -0.5",
    "query_pre_attn_scalar": "attention scaled by head_dim ** -0.5",
    "attention_sinks": "no attention sinks",
    "layer_norm_eps": "RMS norms (rms_norm_eps)",
    "layer_norm_epsilon": "RMS norms (rms_norm_eps)",
    "sliding_window": "null, this model family has no sliding window",
    "no_rope_layers": "null, this model family has rope in every layer",
    "no_rope_layer_interval": "null, this model family has rope in every layer",
    "dual_chunk_attention_config": "no dual chunk attention",
    "text_config": "text-only models",
    "vision_config": "text-only models",
}


def configure(config: Mapping[str, Any]) -> DenseModel:
    """A model from a Hugging Face config.json. Raises InputError for every field that it does not honour."""
    fields = Fields(config)
    name = fields.choice("model_type", _FAMILIES)
    family = _FAMILIES[name]
    architectures = fields.raw("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise fields.refuse("architectures", f"[{family.architecture!r}]")
    fields.choice("hidden_act", ("silu", "swish"), default="silu")

    hidden = fields.integer("hidden_size", high=2**20)
    heads = fields.integer("num_attention_heads", high=2**14)
    kv_heads = fields.integer("num_key_value_heads", high=heads, default=heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    head_dim = fields.integer("head_dim", high=2**14, default=None)
    if head_dim is None:
        head_dim = family.head_dim if family.head_dim and "head_dim" not in fields else hidden // heads
        if not family.head_dim and hidden % heads:
            raise fields.refuse("hidden_size", f"a multiple of num_attention_heads, which is {heads}")
    if head_dim % 2 or not head_dim:
        name = "head_dim" if "head_dim" in fields else "hidden_size"
        raise fields.refuse(name, f"an even head size, which would be {head_dim}")
    max_positions = fields.integer("max_position_embeddings")
    rope = read_rope(fields, head_dim, max_positions, family.theta)
    bias = {name: fields.flag(name, False) for name in family.biases}
    model = DenseModel(
        family=name,
        vocabulary=fields.integer("vocab_size", high=2**24),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size", high=2**22),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(fields.number("rms_norm_eps", default=1e-6)),
        max_context=max(max_positions, rope.extended),
        tied=fields.flag("tie_word_embeddings", family.tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or bias.get("attention_bias", False),
        output_bias=bias.get("attention_bias", False),
        mlp_bias=bias.get("mlp_bias", False),
        rope=rope,
        layers=_layers(fields, family),
    )
    fields.finish(
        irrelevant=_IRRELEVANT.union(family.unread),
        harmless={**_HARMLESS, "attention_bias": (family.qkv_bias,)},
        refused=_REFUSED,
    )
    return model


def _layers(fields: Fields, family: _Family) -> tuple[Layer, ...]:
    count = fields.integer("num_hidden_layers", high=1024)
    ropes = _ropes(fields, count) if family.nope else [True] * count
    window = _window(fields, family)
    if family.windows == "upper":
        first = fields.integer("max_window_layers", low=0, default=28)
        slides = [index >= first for index in range(count)]
    else:
        slides = [family.windows == "all" or not rope for rope in ropes]
    types = fields.raw("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(kind in ("full_attention", "sliding_attention") for kind in types)
        if not known or len(types) != count:
            raise fields.refuse("layer_types", f"full_attention or sliding_attention for each of {count} layers")
        slides = [kind == "sliding_attention" for kind in types]
        if any(slides) and not window:
            raise fields.refuse("layer_types", "full_attention only, since no sliding window is set")
    return tuple(Layer(rope, window if slide else 0) for rope, slide in zip(ropes, slides, strict=True))


def _window(fields: Fields, family: _Family) -> int:
    """The model's sliding window, 0 if it has none or does not use it."""
    if family.windows == "none":
        return 0
    absent = None if family.windows == "nope" or "sliding_window" in fields else 4096
    window = fields.integer("sliding_window", default=absent) or 0
    if family.windows == "all":
        return window
    return window if fields.flag("use_sliding_window", False) else 0


def _ropes(fields: Fields, count: int) -> list[bool]:
    """Which layers rotate. `no_rope_layers` holds 1 for a layer WITH rope, against its name."""
    interval = fields.integer("no_rope_layer_interval", default=4)
    listed = fields.raw("no_rope_layers")
    if listed is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(x not in (0, 1) for x in listed):
        raise fields.refuse("no_rope_layers", f"a list of 0 and 1, one for each of {count} layers")
    return [x == 1 for x in listed[:count]]


def weights(model: DenseModel) -> dict[str, WeightSpec]:
    """Every weight, under its checkpoint name, in the order of their use."""
    specs: dict[str, WeightSpec] = {}

    def add(name: str, role: Role, *shape: int) -> None:
        specs[name] = WeightSpec(shape, role, (name,))

    def linear(name: str, n: int, k: int, bias: bool) -> None:
        add(f"{name}.weight", "linear", n, k)
        if bias:
            add(f"{name}.bias", "vector", n)

    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if any(layer.rope for layer in model.layers):
        specs["rope.inv_freq"] = WeightSpec((model.head_dim // 2,), "constant", value=model.rope.inv_freq)
    add("model.embed_tokens.weight", "embedding", model.vocabulary, model.hidden)
    for index in range(len(model.layers)):
        block = f"model.layers.{index}"
        add(f"{block}.input_layernorm.weight", "vector", model.hidden)
        linear(f"{block}.self_attn.q_proj", query, model.hidden, model.qkv_bias)
        linear(f"{block}.self_attn.k_proj", key, model.hidden, model.qkv_bias)
        linear(f"{block}.self_attn.v_proj", key, model.hidden, model.qkv_bias)
        if model.qk_norm:
            add(f"{block}.self_attn.q_norm.weight", "vector", model.head_dim)
            add(f"{block}.self_attn.k_norm.weight", "vector", model.head_dim)
        linear(f"{block}.self_attn.o_proj", model.hidden, query, model.output_bias)
        add(f"{block}.post_attention_layernorm.weight", "vector", model.hidden)
        linear(f"{block}.mlp.gate_proj", model.intermediate, model.hidden, model.mlp_bias)
        linear(f"{block}.mlp.up_proj", model.intermediate, model.hidden, model.mlp_bias)
        linear(f"{block}.mlp.down_proj", model.hidden, model.intermediate, model.mlp_bias)
    add("model.norm.weight", "vector", model.hidden)
    if not model.tied:
        add("lm_head.weight", "embedding", model.vocabulary, model.hidden)
    return specs


def states(model: DenseModel) -> dict[str, KvSpec]:
    """One paged KV state a layer."""
    return {f"kv.{index}": KvSpec(model.kv_heads, model.head_dim) for index in range(len(model.layers))}


def step(model: DenseModel, weights: Mapping[str, Tensor], io: StepIO) -> Tensor:
    """tokens [T] -> logits [R, vocabulary] of the wanted rows."""
    table = weights["model.embed_tokens.weight"]
    x = ops.embed(table, io.tokens)
    angles = None
    if "rope.inv_freq" in weights:
        angles = ops.rope_angles(io.positions, weights["rope.inv_freq"], model.rope.scale)
    for index, layer in enumerate(model.layers):
        w = _Block(weights, f"model.layers.{index}.")
        x = ops.add(x, _attention(model, layer, w, w.norm("input_layernorm", x, model.eps), angles, io, f"kv.{index}"))
        x = ops.add(x, _mlp(w, w.norm("post_attention_layernorm", x, model.eps)))
    x = ops.rms_norm(ops.take_rows(x, io.rows), weights["model.norm.weight"], model.eps)
    return ops.linear(x, table if model.tied else weights["lm_head.weight"])


@dataclass(frozen=True, slots=True)
class _Block:
    """The weights of one layer, by the names that its checkpoint gives them inside the layer."""

    weights: Mapping[str, Tensor]
    prefix: str

    def linear(self, name: str, x: Tensor) -> Tensor:
        return ops.linear(x, self.weights[f"{self.prefix}{name}.weight"], self.weights.get(f"{self.prefix}{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, self.weights[f"{self.prefix}{name}.weight"], eps)


def _attention(
    model: DenseModel,
    layer: Layer,
    w: _Block,
    x: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    io: StepIO,
    state: str,
) -> Tensor:
    kv = io.state[state]
    q = w.linear("self_attn.q_proj", x).view(-1, model.heads, model.head_dim)
    k = w.linear("self_attn.k_proj", x).view(-1, model.kv_heads, model.head_dim)
    v = w.linear("self_attn.v_proj", x).view(-1, model.kv_heads, model.head_dim)
    if model.qk_norm:
        q = w.norm("self_attn.q_norm", q, model.eps)
        k = w.norm("self_attn.k_norm", k, model.eps)
    if layer.rope and angles is not None:
        q, k = ops.rope(q, *angles), ops.rope(k, *angles)
    ops.kv_write(kv, k, v, io.positions, io.slots, io.page_table)
    y = ops.attention(q, kv, io.positions, io.slots, io.page_table, model.head_dim**-0.5, layer.window)
    return w.linear("self_attn.o_proj", y)


def _mlp(w: _Block, x: Tensor) -> Tensor:
    return w.linear("mlp.down_proj", ops.silu_mul(w.linear("mlp.gate_proj", x), w.linear("mlp.up_proj", x)))


def ignored(model: DenseModel, tensor: str) -> bool:
    """Old checkpoints store the rotary frequencies; tied ones may store the output layer a second time."""
    return tensor.endswith(".rotary_emb.inv_freq") or (model.tied and tensor == "lm_head.weight")


RECIPE = Recipe(
    name="dense",
    model_types=tuple(_FAMILIES),
    configure=configure,
    weights=weights,
    states=states,
    step=step,
    ignored=ignored,
)
