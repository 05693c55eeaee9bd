"""How few tokens a text can have: never more than it has, for any tokenizer and text, and close to it where tokens are long."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flare.text import fewest, tokenizer
from flare.text.tokenizer import Tokenizer as Wrapped
from tests.text import samples
from tests.text.test_real_tokenizers import check_fewest, random_texts, repeated_texts


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are measured too."""
    monkeypatch.setattr(tokenizer, "WORTH", 0)


def composing() -> Tokenizer:
    """Bytes behind NFC, with tokens for all pairs of a few letters and of marks."""
    marks = ["\u0301", "\u0308", "\u0304", "\u00e9", "\u01d5", "\u1ea4", "\uac01", "e", "K"]
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.NFC()
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    base.train_from_iterator([a * 3 + b for a in marks for b in marks] * 4, trainer)
    base.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    return base


KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{name: make for name, make in samples.ALL.items() if name != "unigram"},
    "composing": composing,
}


@pytest.mark.parametrize("kind", KINDS)
def test_never_more_than_a_text_has_in_every_kind_of_tokenizer(kind: str) -> None:
    tokens = Wrapped(KINDS[kind]())
    assert tokens.fewest_tokens("a" * 5000)
    for text in (*random_texts(12, 1500), *repeated_texts(12, 150)):
        check_fewest(tokens, text)


def test_white_space_that_controls_swallow_is_not_counted() -> None:
    tokens = samples.wrapped("byte_level")
    for text in ("<|end|>" + " \n\u3000" * 5000, "\u00a0 " * 5000 + "<mask>"):
        assert tokens.fewest_tokens(text) <= len(tokens.encode(text)) == 1


def test_marks_are_not_counted() -> None:
    tokens = Wrapped(byte_level_without_strips())
    rendered, mark = "-\ue000" * 3000, "\ue000"
    assert tokens.fewest_tokens(rendered, mark) == tokens.fewest_tokens("-" * 3000) < tokens.fewest_tokens(rendered)


def byte_level_without_strips() -> Tokenizer:
    state = json.loads(samples.byte_level().to_str())
    state["added_tokens"] = [token | {"lstrip": False, "rstrip": False} for token in state["added_tokens"]]
    return Tokenizer.from_str(json.dumps(state))


def test_short_texts_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "WORTH", fewest.WORTH)
    tokens = Wrapped(samples.byte_level())
    assert tokens.fewest_tokens("a" * (fewest.WORTH - 1)) == 0 and "_fewest" not in vars(tokens)
    assert tokens.fewest_tokens("a" * fewest.WORTH) > 0


def test_what_composing_does_to_sizes_and_letters() -> None:
    """A character of composed text comes of its parts, and these of whatever decomposes to them: what that counts at most is
    held against what the character counts."""
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    assert not any(letter(char) for char in everything if char.isspace())
    parts = {char: unicodedata.normalize("NFD", char) for char in everything}
    parts = {char: found for char, found in parts.items() if found != char}
    assert len(parts) > 13_000
    alone = {part for found in parts.values() for part in found}
    sizes = {part: size(part) for part in alone}
    letters = {part: letter(part) for part in alone}
    for char, found in parts.items():
        if len(found) == 1:
            sizes[found] = max(sizes[found], size(char))
            letters[found] |= letter(char)
        else:
            letters[found[0]] |= letter(char)
    for char, found in [*parts.items(), *((part, part) for part in alone)]:
        most, most_letters = sum(sizes[part] for part in found), sum(letters[part] for part in found)
        assert size(char) <= most and letter(char) <= most_letters
        if unicodedata.normalize("NFC", char) == char:
            assert most <= len(char.encode()) and len(found) <= fewest.COMPOSED
            assert most_letters <= fewest._letters(char.encode())


def size(char: str) -> float:
    return 1 if char.isascii() else len(char.encode()) / fewest.COMPOSED


def letter(char: str) -> bool:
    return char.encode()[0] in fewest._LETTERS


def byte_level(**parts: Any) -> Tokenizer:
    """The sample with other parts."""
    base = Tokenizer.from_str(samples.byte_level().to_str())
    for name, part in parts.items():
        setattr(base, name, part)
    return base


