"""Chat templates for tests, one a model family: each written anew after what is known of the family's prompts."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent

_VARIANTS = {
    "qwen38_dense": ("qwen38", ""),  # the same template
    "deepseek4": ("deepseek", ""),
    "deepseek41": ("deepseek", "newer"),
    "kimi3": ("kimi", ""),
    "kimi31": ("kimi", "stoppable"),
    "gemma4": ("gemma4", ""),
    "gemma4_edge": ("gemma4", "edge"),
}
"""Families that share a file: which one, and which of the file's switches is on."""

SPECIAL = {
    "deepseek4": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "deepseek41": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "gemma4": {"bos_token": "<bos>"},
    "gemma4_edge": {"bos_token": "<bos>"},
    "llama3": {"bos_token": "<|begin_of_text|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "muse_spark": {"bos_token": "<|begin_of_text|>"},
    "step5": {"bos_token": "<s>"},
}
"""The special tokens that a family's template prints by name."""

FAMILIES = sorted(
    {path.stem for path in FOLDER.glob("*.jinja")} - {file for file, _ in _VARIANTS.values()} | {*_VARIANTS, "qwen38"}
)


def source(family: str) -> str:
    """The template of a family."""
    file, switch = _VARIANTS.get(family, (family, ""))
    text = (FOLDER / f"{file}.jinja").read_text()
    if not switch:
        return text
    off = f"{{%- set {switch} = false -%}}"
    assert text.count(off) == 1
    return text.replace(off, off.replace("false", "true"))
