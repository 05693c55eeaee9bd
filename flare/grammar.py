"""Grammars that a request brings: compiled within bounds, and matched against whole texts.

llguidance compiles and matches them; it neither backtracks nor runs code of the grammar.
"""

from __future__ import annotations

import re
from functools import cache
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal

from flare.deep_stack import on_deep_stack
from flare.errors import RequestError
from flare.grammar_faults import uncompiled

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_DEFINITION = 256 << 10
"""Most bytes of UTF-8 of a grammar's definition."""

MAX_TEXT = 256 << 10
"""Most bytes of UTF-8 of a text that is matched."""

SECONDS, SECONDS_PER_BYTE = 0.05, 4e-6
"""Processor time that matching a text may take: so much, and so much for each of its bytes. A byte of most grammars takes
1.5 µs, but of an ambiguous one up to 20 ms, and whoever waits for the answer's thread waits as long."""

LIMITS = {
    "max_items_in_row": 400,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""The library's bounds. Its own one on the alternatives that are open at once lets an ambiguous grammar take minutes for a
kilobyte; a lower one than this refuses plain lists of some hundred words."""

_STEP = 0.001
_LONGEST_SLICE = 4096
# A text goes to the library in slices of about so many seconds and at most so many bytes: it holds the interpreter's lock.


class MatchError(Exception):
    """It could not be found out whether a text is of the grammar; `str(error)` goes on from "a text" and may be shown."""


MAX_INTERSECTIONS = 4
"""Intersections (`&`) of a Lark grammar's terminals: to join expressions takes the power of their number."""

MAX_AMPERSANDS = 16
"""Signs `&` in all, those of texts too: what is a text to llguidance need not be one here."""

_LARK_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|//[^\n]*+|&')
"""Strings, expressions and comments of Lark, each as a whole, and what is looked for outside of them."""


def check_lark(definition: str, field: str) -> None:
    """Raises RequestError for what a Lark grammar may not hold: schemas, which are checked elsewhere, and too many `&`."""
    if "%json" in definition:
        raise RequestError(f"{field}: %json is not supported in grammars; send the schema as the format", param=field)
    count = _LARK_TEXTS.findall(definition).count("&")
    if count > MAX_INTERSECTIONS or definition.count("&") > MAX_AMPERSANDS:
        text = f"{field}: more than {MAX_INTERSECTIONS} intersections (&) or {MAX_AMPERSANDS} signs of it; write fewer"
        raise RequestError(text, param=field)


def check_regex(expression: str, field: str) -> None:
    """Raises RequestError for an expression that ends with a backslash that escapes nothing: the library would drop it.

    One within a comment at the end, under the flag x, is refused too: finding comments would take a reader of Rust's syntax,
    and whoever writes such a one can leave the backslash out.
    """
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        text = (
            f"cannot be compiled as a regular expression at character {len(expression)}: an escape that ends too soon"
        )
        raise RequestError(f"{field}: {text}; correct it", param=field)


def regex_error(expression: str) -> str:
    """Returns what the library says of an expression that it cannot compile, "" of one that it can."""
    matcher = _compiled("regex", expression)
    return matcher.get_error() if matcher.is_error() else ""


class TextGrammar:
    """A compiled grammar. `matches` may be called from several threads at once.

    `syntax` is "lark" (llguidance's dialect of Lark) or "regex" (Rust's, of the whole text).
    """

    __slots__ = ("_fresh", "_lock", "_matcher", "definition", "syntax")

    def __init__(self, syntax: Literal["lark", "regex"], definition: str, *, field: str) -> None:
        """`field` names the definition in errors.

        Raises RequestError for a definition that is too long, cannot be compiled, or would take too much to compile.
        """
        self.syntax = syntax
        self.definition = definition
        size = len(definition.encode(errors="replace"))
        if size > MAX_DEFINITION:
            text = f"{field}: {size} bytes of UTF-8, the limit is {MAX_DEFINITION}; send a smaller one"
            raise RequestError(text, param=field)
        (check_lark if syntax == "lark" else check_regex)(definition, field)
        self._lock = Lock()
        self._renew()
        if self._matcher.is_error():
            error = self._matcher.get_error()
            raise RequestError(f"{field}: {uncompiled(syntax, definition, error)}", param=field)

    def matches(self, text: str) -> bool:
        """Whether the whole text, in UTF-8, is one of the grammar's.

        Raises MatchError for a text over MAX_TEXT bytes, and for one whose matching takes more than the bounds.
        """
        data = list(text.encode())
        if len(data) > MAX_TEXT:
            raise MatchError(f"of {len(data)} bytes of UTF-8, and {MAX_TEXT} are the limit for one with a grammar")
        end = thread_time() + SECONDS + SECONDS_PER_BYTE * len(data)
        with self._lock:
            matched = self._match(data, end)
            if matched is None and not self._fresh:
                self._renew()
                matched = self._match(data, end)
            self._fresh = False
            if matched is None:
                self._renew()
                raise MatchError("that takes too much to be matched; make the tool's grammar less ambiguous")
        return matched

    def _match(self, data: list[int], end: float) -> bool | None:
        """Whether these bytes are of the grammar; None where that takes too much, or processor time beyond `end`."""
        matcher = self._matcher.deep_copy()
        at, size = 0, 1
        now = thread_time()
        while at < len(data):
            part = data[at : at + size]
            taken = matcher.try_consume_tokens(part)
            if matcher.is_error():
                return None
            if taken < len(part):
                return False
            at += taken
            before, now = now, thread_time()
            if now > end:
                return None
            size = min(2 * size, _LONGEST_SLICE) if now - before < _STEP else max(1, size // 2)
        return matcher.is_accepting()

    def _renew(self) -> None:
        """Compiles once more. A matcher shares its lexer with its copies: what one spends the others lack, and once it is
        spent they match nothing."""
        self._matcher = _compiled(self.syntax, self.definition)
        self._fresh = True


def _compiled(syntax: str, definition: str) -> LLMatcher:
    from llguidance import LLMatcher

    to_grammar = LLMatcher.grammar_from_lark if syntax == "lark" else LLMatcher.grammar_from_regex
    tokenizer, limits = _bytes_tokenizer()
    return on_deep_stack(lambda: LLMatcher(tokenizer, to_grammar(definition), log_level=0, limits=limits))


@cache
def _bytes_tokenizer() -> tuple[LLTokenizer, LLParserLimits]:
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, slices=[]), LLParserLimits(**LIMITS)


class _Bytes:
    """A vocabulary of the 256 bytes, so that a text is matched byte by byte."""

    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, data: Any) -> list[int]:
        return list(data if isinstance(data, bytes) else data.encode())
