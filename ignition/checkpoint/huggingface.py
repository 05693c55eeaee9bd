"""A Hugging Face directory: config.json, safetensors weights (one file or shards), fast tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from flare.errors import InputError
from ignition.checkpoint import wrong_source
from ignition.checkpoint.files import check_tokenizer, printable, read_bytes, read_object, read_text, reason
from ignition.checkpoint.interface import Checkpoint
from ignition.checkpoint.safetensors_file import open_safetensors
from ignition.checkpoint.tensors import LazyTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def open_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """Opens a directory as `save_pretrained` writes it and as the hub's cache lays it out (links are followed).

    Raises InputError when a file is missing, damaged or of a kind that is not read.
    """
    if not (directory / "config.json").exists():
        raise InputError(f"{directory}: {wrong_source.directory(directory)}")
    config = read_object(directory / "config.json")
    _refuse_packed_weights(directory, config)
    tensors = _open_weights(directory)
    tokenizer_config = _tokenizer_config(directory)
    template, template_source = _chat_template(directory, tokenizer_config)
    generation_config = directory / "generation_config.json"
    return Checkpoint(
        name=name or directory.resolve().name,
        source=str(directory),
        config=config,
        tensors=tensors,
        tokenizer_json=_tokenizer_json(directory),
        tokenizer_config=tokenizer_config,
        chat_template=template,
        chat_template_source=template_source,
        generation_config=read_object(generation_config) if generation_config.exists() else {},
        notices=_notices(tokenizer_config),
    )


def _refuse_packed_weights(directory: Path, config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise InputError(
            f"{directory / 'config.json'}: quantization_config: weights packed with {str(method)[:40]!r} are not read; "
            "export from the original checkpoint or from a GGUF file"
        )


# ---- weights


def _open_weights(directory: Path) -> dict[str, LazyTensor]:
    if (directory / SINGLE).exists():
        return open_safetensors(directory / SINGLE)
    if (directory / INDEX).exists():
        return _open_shards(directory)
    pickled = sorted(path.name for path in (*directory.glob("pytorch_model*.bin"), *directory.glob("*.pt*")))
    if pickled:
        raise InputError(
            f"{directory / pickled[0]}: pickled weights are never loaded; convert them in a place that you "
            "trust: load them "
            "with transformers' from_pretrained and write them with save_pretrained, which stores safetensors"
        )
    raise InputError(f"{directory}: no {SINGLE} and no {INDEX}; weights are read from safetensors files")


def _open_shards(directory: Path) -> dict[str, LazyTensor]:
    index_path = directory / INDEX
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_path}: weight_map is missing or empty")
    shards: dict[str, dict[str, LazyTensor]] = {}
    tensors: dict[str, LazyTensor] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise InputError(
                f"{index_path}: weight_map of {printable(name)} is {str(shard)[:200]!r}; only files beside "
                "the index are read"
            )
        if shard not in shards:
            if not (directory / shard).exists():
                raise InputError(f"{directory / shard}: this shard is missing; {INDEX} needs it for {printable(name)}")
            shards[shard] = open_safetensors(directory / shard)
        if name not in shards[shard]:
            raise InputError(f"{directory / shard}: tensor {printable(name)} is missing; {INDEX} says that it is here")
        tensors[name] = shards[shard][name]
    return tensors


def _stays_inside(name: str) -> bool:
    """A relative path with forward slashes that never climbs."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(name) & {"\\", "\0", ":"}


# ---- tokenizer and template


def _tokenizer_json(directory: Path) -> bytes:
    path = directory / "tokenizer.json"
    if not path.exists():
        return _converted_tokenizer(directory)
    content = read_bytes(path)
    check_tokenizer(content, str(path))
    return content


def _converted_tokenizer(directory: Path) -> bytes:
    """tokenizer.json made from tokenizer.model (SentencePiece) by transformers, without code from the checkpoint."""
    if not (directory / "tokenizer.model").exists():
        raise InputError(f"{directory}: no tokenizer.json and no tokenizer.model")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, local_files_only=True, trust_remote_code=False
        )
        return tokenizer.backend_tokenizer.to_str().encode()
    except Exception as error:  # conversion fails in as many ways as there are tokenizers
        raise InputError(
            f"{directory / 'tokenizer.model'}: cannot be converted to tokenizer.json ({reason(error)}); save "
            "a fast tokenizer beside it"
        ) from None


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json with the four special tokens as plain strings, completed from special_tokens_map.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).exists():
            settings.update(read_object(directory / name))
    for key in _SPECIAL_TOKENS:
        token = settings.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise InputError(f"{directory / 'tokenizer_config.json'}: {key} is {str(token)[:80]!r}, a string is needed")
        settings[key] = token
    return settings


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template and the file it comes from: chat_template.jinja, tokenizer_config.json, chat_template.json, in
    that order.
    """
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja"), "chat_template.jinja"
    template = _default_template(directory / "tokenizer_config.json", tokenizer_config.get("chat_template"))
    if template is not None:
        return template, "tokenizer_config.json"
    path = directory / "chat_template.json"
    if path.exists():
        template = _default_template(path, read_object(path).get("chat_template"))
        if template is not None:
            return template, path.name
    return None, None


def _default_template(path: Path, value: object) -> str | None:
    """A template, or the entry named "default" of a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return entry["template"]
        return None
    raise InputError(
        f"{path}: chat_template is a {type(value).__name__}, a string or a list of named templates is needed"
    )


def _notices(tokenizer_config: dict[str, Any]) -> tuple[str, ...]:
    templates = tokenizer_config.get("chat_template")
    if not isinstance(templates, list):
        return ()
    others = [
        str(entry.get("name")) for entry in templates if isinstance(entry, dict) and entry.get("name") != "default"
    ]
    return (
        (f"chat_template: only the default template is exported, not {printable(', '.join(others))}",) if others else ()
    )
