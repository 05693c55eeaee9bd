"""Small tokenizers of the kinds that checkpoints bring, trained here on a page of text."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flare.text.tokenizer import Tokenizer as Wrapped

PAGE = (
    "The quick brown fox jumps over the lazy dog. Where there is text, there are tokens; a < b and c > d. "
    "def main(args):\n    return [x for x in args if x]\n<tool_call> im_start | im_end s inst mask user system "
    "Größe, naïve café, 你好世界, こんにちは, 😀😁 emoji. 0123456789 think end tool response\n\n"
)

CONTROLS = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("[INST]", special=True, normalized=False),
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
]
RUNS = [AddedToken("  ", special=False, normalized=False), AddedToken("    ", special=False, normalized=False)]

SPELLINGS = [token.content for token in CONTROLS]


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator([PAGE] * 4, trainer)
    return tokenizer


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    for token in CONTROLS:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.add_tokens(RUNS)
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _finish(
        _train(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    )


def _byte_fallback(tokenizer: Tokenizer) -> Tokenizer:
    """Adds SentencePiece's unknown and byte tokens to a trained BPE model."""
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    model |= {
        "vocab": {p: i for i, p in enumerate(pieces)},
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    return Tokenizer.from_str(json.dumps(state))


@cache
def metaspace(scheme: str) -> Tokenizer:
    """SentencePiece BPE with a Metaspace pre-tokenizer: `scheme` is "always", "first" or "never"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finish(_byte_fallback(_train(tokenizer, trainers.BpeTrainer(vocab_size=300, show_progress=False))))


@cache
def prepending() -> Tokenizer:
    """SentencePiece BPE as older conversions write it: the space is put by the normaliser."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(_byte_fallback(_train(tokenizer, trainers.BpeTrainer(vocab_size=300, show_progress=False))))


@cache
def unigram() -> Tokenizer:
    """SentencePiece unigram whose own pieces include the controls' spellings, as converted files have them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPELLINGS], unk_token="<unk>", show_progress=False
    )
    trained = _train(tokenizer, trainer)
    state = json.loads(trained.to_str())
    pieces = {piece for piece, _ in state["model"]["vocab"]}
    state["model"]["vocab"] += [[char, -12.0] for char in map(chr, range(33, 127)) if char not in pieces]
    state["added_tokens"] = []
    return _finish(Tokenizer.from_str(json.dumps(state)))


@cache
def matched_after_normalising() -> Tokenizer:
    """Byte-level with lower-casing, and controls that are looked for in the lower-cased text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_tokens([AddedToken(s, normalized=True, special=False) for s in ("<turn>", "<stop>")])
    return tokenizer


ALL = {
    "byte_level": byte_level,
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "prepending": prepending,
    "unigram": unigram,
}


@cache
def wrapped(kind: str) -> Wrapped:
    """Our tokenizer over the sample `kind`; immutable, so one will do for all tests."""
    return Wrapped(ALL[kind]())


def token_table(tokenizer: Wrapped) -> list[bytes]:
    """The bytes of every token, by its id."""
    return [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
