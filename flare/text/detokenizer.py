"""Token ids to text, one token at a time: what is certain comes out at once, and nothing is lost or said twice."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flare.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice. Used by one thread at a time.

    The bytes of a character that is not complete are held back, at most three. Bytes that can no longer become a
    character come out as U+FFFD, one for each maximal ill-formed part, as Unicode recommends. Hidden tokens give no
    text, and no character spans one. Time is linear in the bytes.
    """

    __slots__ = ("_clean", "_decoder", "_hidden", "_space", "_texts", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, previous: int | None = None, hidden: frozenset[int] | None = None
    ) -> None:
        """`previous` is the last token before this text, None when there is none.

        It decides about the space that SentencePiece tokenizers put before text: where encoding would have added one,
        one leading space is dropped; behind ordinary text it is part of the text.
        `hidden` are the tokens that give no text, None: all special ones; any other gives its spelling.
        """
        place = tokenizer.space_prefix
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if hidden is None else hidden
        self._texts = tokenizer.text_table(self._hidden)
        self._decoder = _utf8("replace")
        behind_control = previous in tokenizer.control_ids
        self._space = (place != "never" and previous is None) or (place == "always" and behind_control)
        self._clean = not self._space  # nothing held back and nothing to drop: a token's own text is the answer

    def push(self, token_id: int) -> str:
        """The text that this token makes certain, "" when none."""
        if self._clean:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        return self._push(token_id)

    def ahead(self, token_id: int) -> tuple[int, bool]:
        """How many characters this token makes certain before its own, and whether it has any: 1 where it shows that one
        will never be complete, else 0. Its own are those from the one on that its first byte is part of."""
        held = self._decoder.getstate()[0]
        if token_id in self._hidden:
            return (1 if held else 0), False  # what is held can only begin one character
        data = self._tokenizer.token_bytes(token_id)
        if not data:
            return 0, False
        return len((held + data[:1]).decode("utf-8", "replace")) - 1 if held else 0, True

    def flush(self) -> str:
        """The end of the text: U+FFFD for an incomplete character, else ""."""
        self._clean = not self._space
        return self._decoder.decode(b"", True)

    def _push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return self.flush()
        data = self._tokenizer.token_bytes(token_id)
        whole = self._clean
        text = self._decoder.decode(data)
        held = self._decoder.getstate()[0]
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            # Half a surrogate. Python waits for the third byte, though none makes it a character.
            text += self._decoder.decode(b"", True)
            held = b""
        if whole and not held:
            self._texts[token_id] = text
        if self._space and text:
            self._space = False
            if token_id not in self._tokenizer.unprefixed_ids:
                text = text.removeprefix(" ")
        self._clean = not held and not self._space
        return text
