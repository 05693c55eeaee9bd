"""Tokenizers from GGUF metadata: the ids that llama.cpp gives for the same files, recorded once.

data/byte_level_ids.json holds llama.cpp's ids for SmolLM2's vocabulary under each splitting (those equal to "smollm"
are left out), data/extended_ids.json the same with more merges and tokens, data/sentencepiece_ids.json a small
SentencePiece vocabulary and its ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from flare.errors import InputError
from ignition.checkpoint.gguf_fields import Fields
from ignition.checkpoint.gguf_file import GgufFile, read_gguf
from ignition.checkpoint.gguf_tokenizer import convert_tokenizer

DATA = Path(__file__).parent / "data"
SPLITTINGS = ["smollm", "gpt-2", "default", "llama-bpe", "smaug-bpe", "qwen2", "tekken"]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> dict[str, Any]:
    return read_gguf(smollm2_gguf).metadata


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    return json.loads((DATA / "sentencepiece_ids.json").read_text())


def converted(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    found = convert_tokenizer(Fields(GgufFile(Path("x.gguf"), metadata, {})))
    return Tokenizer.from_buffer(found.json), found.config


def sentencepiece_metadata(pieces: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces["tokens"],
        "tokenizer.ggml.scores": np.array(pieces["scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(pieces["types"], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_byte_level_ids_equal_llama_cpp(smollm2: dict[str, Any], splitting: str) -> None:
    tokenizer, _ = converted(smollm2 | {"tokenizer.ggml.pre": splitting})
    recorded = json.loads((DATA / "byte_level_ids.json").read_text())
    assert len(recorded) > 60
    for text, ids in recorded.items():
        truth = ids.get(splitting, ids["smollm"])
        assert tokenizer.encode(text, add_special_tokens=False).ids == truth, text
        assert tokenizer.decode(truth, skip_special_tokens=False) == text


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_digit_groups_and_whole_pieces_equal_llama_cpp(smollm2: dict[str, Any], splitting: str) -> None:
    """SmolLM2's vocabulary has no token of two digits and none that merges do not reach; this one is given some."""
    extended = json.loads((DATA / "extended_ids.json").read_text())
    tokens, types = list(smollm2["tokenizer.ggml.tokens"]), smollm2["tokenizer.ggml.token_type"].tolist()
    known = set(tokens)
    for token in [*(merge.replace(" ", "") for merge in extended["merges"]), *extended["tokens"]]:
        if token not in known:
            known.add(token)
            tokens.append(token)
            types.append(1)
    metadata = smollm2 | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.merges": smollm2["tokenizer.ggml.merges"] + extended["merges"],
        "tokenizer.ggml.pre": splitting,
    }
    tokenizer, _ = converted(metadata)
    for text, ids in extended["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids.get(splitting, ids["smollm"]), text


def test_sentencepiece_ids_equal_llama_cpp(pieces: dict[str, Any]) -> None:
    tokenizer, config = converted(sentencepiece_metadata(pieces))
    assert len(pieces["ids"]) > 60
    for text, ids in pieces["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        if "<|" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert config["add_bos_token"] is True


def test_control_tokens_are_special_and_user_defined_ones_are_not(pieces: dict[str, Any]) -> None:
    tokenizer, _ = converted(sentencepiece_metadata(pieces))
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {
        "<unk>": True,
        "<s>": True,
        "</s>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<tool>": False,
    }
    ids = tokenizer.encode("a<tool>b<|im_end|>", add_special_tokens=False).ids
    assert {tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("<|im_end|>")} <= set(ids)
    assert tokenizer.decode(ids) == "a<tool> b"


def test_bos_and_eos_are_added_as_the_file_says(pieces: dict[str, Any], smollm2: dict[str, Any]) -> None:
    def ends(metadata: dict[str, Any]) -> list[str]:
        return converted(metadata)[0].encode("a").tokens

    assert ends(sentencepiece_metadata(pieces)) == ["<s>", "▁a"]
    both = sentencepiece_metadata(pieces, **{"tokenizer.ggml.add_eos_token": True})
    assert ends(both) == ["<s>", "▁a", "</s>"]
    assert ends(both | {"tokenizer.ggml.add_bos_token": False}) == ["▁a", "</s>"]
    assert ends(smollm2) == ["a"]
    unsaid = {key: value for key, value in smollm2.items() if key != "tokenizer.ggml.add_bos_token"}
    assert ends(unsaid | {"tokenizer.ggml.pre": "llama-bpe"}) == ["<|im_start|>", "a"]


def test_without_space_prefix_nothing_is_put_before_the_text(pieces: dict[str, Any]) -> None:
    tokenizer, _ = converted(sentencepiece_metadata(pieces, **{"tokenizer.ggml.add_space_prefix": False}))
    ids = tokenizer.encode("the", add_special_tokens=False).ids
    assert not tokenizer.id_to_token(ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "the"


def test_scores_must_be_numbers(pieces: dict[str, Any]) -> None:
    scores = np.array(pieces["scores"], np.float32)
    scores[5] = np.nan
    with pytest.raises(InputError, match="scores holds values that are not numbers"):
        converted(sentencepiece_metadata(pieces, **{"tokenizer.ggml.scores": scores}))


def test_an_id_of_none_is_none(pieces: dict[str, Any]) -> None:
    _, config = converted(sentencepiece_metadata(pieces, **{"tokenizer.ggml.bos_token_id": 0xFFFFFFFF}))
    assert config["bos_token"] is None and config["add_bos_token"] is False
