"""A model's tokens as a grammar sees them: their bytes, which of them have text, and llguidance's own tables of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from flare.text.tokenizer import Tokenizer

LONGEST_SPELLED = 64
"""Bytes of the longest token that is looked for where the tokenizer's own way to write some bytes does not give them back."""

LOWER_CASE = "[a-z]+"
"""Tokens that are looked at as one group where a form lets all of them come, beside those of JSON's strings: grammars and
regular expressions are often after words."""


class Vocabulary:
    """The tokens of one model. Its tables are made when they are first used, by one thread; that takes 0.4 s for 50,000
    tokens and 1.2 s for 150,000. The library holds the interpreter's lock for two thirds of it, in two pieces.

    `size` is the width of the logits. `stops` are the tokens that end a reply; `spelled` are special ones that have text
    all the same, as `markers` of a format.
    """

    def __init__(
        self, tokenizer: Tokenizer, size: int, stops: Iterable[int], spelled: frozenset[int] = frozenset()
    ) -> None:
        self.size = size
        self.words = -(-size // 32)
        self.stops = frozenset(stops)
        self.hidden = (tokenizer.special_ids - spelled) | self.stops
        self.markers = spelled - self.stops
        self._tokenizer = tokenizer
        self._making = Lock()
        self._native: LLTokenizer | None = None

    @property
    def native(self) -> LLTokenizer:
        """llguidance's tables. Whoever asks first makes all others too: the engine's thread never has to."""
        with self._making:
            if self._native is None:
                made = self._make()
                for table in ("unstopped", "breaks", "_ordered"):
                    getattr(self, table)
                self._native = made
            return self._native

    def text(self, token: int) -> bytes:
        """The bytes that a token adds to the text, none for a special one."""
        return b"" if token in self.hidden or token >= self.size else self._tokenizer.token_bytes(token)

    def token(self, text: bytes) -> int | None:
        """The token that is spelled so, special ones too."""
        return self._tokenizer.token_to_id(text.decode())

    @cached_property
    def unstopped(self) -> bytes:
        """The mask that allows every token but the stops."""
        return self.mask(token for token in range(self.size) if token not in self.stops)

    def mask(self, tokens: Iterable[int]) -> bytes:
        """Returns the mask that allows these tokens alone."""
        bits = bytearray(4 * self.words)
        for token in tokens:
            bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def leading(self, text: bytes) -> Iterator[int]:
        """Returns the tokens that are the beginning of a text, or all of it."""
        for length in range(1, len(text) + 1):
            yield from self._spelled(text[:length])

    def beyond(self, text: bytes) -> Iterator[int]:
        """Returns the tokens that begin with a text and go on."""
        ordered = self._ordered
        for place in range(bisect_left(ordered, text), len(ordered)):
            found = ordered[place]
            if not found.startswith(text):
                return
            if found != text:
                yield from self._spelled(found)

    @cached_property
    def breaks(self) -> tuple[int, ...]:
        """The tokens that are line breaks and nothing else."""
        return tuple(i for text in self._by_text[0] if not text.strip(b"\n") for i in self._spelled(text))

    def _spelled(self, text: bytes) -> Iterator[int]:
        """Returns the tokens with exactly this text."""
        first, more = self._by_text
        if text in first:
            yield first[text]
            yield from more.get(text, ())

    # No table has an object of its own for each token that the garbage collector follows: its passes would stop all threads.

    @cached_property
    def _by_text(self) -> tuple[dict[bytes, int], dict[bytes, list[int]]]:
        """The first token of each text, and the others of those that have several."""
        first: dict[bytes, int] = {}
        more: dict[bytes, list[int]] = {}
        for token in range(self.size):
            if (text := self.text(token)) and first.setdefault(text, token) != token:
                more.setdefault(text, []).append(token)
        return first, more

    @cached_property
    def _ordered(self) -> list[bytes]:
        """All texts in order; sorted by parts, each of which holds the interpreter's lock."""
        parts: dict[bytes, list[bytes]] = {}
        for text in self._by_text[0]:
            parts.setdefault(text[:2], []).append(text)
        return [text for begin in sorted(parts) for text in sorted(parts[begin])]

    def _make(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = sorted(self.stops)
        wrapped = TokenizerWrapper(_Tokens(self, eos[0]))
        # In two steps: each holds the interpreter's lock, between them others get it.
        plain = LLTokenizer(wrapped, n_vocab=self.size, eos_token=eos, slices=[])
        blanks, *texts = LLTokenizer.json_slices()
        return plain.with_slices([blanks, LOWER_CASE, *texts])

    def encode(self, data: bytes) -> list[int]:
        """Returns tokens whose bytes are these, as the tokenizer writes them where it can."""
        try:
            tokens = self._tokenizer.encode_joined(data.decode())
        except UnicodeDecodeError:
            return self._spelled_out(data)
        return tokens if b"".join(map(self.text, tokens)) == data else self._spelled_out(data)

    def _spelled_out(self, data: bytes) -> list[int]:
        tokens, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + LONGEST_SPELLED), at, -1):
                found = self._by_text[0].get(data[at:end])
                if found is not None:
                    tokens.append(found)
                    at = end
                    break
            else:
                return []
        return tokens


class _Tokens:
    """What llguidance asks of a tokenizer. It calls it where a grammar leaves only one text, for how the model writes that."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = eos
        # A special token's bytes are its name in Lark, of ids without a token there are none.
        token_bytes = vocabulary._tokenizer.token_bytes
        self.tokens = [token_bytes(token) for token in range(vocabulary.size)]
        self.special_token_ids = sorted(token for token in vocabulary.hidden if token < vocabulary.size)

    def __call__(self, data: Any) -> list[int]:
        return self._vocabulary.encode(data if isinstance(data, bytes) else data.encode())
