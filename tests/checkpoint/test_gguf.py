"""GGUF models as checkpoints: the same weights and logits as the transformers model that they were written from."""

from __future__ import annotations

import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from flare.errors import InputError
from ignition.checkpoint import open_checkpoint
from ignition.checkpoint.gguf_file import GgufFile, read_gguf
from tests.support.checkpoints import CONFIGURATIONS, IM_END, make_model
from tests.support.gguf_files import TYPES, finish, make_gguf

# llama.cpp's smollm3 leaves out positions in every fourth layer, whatever the file says
OWN = {"smollm3": {"no_rope_layers": [1, 1, 1, 0]}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def llama(files: Path) -> Path:
    return make_gguf(files / "plain.gguf", "llama")


@pytest.mark.parametrize("kind", sorted(CONFIGURATIONS))
def test_config_and_weights_give_the_original_logits(files: Path, kind: str) -> None:
    """A model that transformers builds from the checkpoint alone computes the very logits of the one that was
    written.
    """
    original = make_model(kind, **OWN.get(kind, {}))
    checkpoint = open_checkpoint(make_gguf(files / f"{kind}.gguf", kind, **OWN.get(kind, {})))
    config = deepcopy(checkpoint.config)
    assert config.pop("architectures") == [type(original).__name__]
    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    weights = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
    loaded = rebuilt.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert loaded.missing_keys == (["lm_head.weight"] if original.config.tie_word_embeddings else [])
    rebuilt.tie_weights()
    tokens = torch.randint(4, 380, (1, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(rebuilt(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("title", ["two\nlines", "x" * 600])
def test_a_file_whose_title_no_core_can_have_is_called_as_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_name", lambda writer, _: writer.add_string("general.name", title))
    path = make_gguf(tmp_path / "plain.gguf", "llama")
    assert read_gguf(path).metadata["general.name"] == title
    assert open_checkpoint(path).name == "plain"


@pytest.mark.parametrize("encoding", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_every_encoding_holds_the_original_rows(files: Path, encoding: str) -> None:
    """Also for queries and keys, whose rows are put back in order block by block."""
    checkpoint = open_checkpoint(make_gguf(files / f"{encoding}.gguf", "llama", encoding=encoding))
    for name, value in make_model("llama").state_dict().items():
        if value.ndim > 1:
            stored = gguf.quants.quantize(value.numpy(), TYPES[encoding])
            truth = gguf.quants.dequantize(stored, TYPES[encoding])
            assert checkpoint.tensors[name].encoding == encoding
            assert np.array_equal(checkpoint.tensors[name].float32(), truth), name


def test_settings_come_as_plain_json_values(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    assert checkpoint.config["rms_norm_eps"] == 1e-05
    assert checkpoint.config["rope_theta"] == 10000.0
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, IM_END)
    assert checkpoint.generation_config == {"eos_token_id": [IM_END]}
    assert checkpoint.chat_template_source == "tokenizer.chat_template"
    assert checkpoint.name == "tiny llama"

    def plain(value: Any) -> bool:
        if isinstance(value, dict | list):
            return all(map(plain, value.values() if isinstance(value, dict) else value))
        return value is None or type(value) in (bool, int, float, str)

    assert plain(checkpoint.config) and plain(checkpoint.generation_config)


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 1024},
        {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 500},
    ],
)
def test_llama3_scaling_is_found_again(files: Path, rope: dict[str, float]) -> None:
    scaled = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **rope}, "head_dim": 64}
    config = open_checkpoint(make_gguf(files / "scaled.gguf", "llama", **scaled)).config
    assert config["rope_scaling"] == {"rope_type": "llama3", **rope}
    assert config["rope_theta"] == 500000.0


# Where the gguf package's reader finds these tensors in SmolLM2's file (it takes seconds to say so): start, bytes,
# encoding.
SMOLLM2_TENSORS = {
    "model.embed_tokens.weight": (1785664, 30081024, "q8_0"),
    "model.layers.7.mlp.down_proj.weight": (91713088, 552960, "q4_1"),
    "model.norm.weight": (98360128, 2304, "f32"),
}


def test_smollm2_opens_with_the_values_of_its_file(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    assert len(checkpoint.tensors) == 272
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [checkpoint.config[key] for key in sizes] == [576, 9, 3, 64, 49152]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["rope_scaling"] is None
    for name, (start, size, encoding) in SMOLLM2_TENSORS.items():
        stored = np.fromfile(smollm2_gguf, np.uint8, size, offset=start)
        found = checkpoint.tensors[name].float32()
        truth = gguf.quants.dequantize(stored.reshape(found.shape[0], -1), TYPES[encoding])
        assert np.array_equal(found, truth.reshape(found.shape)), name
    assert checkpoint.chat_template is not None and "<|im_start|>" in checkpoint.chat_template


# ---- changed metadata, through a file that is written anew


def rewrite(
    source: Path,
    target: Path,
    changes: dict[str, Any],
    drop: tuple[str, ...] = (),
    rename: dict[str, str] | None = None,
) -> Path:
    """A copy with metadata set or (None) removed, tensors dropped or renamed."""
    file = read_gguf(source)
    metadata = {key: value for key, value in (file.metadata | changes).items() if value is not None}
    writer = gguf.GGUFWriter(target, metadata.pop("general.architecture"))
    metadata.pop("GGUF.version")
    for key, value in metadata.items():
        add(writer, key, value)
    for tensor in file.tensors.values():
        if tensor.name not in drop:
            name = (rename or {}).get(tensor.name, tensor.name)
            writer.add_tensor(name, np.frombuffer(tensor.data, "<f4").reshape(tensor.shape))
    finish(writer)
    return target


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list | np.ndarray):
        writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
    else:
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )


