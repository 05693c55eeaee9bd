"""Tokenizers of model families, against the native ones; round trips of ten thousand texts; text while tokens come."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare.text.detokenizer import Detokenizer
from flare.text.tokenizer import Tokenizer
from tests.text import oracles, samples

TEXTS = 10_000
BLOCKS = (
    (0x09, 0x0D),
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x6FF),
    (0x900, 0xDFF),
    (0x1E00, 0x206F),
    (0x2190, 0x2BFF),
    (0x3000, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xE000, 0xF8FF),
    (0xFE00, 0xFFFD),
    (0x1F000, 0x1FAFF),
    (0, 0x10FFFF),
)
"""Where characters are drawn from: mostly from one block a run, so that words and scripts occur."""


def random_texts(seed: int, count: int = TEXTS) -> Iterator[str]:
    """Texts of any characters but surrogates, some with what templates and models write."""
    draw = random.Random(seed)
    words = [*samples.SPELLINGS, "<|im_end|>", "<｜User｜>", "the", " and", "  ", "\n\n", "\r\n", "x" * 40, "🏳️‍🌈", "▁"]
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(0, 5)):
            low, high = draw.choice(BLOCKS)
            run = (draw.randint(low, high) for _ in range(draw.randint(1, 6)))
            parts.append("".join(chr(code) for code in run if not 0xD800 <= code < 0xE000))
            parts.append(draw.choice(words) if draw.random() < 0.3 else "")
        yield "".join(parts)


REPEATED = [
    *samples.SPELLINGS,
    " ",
    "\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u2028",
    "-",
    "e\u0301",
    "U\u0308\u0304",
    "\u212a",
    "\u03b1\u0313\u0300\u0345",
    "\u1100\u1161\u11a8",
    "\ufb01",
    "M",
    "\u4f60",
    "\u0438\u0306",
    "\ud800",
]


def repeated_texts(seed: int, count: int) -> Iterator[str]:
    """Texts in which a few parts come many times over: what long tokens are made of, and what normalising shortens."""
    draw = random.Random(seed)
    for _ in range(count):
        yield "".join(draw.choice(REPEATED) * draw.choice((1, 3, 17, 140)) for _ in range(draw.randint(1, 4)))


def streamed(tokenizer: Tokenizer, ids: list[int], **options: object) -> str:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()


FEWER = {"deepseek4": 2000, "deepseek41": 500, "nemotron_h": 2000, "qwen38": 1000}
"""The native encoders take about a millisecond a text; GLM's and Qwen3's tokenizers get them all."""


@pytest.mark.parametrize("family", oracles.TOKENIZERS)
def test_texts_come_back_from_the_native_ids(family: str) -> None:
    tokenizer, native = oracles.wrapped(family), oracles.native_tokenizer(family)
    other = 0
    count = FEWER.get(family, TEXTS)
    for text in random_texts(1, count):
        ids = tokenizer.encode(text, special=False)
        other += ids != native.encode_ordinary(text)
        expected = unicodedata.normalize("NFC", text) if family.startswith("qwen") else text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected
        assert streamed(tokenizer, ids) == native.decode(ids) == expected
    # The native encoder finds tokens that no sequence of merges makes; GLM's vocabulary alone has such ones.
    assert other <= (count // 500 if family == "glm53" else 0)


@pytest.mark.parametrize("family", oracles.TOKENIZERS)
def test_text_while_tokens_come_equals_the_native_text_of_all(family: str) -> None:
    """Any tokens in any order: half characters included."""
    tokenizer, native = oracles.wrapped(family), oracles.native_tokenizer(family)
    ordinary = [
        id for id in range(tokenizer.vocab_size) if id not in tokenizer.control_ids and tokenizer.token_bytes(id)
    ]
    broken = [id for id in ordinary if b"\xef\xbf\xbd" in tokenizer.token_bytes(id).decode("utf-8", "replace").encode()]
    assert len(broken) >= 128  # every single byte, and more
    draw = random.Random(2)
    for _ in range(2000):
        ids = [draw.choice(draw.choice((ordinary, broken))) for _ in range(draw.randint(0, 12))]
        assert streamed(tokenizer, ids) == native.decode(ids)


@pytest.mark.parametrize("family", oracles.TOKENIZERS)
def test_every_control_token_spelled_in_a_message_stays_text(family: str) -> None:
    tokenizer, native = oracles.wrapped(family), oracles.native_tokenizer(family)
    opening = native.decode([native.encode_special(native.special_tokens()[1])])
    assert tokenizer.token_to_id(opening) is not None
    for name in native.special_tokens():
        spelling = native.decode([native.encode_special(name)])
        assert tokenizer.encode(spelling) == [native.encode_special(name)]
        for content in (spelling, f"a{spelling}b", spelling * 2, f"{spelling[:-1]}{spelling}"):
            protected = tokenizer.controls.protect([content])
            ids = tokenizer.encode_rendered(f"{opening}{protected.value[0]}{opening}", protected.mark or "\ue000")
            marker = tokenizer.token_to_id(opening)
            assert ids == [marker, *native.encode_ordinary(content), marker]


@pytest.mark.parametrize("kind", sorted(samples.ALL))
def test_ten_thousand_texts_through_each_kind_of_tokenizer(kind: str) -> None:
    """Byte-level and SentencePiece: what comes back is the library's text, and the text itself where the kind keeps it."""
    base, tokenizer = samples.ALL[kind](), samples.wrapped(kind)
    for text in random_texts(3):
        ids = tokenizer.encode(text)
        assert ids == base.encode(text, add_special_tokens=False).ids
        whole = base.decode(ids, skip_special_tokens=False)
        assert streamed(tokenizer, ids, hidden=frozenset()) == whole
        if kind != "unigram":  # which has no bytes, and a normaliser
            assert bare(whole) == bare(text)