ALPHABET = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def model(made: Any, pre_tokenizer: Any = None) -> Tokenizer:
    base = Tokenizer(made)
    if pre_tokenizer is not None:
        base.pre_tokenizer = pre_tokenizer
    return base


def composed(made: Any) -> Tokenizer:
    base = model(made, BYTES)
    base.normalizer = normalizers.NFC()
    return base


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (samples.unigram, "\u2603" * 3000),
        (lambda: model(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "b" * 3000),
        (lambda: model(models.WordPiece({"a": 0, "?": 1}, unk_token="?")), "b" * 3000),
        (lambda: model(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)), "b" * 3000),
        (lambda: model(models.BPE({"a": 0}, [], byte_fallback=True)), "b" * 3000),
        (lambda: composed(models.BPE({c: i for c, i in ALPHABET.items() if c != "b"}, [])), "b" * 3000),
        (lambda: model(models.BPE(ALPHABET, [], end_of_word_suffix="$"), BYTES), "b"),
        (lambda: byte_level(normalizer=normalizers.Strip()), "\n" * 3000),
        (lambda: byte_level(normalizer=normalizers.StripAccents()), "\u0301" * 3000),
        (lambda: byte_level(normalizer=normalizers.Replace("b", "")), "b" * 3000),
        (lambda: byte_level(normalizer=normalizers.Replace(Regex("b+"), "b")), "b" * 3000),
        (
            lambda: byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("b", "removed"), BYTES])),
            "b" * 3000,
        ),
        (lambda: byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES])), "\n" * 3000),
    ],
    ids=range(13),
)
def test_no_bound_where_a_token_may_stand_for_any_text(made: Callable[[], Tokenizer], text: str) -> None:
    tokens = Wrapped(made())
    assert tokens.fewest_tokens(text) == tokens.fewest_tokens("a" * 3000) == 0
    assert len(tokens.encode(text)) <= 2


def replacing(*pairs: tuple[str, str]) -> Wrapped:
    """Bytes behind Replace of these pairs and NFC, and a token for U+01D6: u, two dots and a line."""
    chars = {byte: char for char, byte in tokenizer._BYTE_OF_CHAR.items()}
    pair = tuple(chars[byte] for byte in "\u01d6".encode())
    base = composed(models.BPE(ALPHABET | {"".join(pair): len(ALPHABET)}, [pair]))
    base.normalizer = normalizers.Sequence([*(normalizers.Replace(*found) for found in pairs), normalizers.NFC()])
    return Wrapped(base)


def test_what_is_replaced_before_composing_must_stay_ascii() -> None:
    text = 'u"-' * 3000
    marks = replacing(('"', "\u0308"), ("-", "\u0304"))
    assert len(marks.encode(text)) == 3000 and marks.fewest_tokens(text) == 0
    signs = replacing(('"', "~"), ("-", "--"))
    assert 3000 < signs.fewest_tokens(text) <= len(signs.encode(text))


@pytest.mark.parametrize("sign", ["\u00b7", "\u2581", "\U0001f600"])
def test_a_sign_beyond_ascii_may_not_become_a_shorter_one(sign: str) -> None:
    tokens = Wrapped(byte_level(normalizer=normalizers.Replace(sign, "-")))
    assert tokens.fewest_tokens(sign * 3000) == 0


@pytest.mark.parametrize("unknown", [None, "?"])
def test_bytes_that_the_vocabulary_lacks_are_not_counted(unknown: str | None) -> None:
    """SmolLM2's lacks some control characters, and bytes of planes without characters."""
    lacking = {"b", *(char for char, byte in tokenizer._BYTE_OF_CHAR.items() if byte in (0x04, 0xD0, 0xF1, 0x80))}
    alphabet = {char: place for char, place in ALPHABET.items() if char not in lacking}
    base = model(models.BPE(alphabet, [], unk_token=unknown, fuse_unk=True), BYTES)
    tokens = Wrapped(base)
    for text in ("b" * 3000, "\u0400" * 3000, "\x04" * 3000, "\U00040000" * 3000):
        assert tokens.fewest_tokens(text) == 0 and len(tokens.encode(text)) <= 1
        assert tokens.fewest_tokens(f"{text}ac-{text}") == 3 <= len(tokens.encode(f"{text}ac-{text}"))
