"""GGUF's tokenizer metadata as a tokenizer.json.

Two kinds exist here. "gpt2" is byte-level BPE: the text is cut by regular expressions that `tokenizer.ggml.pre`
names, then merged by rank. "llama" is SentencePiece's BPE: a piece's score decides which neighbours join first,
spaces are written as a low bar, and characters without a piece fall back to bytes. Both become the `tokenizers`
library's BPE model; the second one's merges are rebuilt from the scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.files import check_tokenizer
from ignition.checkpoint.gguf_fields import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's mark for a space


@dataclass(frozen=True)
class Tokenizer:
    """tokenizer.json, the settings of tokenizer_config.json, ids (None where the file names none) and the number of
    tokens.

    `ends` are all ids that end a generation: end of sequence, of turn and of message.
    """

    json: bytes
    config: dict[str, Any]
    size: int
    bos: int | None
    eos: int | None
    pad: int | None
    ends: list[int]


@dataclass(frozen=True)
class _Splitting:
    """How one value of `tokenizer.ggml.pre` cuts text: patterns applied one after the other to the pieces of the one
    before.

    `whole_pieces`: a piece that is a token as it stands is not merged from its parts. `bos` is the default of
    add_bos_token.
    """

    patterns: tuple[str, ...]
    whole_pieces: bool = False
    bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _MARKS_AND_SPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTINGS = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Splitting((_GPT2,)),
    "smollm": _Splitting((r"\p{N}", _GPT2)),
    "llama-bpe": _Splitting((_LLAMA3,), whole_pieces=True, bos=True),
    "smaug-bpe": _Splitting((_LLAMA3,)),
    "qwen2": _Splitting((_CONTRACTION + _LETTERS + r"\p{N}" + _MARKS_AND_SPACE,)),
    "tekken": _Splitting((_TEKKEN,), whole_pieces=True, bos=True),
}


def convert_tokenizer(fields: Fields) -> Tokenizer:
    """The file's tokenizer. Raises InputError for kinds that are not read and for vocabularies that contradict
    themselves.
    """
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        index = next(index for index, token in enumerate(tokens) if ids[token] != index)
        raise InputError(
            f"{fields.path}: tokenizer.ggml.tokens[{index}] {tokens[index][:40]!r} occurs again at {ids[tokens[index]]}"
        )
    types = _numbers(fields, "tokenizer.ggml.token_type", len(tokens), "iu")
    kind = fields.text("tokenizer.ggml.model", None)
    if kind == "gpt2":
        document, add_bos = _byte_level(fields, ids)
    elif kind == "llama":
        document, add_bos = _sentencepiece(fields, tokens, ids, types), True
    else:
        raise fields.fail("tokenizer.ggml.model", "readable are gpt2 and llama")

    special = {
        name: _token_id(fields, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    add_bos = fields.boolean("tokenizer.ggml.add_bos_token", add_bos) and special["bos"] is not None
    add_eos = fields.boolean("tokenizer.ggml.add_eos_token", False) and special["eos"] is not None
    document["added_tokens"] = [
        _added_token(index, tokens[index], special=int(types[index]) != _USER_DEFINED)
        for index in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    ]
    ends = (special["bos"] if add_bos else None, special["eos"] if add_eos else None)
    document["post_processor"] = _framed(document["post_processor"], tokens, *ends)
    content = json.dumps(document, ensure_ascii=False).encode()
    check_tokenizer(content, f"{fields.path}: tokenizer.ggml")

    named = {key: None if index is None else tokens[index] for key, index in special.items()}
    config = {
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["padding"],
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    stops = dict.fromkeys(stop for key in ("eos", "eot", "eom") if (stop := special[key]) is not None)
    return Tokenizer(content, config, len(tokens), special["bos"], special["eos"], special["padding"], list(stops))


# ---- byte-level BPE


def _byte_level(fields: Fields, ids: dict[str, int]) -> tuple[dict[str, Any], bool]:
    name = fields.text("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name or "")
    if splitting is None:
        raise fields.fail("tokenizer.ggml.pre", f"readable are {', '.join(_SPLITTINGS)}")
    merges = []
    for index, merge in enumerate(_strings(fields, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            problem = "two tokens that join to a third are needed" if space else "no space divides it"
            raise InputError(f"{fields.path}: tokenizer.ggml.merges[{index}] is {merge[:80]!r}: {problem}")
        merges.append([left, right])
    split = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitting.patterns
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, bytes_]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "ignore_merges": splitting.whole_pieces,
            "vocab": ids,
            "merges": merges,
        },
    }
    return document, splitting.bos


# ---- SentencePiece


def _sentencepiece(fields: Fields, tokens: list[str], ids: dict[str, int], types: np.ndarray) -> dict[str, Any]:
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens), "f")
    unknown = np.flatnonzero(types == _UNKNOWN)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if fields.boolean("tokenizer.ggml.add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[int(unknown[0])] if unknown.size else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": _merges_from_scores(tokens, ids, types, scores),
        },
    }


def _merges_from_scores(
    tokens: list[str], ids: dict[str, int], types: np.ndarray, scores: np.ndarray
) -> list[list[str]]:
    """Every way to cut a piece into two pieces, best score of the whole first; equal scores by the whole's id.

    Control and byte pieces never come out of a merge.
    """
    mergeable = set(np.flatnonzero(np.isin(types, (_NORMAL, _USER_DEFINED, _UNUSED))).tolist())
    order = sorted((index for index in mergeable if len(tokens[index]) > 1), key=lambda index: (-scores[index], index))
    merges = []
    for index in order:
        whole = tokens[index]
        cuts = ((whole[:at], whole[at:]) for at in range(1, len(whole)))
        merges += sorted(
            ([left, right] for left, right in cuts if left in ids and right in ids),
            key=lambda cut: (ids[cut[0]], ids[cut[1]]),
        )
    return merges


# ---- shared parts


def _added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _framed(
    processor: dict[str, Any] | None, tokens: list[str], bos: int | None, eos: int | None
) -> dict[str, Any] | None:
    """`processor` followed by a template that adds the two tokens to a lone text; ids are None for those not added."""
    if bos is None and eos is None:
        return processor

    def token(index: int | None) -> list[dict[str, Any]]:
        return [] if index is None else [{"SpecialToken": {"id": tokens[index], "type_id": 0}}]

    template = {
        "type": "TemplateProcessing",
        "single": [*token(bos), {"Sequence": {"id": "A", "type_id": 0}}, *token(eos)],
        "pair": [
            *token(bos),
            {"Sequence": {"id": "A", "type_id": 0}},
            *token(bos),
            {"Sequence": {"id": "B", "type_id": 1}},
            *token(eos),
        ],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (bos, eos)
            if index is not None
        },
    }
    return template if processor is None else {"type": "Sequence", "processors": [processor, template]}


def _token_id(fields: Fields, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = fields.metadata.get(key)
    if index is None or index == 0xFFFFFFFF or index == -1:  # both are written for "none"
        return None
    if type(index) is not int or not 0 <= index < size:
        raise fields.fail(key, f"an id below {size} is needed")
    return index


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise InputError(f"{fields.path}: {key} is missing or is not an array of strings")
    return value


def _numbers(fields: Fields, key: str, size: int, kinds: str) -> np.ndarray:
    value = fields.metadata.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
        raise InputError(f"{fields.path}: {key} is missing or is not an array of numbers")
    if value.size != size:
        raise InputError(f"{fields.path}: {key} has {value.size} entries, tokenizer.ggml.tokens has {size}")
    if kinds == "f" and np.isnan(value).any():
        raise InputError(f"{fields.path}: {key} holds values that are not numbers")
    return value
