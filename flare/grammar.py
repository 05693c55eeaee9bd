"""Grammars that a request brings: compiled within bounds, and matched against whole texts.

llguidance compiles and matches them; it neither backtracks nor runs code of the grammar.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from flare.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_DEFINITION = 256 << 10
"""Most bytes of UTF-8 of a grammar's definition."""

MAX_TEXT = 256 << 10
"""Most bytes of UTF-8 of a text that is matched: a byte takes microseconds."""

NAMES = {"lark": "a Lark grammar", "regex": "a regular expression"}

_PLACE = re.compile(r"(?:at )?([0-9]{1,9})\(([0-9]{1,9})\)")

# The library's own bound on the alternatives that are open at once lets an ambiguous grammar take minutes for a kilobyte.
_LIMITS = {
    "max_items_in_row": 400,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class TextGrammar:
    """A compiled grammar. `matches` may be called from several threads at once.

    `syntax` is "lark" (llguidance's dialect of Lark) or "regex" (Rust's, of the whole text).
    """

    __slots__ = ("_matcher", "definition", "syntax")

    def __init__(self, syntax: Literal["lark", "regex"], definition: str, *, field: str) -> None:
        """`field` names the definition in errors.

        Raises RequestError for a definition that is too long, cannot be compiled, or would take too much to compile.
        """
        self.syntax = syntax
        self.definition = definition
        size = len(definition.encode(errors="replace"))
        if size > MAX_DEFINITION:
            raise RequestError(f"{field}: {size} bytes of UTF-8, the limit is {MAX_DEFINITION}", param=field)
        self._matcher = _compiled(syntax, definition)
        if self._matcher.is_error():
            place = _place(self._matcher.get_error()) if syntax == "lark" else ""
            text = f"{field}: cannot be compiled as {NAMES[syntax]}{place}; correct it or make it smaller"
            raise RequestError(text, param=field)

    def matches(self, text: str) -> bool:
        """Whether the whole text, in UTF-8, is one of the grammar's. A text over MAX_TEXT bytes is not."""
        data = text.encode()
        if len(data) > MAX_TEXT:
            return False
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def _compiled(syntax: str, definition: str) -> LLMatcher:
    from llguidance import LLMatcher

    to_grammar = LLMatcher.grammar_from_lark if syntax == "lark" else LLMatcher.grammar_from_regex
    tokenizer, limits = _bytes_tokenizer()
    return LLMatcher(tokenizer, to_grammar(definition), log_level=0, limits=limits)


@cache
def _bytes_tokenizer() -> tuple[LLTokenizer, LLParserLimits]:
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, slices=[]), LLParserLimits(**_LIMITS)


class _Bytes:
    """A vocabulary of the 256 bytes, so that a text is matched byte by byte."""

    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, data: Any) -> list[int]:
        return list(data if isinstance(data, bytes) else data.encode())


def _place(error: str) -> str:
    """Where the library found the fault, in our words: its own are not passed on."""
    found = _PLACE.match(error)
    return f" at line {found[1]}, column {found[2]}" if found else ""