REFUSED = {
    "unknown architecture": (
        {"general.architecture": "mamba"},
        "general.architecture is 'mamba': readable are llama, qwen2",
    ),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter': only whole models"),
    "split": ({"split.count": 3}, "split.count is '3': join the parts first"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is '8': mixtures of experts"),
    "unknown setting": (
        {"llama.attention.clamp_kqv": 8.0},
        "llama.attention.clamp_kqv is '8.0': this setting is not understood",
    ),
    "not causal": ({"llama.attention.causal": False}, "only causal decoders"),
    "no layers": ({"llama.block_count": 0}, "llama.block_count is '0'"),
    "more layers": ({"llama.block_count": 2147483647}, "the file has the tensors of 2 layers"),
    "layers a text": ({"llama.block_count": "2"}, "one integer from 1"),
    "layers missing": ({"llama.block_count": None}, "llama.block_count is missing"),
    "heads by layer": ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count is '.4 2.'"),
    "no heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count is '0'"),
    "odd heads": (
        {"llama.attention.head_count": 7},
        "tensor blk.0.attn_q.weight has 64 rows, not a pair for each of 7 heads",
    ),
    "values unlike keys": ({"llama.attention.value_length": 8}, "it must equal the key length 16"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "partial rotation is not read"),
    "epsilon missing": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "epsilon negative": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "a finite number above zero"),
    "theta not a number": ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is 'nan'"),
    "scaling unknown": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0},
        "readable are none, linear",
    ),
    "yarn without context": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "original_context_length is missing",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "token twice": ({"tokenizer.ggml.tokens": ["a"] * 384}, r"tokens\[0\] 'a' occurs again at 383"),
    "types too few": ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries, tokenizer.ggml.tokens has 384"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["a zzz"]}, r"merges\[0\] is 'a zzz': two tokens"),
    "merge without space": ({"tokenizer.ggml.merges": ["ab"]}, r"merges\[0\] is 'ab': no space divides it"),
    "bos out of range": ({"tokenizer.ggml.bos_token_id": 384}, "bos_token_id is '384': an id below 384"),
    "splitting unknown": (
        {"tokenizer.ggml.pre": "falcon"},
        "tokenizer.ggml.pre is 'falcon': readable are default, gpt-2, smollm",
    ),
    "tokenizer unknown": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5': readable are gpt2 and llama"),
    "add_bos a number": ({"tokenizer.ggml.add_bos_token": 1}, "true or false is needed"),
    "more tokens than rows": (
        {
            "tokenizer.ggml.tokens": [str(i) for i in range(385)],
            "tokenizer.ggml.token_type": [1] * 385,
            "tokenizer.ggml.merges": ["1 0"],
        },
        "has 385 entries, token_embd.weight only 384 rows",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_understood_is_named(llama: Path, tmp_path: Path, case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(InputError, match=words) as caught:
        open_checkpoint(rewrite(llama, tmp_path / "x.gguf", changes))
    assert "\n" not in str(caught.value)


def test_tensors_that_are_missing_or_unknown_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"token_embd\.weight is missing"):
        open_checkpoint(rewrite(llama, tmp_path / "x.gguf", {}, drop=("token_embd.weight",)))
    with pytest.raises(InputError, match=r"tensor blk\.0\.attn_qkv\.weight is not understood for llama"):
        open_checkpoint(
            rewrite(llama, tmp_path / "y.gguf", {}, rename={"blk.0.attn_q.weight": "blk.0.attn_qkv.weight"})
        )

    with pytest.raises(InputError, match=r"blk\.00\.attn_q\.weight is the second one that stands for model\.layers\.0"):
        open_checkpoint(rewrite(llama, tmp_path / "z.gguf", {}, rename={"blk.1.attn_q.weight": "blk.00.attn_q.weight"}))


def test_ends_of_turn_and_sampling_settings_reach_the_generation_config(llama: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 3, "general.sampling.temp": 0.7}
    checkpoint = open_checkpoint(rewrite(llama, tmp_path / "x.gguf", changes | {"general.sampling.top_k": 20}))
    assert checkpoint.generation_config == {"eos_token_id": [3, 2], "temperature": 0.7, "top_k": 20}


def test_a_missing_splitting_is_noticed(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(rewrite(llama, tmp_path / "x.gguf", {"tokenizer.ggml.pre": None}))
    assert "tokenizer.ggml.pre is missing" in checkpoint.notices[0]


def test_yarn_factors_are_kept(llama: Path, tmp_path: Path) -> None:
    prefix = "llama.rope.scaling."
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "attn_factor": 0.5}
    config = open_checkpoint(
        rewrite(llama, tmp_path / "x.gguf", {prefix + key: value for key, value in scaling.items()})
    ).config
    assert config["rope_scaling"].pop("attention_factor") == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }


def header_end(file: GgufFile) -> int:
    """Where a file's tensor data begins; everything that can lie comes before."""
    return file.path.stat().st_size - sum(len(tensor.data) for tensor in file.tensors.values())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_mutated_model_opens_or_is_refused(llama: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(llama.read_bytes())
    end = header_end(read_gguf(llama))
    for at in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, end))
        content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 3, 1 << 31, 1 << 40, (1 << 64) - 1])))
    (tmp_path / "x.gguf").write_bytes(content)
    try:
        checkpoint = open_checkpoint(tmp_path / "x.gguf")
    except InputError as error:
        assert "\n" not in str(error)
        return
    for tensor in checkpoint.tensors.values():
        tensor.float32()
