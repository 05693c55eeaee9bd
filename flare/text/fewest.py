"""How few tokens a text can have: told from its length, so that a prompt far over the context is never encoded.

Two measures of a text are held against the most that one token of the vocabulary has of them: its length, and its *letters*.
The longest tokens are runs of spaces and lines of dashes; of letters tokens have fewer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tokenizers

WORTH = 1 << 18
"""Characters of a text from which on it is measured. A shorter one is encoded in tenths of a second, which is what looking
through the vocabulary takes; that is done once, for the first longer text."""

COMPOSED = 4
"""NFC makes one character of so many at most, and one byte of UTF-8 of so many at most beyond ASCII, where each ASCII character
keeps a byte of its own. A test goes through all of Unicode."""

_ASCII_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS = frozenset((*_ASCII_LETTERS, 0xD0, 0xD1, *range(0xE4, 0xEE)))
"""What letters begin with in UTF-8: ASCII's, most Cyrillic ones, ideographs and syllables. None is white space, which some
control tokens swallow, and NFC makes a character beyond ASCII, or a letter, of no more than one of them."""

_NO_LETTERS = bytes(byte for byte in range(256) if byte not in _LETTERS)
_NEVER_LETTERS = bytes(byte for byte in range(0xC0) if byte not in _ASCII_LETTERS)
_ASCII = bytes(range(0x80))

_NEVER = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that UTF-8 does not have."""

_KEEPING = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"))
"""Pre-tokenizers that keep all of a text, unless their `behavior` is to remove."""


class Fewest(NamedTuple):
    """The most that a token of one tokenizer stands for.

    `length` is in bytes of UTF-8 where the model reads bytes (`of_bytes`), else in characters; 0 where tokens swallow white
    space of any length. `letters` are characters. `composes`: text is normalised to NFC before. `missing` are bytes that
    the vocabulary lacks: the model reads nothing of them.
    """

    length: int
    letters: int
    of_bytes: bool
    composes: bool
    missing: bytes

    def tokens(self, text: str, mark: str = "") -> int:
        """Returns a number of tokens that a text has at least. What is encoded of it has no `mark` any more (see
        `flare.text.controls`)."""
        data = text.encode(errors="replace")
        least = -(-len(data.translate(None, _NO_LETTERS + self.missing)) // self.letters)
        return max(least, -(-self._length(text, data, mark) // self.length)) if self.length else least

    def _length(self, text: str, data: bytes, mark: str) -> int:
        """Returns the least length of what the model reads."""
        marks = text.count(mark) if mark else 0
        if not self.of_bytes:
            return (len(text) - marks) // (COMPOSED if self.composes else 1)
        length = len(data.translate(None, self.missing)) - marks * len(mark.encode())
        if not self.composes:
            return length
        alone = len(data) - len(data.translate(None, _ASCII))
        return alone + (length - alone) // COMPOSED


def measure(
    base: tokenizers.Tokenizer, added: Collection[tokenizers.AddedToken], byte_of_char: Mapping[str, int]
) -> Fewest | None:
    """Returns the bounds of a tokenizer with these added tokens, None where a token may stand for any text: where unknown
    characters become one, or where a part of the tokenizer may shorten texts in ways not known here.

    `byte_of_char` says how byte-level vocabularies write bytes.
    """
    from tokenizers.models import BPE

    model = base.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    steps, changes = list(_parts(base.pre_tokenizer)), list(_parts(base.normalizer))
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
        return None
    of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    composes = any(change["type"] == "NFC" for change in changes)
    if not all(_keeps_length(change, composes) for change in changes):
        return None
    vocabulary = base.get_vocab(with_added_tokens=False)
    missing = bytes(byte for char, byte in byte_of_char.items() if char not in vocabulary and byte not in _NEVER)
    if of_bytes:
        if missing and composes:
            return None
    elif not model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    spellings = [token.content for token in added]
    if base.normalizer is not None:
        spellings += [base.normalizer.normalize_str(spelling) for spelling in spellings]
    length = max([*map(len, vocabulary), *(len(s.encode() if of_bytes else s) for s in spellings)])
    letters = max([1, *(_letters(s.encode()) for s in spellings)])
    for token in vocabulary:
        if len(token) > letters:
            data = bytes(byte_of_char.get(char, 0) for char in token) if of_bytes else token.encode()
            letters = max(letters, _letters(data))
    swallows = any(token.lstrip or token.rstrip for token in added)
    return Fewest(0 if swallows else length, letters, of_bytes, composes, missing if of_bytes else b"")


def _letters(data: bytes) -> int:
    """Returns how many letters a token's bytes may stand for: a character beyond ASCII may be composed of one and marks."""
    return len(data.translate(None, _NEVER_LETTERS))


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yields a normalizer or pre-tokenizer as JSON has it, and those that it consists of."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        found = pending.pop()
        yield found
        pending += found.get("normalizers", []) + found.get("pretokenizers", [])


def _keeps_length(change: Mapping[str, Any], composes: bool) -> bool:
    """Whether what is known of NFC holds of a normalizer: that it makes texts, and their letters, no fewer than that.
    `composes`: beside NFC."""
    if change["type"] != "Replace":
        return change["type"] in ("NFC", "Prepend", "Sequence")
    before, after = change["pattern"].get("String"), change["content"]
    if before is None or composes and not after.isascii():
        return False  # a mark in place of a sign of ASCII would be composed: the sign has no byte of its own then
    # What is beyond ASCII begins with a letter's byte, so that none of it is replaced by fewer bytes either.
    return _letters(before.encode()) == 0 and len(before) <= len(after)