def bare(text: str) -> str:
    """A text without white space, some of which the samples' control tokens take away, and without SentencePiece's."""
    return "".join(text.replace("▁", " ").split())


def check_fewest(tokens: Tokenizer, text: str) -> None:
    """Checks that a text is not said to have more tokens than it has, as what it may be in a prompt."""
    least = tokens.fewest_tokens(text)
    assert least <= len(tokens.encode(text)), text
    assert least <= len(tokens.encode(text, special=False)), text
    protected = tokens.controls.protect([text.replace("\ud800", "")])
    if protected.mark:
        rendered = f"<s>{protected.value[0]}<|im_end|>"
        assert tokens.fewest_tokens(rendered, protected.mark) <= len(tokens.encode_rendered(rendered, protected.mark))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are measured too."""
    monkeypatch.setattr("flare.text.tokenizer.WORTH", 0)


@pytest.mark.parametrize("family", oracles.TOKENIZERS)
def test_no_text_has_fewer_tokens_than_is_said(family: str, measured: None) -> None:
    tokenizer = oracles.wrapped(family)
    for text in (*random_texts(11, 400), *repeated_texts(11, 80)):
        check_fewest(tokenizer, text)


@pytest.mark.parametrize("family", oracles.TOKENIZERS)
def test_the_fewest_tokens_are_those_of_a_text_of_the_longest(family: str, measured: None) -> None:
    """Of two kinds: with the most bytes, and with the most letters. Prose has some ten to thirty times as many."""
    tokenizer = oracles.wrapped(family)
    table = [
        tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size) if token not in tokenizer.control_ids
    ]
    for longest in (
        max(table, key=len),
        max(table, key=lambda data: sum(byte < 128 and chr(byte).isalpha() for byte in data)),
    ):
        text = longest.decode()
        assert len(tokenizer.encode(text)) == 1
        assert tokenizer.fewest_tokens(text * 50) == 50 <= len(tokenizer.encode(text * 50))
    prose = samples.PAGE.encode("ascii", "ignore").decode() * 200
    assert len(tokenizer.encode(prose)) / tokenizer.fewest_tokens(prose) < 32


def test_smollm2s_vocabulary_which_lacks_bytes(smollm2_gguf: Path, measured: None) -> None:
    from ignition.checkpoint.gguf import open_file

    tokenizer = Tokenizer.load(open_file(smollm2_gguf).tokenizer_json)
    assert not tokenizer.encode("\x04\x13")
    for text in (*random_texts(13, 400), *repeated_texts(13, 80), "\x04" * 9999):
        check_fewest(tokenizer, text)
    assert tokenizer.fewest_tokens(samples.PAGE * 100) > 300
