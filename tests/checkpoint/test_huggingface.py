"""Hugging Face directories against transformers' own loading, and every way in which one can be incomplete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flare.errors import InputError
from ignition.checkpoint import open_checkpoint
from tests.support.checkpoints import CHATML, CONFIGURATIONS, make_checkpoint


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("directories")


@pytest.fixture
def directory(tmp_path: Path, directories: Path) -> Path:
    """A fresh copy of a sharded checkpoint, to be damaged."""
    made = directories / "sharded"
    if not made.exists():
        make_checkpoint(made, "llama", shards=True)
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.mark.parametrize("kind", sorted(CONFIGURATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_value_equals_what_transformers_loads(directories: Path, kind: str, dtype: str) -> None:
    path = make_checkpoint(directories / f"{kind}-{dtype}", kind, dtype=dtype, shards=dtype == "bfloat16")
    checkpoint = open_checkpoint(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    truth = model.state_dict()
    missing = set(truth) - set(checkpoint.tensors)
    assert missing == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in checkpoint.tensors.items():
        assert tensor.encoding == {"float32": "f32", "bfloat16": "bf16"}[dtype]
        assert np.array_equal(tensor.float32(), truth[name].numpy()), name
    assert checkpoint.config["model_type"] == model.config.model_type
    assert checkpoint.name == path.name


def test_tokenizer_template_and_settings_are_read(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.tokenizer_json == (directory / "tokenizer.json").read_bytes()
    named = {key: checkpoint.tokenizer_config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    assert named == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "unk_token": None, "pad_token": "<|endoftext|>"}
    assert checkpoint.generation_config["eos_token_id"] == 3
    assert (checkpoint.chat_template, checkpoint.chat_template_source) == (CHATML, "chat_template.jinja")


def edit(path: Path, **changes: object) -> None:
    """Sets keys of a JSON file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_templates_are_looked_for_in_order(directory: Path) -> None:
    def found() -> tuple[str | None, str | None]:
        checkpoint = open_checkpoint(directory)
        return checkpoint.chat_template, checkpoint.chat_template_source

    edit(directory / "chat_template.json", chat_template="from json")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from list"}]
    edit(directory / "tokenizer_config.json", chat_template=named)
    assert found() == (CHATML, "chat_template.jinja")
    (directory / "chat_template.jinja").unlink()
    assert found() == ("from list", "tokenizer_config.json")
    assert "tool_use" in open_checkpoint(directory).notices[0]
    edit(directory / "tokenizer_config.json", chat_template="from text")
    assert found() == ("from text", "tokenizer_config.json")
    edit(directory / "tokenizer_config.json", chat_template=None)
    assert found() == ("from json", "chat_template.json")
    (directory / "chat_template.json").unlink()
    assert found() == (None, None)
    edit(directory / "tokenizer_config.json", chat_template=7)
    with pytest.raises(InputError, match="chat_template is a int"):
        found()


def test_special_tokens_may_be_objects_or_live_in_their_own_map(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    content = json.loads((directory / "tokenizer_config.json").read_text())
    del content["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    edit(directory / "special_tokens_map.json", pad_token={"content": "<|endoftext|>"}, eos_token="overridden")
    settings = open_checkpoint(directory).tokenizer_config
    assert (settings["eos_token"], settings["pad_token"]) == ("<|im_end|>", "<|endoftext|>")


def test_a_link_into_a_cache_is_followed(directory: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(directory.iterdir()):
        moved = path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(moved)
    assert len(open_checkpoint(directory).tensors) == 21


def test_a_sentencepiece_model_is_converted(directory: Path, tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    for name in ("tokenizer.json", "tokenizer.vocab"):
        (directory / name).unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    from tokenizers import Tokenizer

    converted = Tokenizer.from_buffer(open_checkpoint(directory).tokenizer_json)
    text = "the quick dog jumps"
    truth = AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"]
    assert converted.encode(text, add_special_tokens=False).ids == truth


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), r"no config\.json; a Hugging Face directory or a \.gguf"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json: not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), r"config\.json: a JSON list"),
    "config is nested": (
        lambda d: (d / "config.json").write_text('{"a":' + "[" * 100000),
        r"config\.json: JSON nested",
    ),
    "config repeats a key": (lambda d: (d / "config.json").write_text('{"a":1,"a":2}'), r"key 'a' occurs twice"),
    "config is a folder": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        r"config\.json: not a regular file",
    ),
    "packed weights": (
        lambda d: edit(d / "config.json", quantization_config={"quant_method": "gptq"}),
        r"packed with 'gptq' are not read",
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer\.json and no tokenizer\.model"),
    "tokenizer is no tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{}"),
        r"tokenizer\.json: the tokenizers library",
    ),
    "index climbs": (lambda d: index(d, "../model.safetensors"), r"weight_map of \S+ is '\.\./model\.safetensors'"),
    "index is absolute": (lambda d: index(d, "/etc/passwd"), r"is '/etc/passwd'; only files beside the index"),
    "index has backslashes": (lambda d: index(d, "..\\model.safetensors"), r"only files beside the index"),
    "index names no file": (lambda d: index(d, 3), r"only files beside the index"),
    "shard missing": (lambda d: index(d, "model-9.safetensors"), r"model-9\.safetensors: this shard is missing"),
    "no weight map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        r"weight_map is missing or empty",
    ),
    "tensor elsewhere": (lambda d: swap_shards(d), r"tensor \S+ is missing; model\.safetensors\.index\.json says"),
    "only pickles": (lambda d: pickle_only(d), r"pytorch_model\.bin: pickled weights are never loaded; convert them"),
    "no weights": (lambda d: (d / "model.safetensors.index.json").unlink(), r"no model\.safetensors and no"),
    "special token is a number": (lambda d: edit(d / "tokenizer_config.json", eos_token=3), r"eos_token is '3'"),
}


def index(directory: Path, shard: object) -> None:
    """Points one tensor of the index elsewhere."""
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(content))


def swap_shards(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"] = {
        name: shards[(shards.index(shard) + 1) % len(shards)] for name, shard in content["weight_map"].items()
    }
    path.write_text(json.dumps(content))


def pickle_only(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damage_is_one_line_that_names_it(directory: Path, damage: str) -> None:
    spoil, words = DAMAGE[damage]
    spoil(directory)
    with pytest.raises(InputError, match=words) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named_when_it_is_needed(directory: Path) -> None:
    with pytest.raises(InputError, match=r"tensor lm_tail\.weight is missing"):
        open_checkpoint(directory).tensor("lm_tail.weight")
