"""Log probabilities in answers: what a token is called, and the shapes of the three OpenAI protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import msgspec

from flare.logprobs import TokenLogprobs

encode = msgspec.json.Encoder().encode

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has not."""


def shown(logprob: float) -> float:
    """Returns a log probability as JSON can hold it."""
    return logprob if logprob > -inf else IMPOSSIBLE


class Spelling:
    """How tokens are written in an answer. `token_bytes` are their exact bytes; `as_ids`: strings of tokens are their ids.

    What is said of a token does not change, so that it is made once an answer.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, as_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids
        self._heads: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """A token's text; bytes that are no characters by themselves are U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._token_bytes(token).decode("utf-8", "replace")
        return text

    def name(self, token: int) -> str:
        """A token's string in lists of tokens."""
        return f"token_id:{token}" if self._as_ids else self.text(token)

    def entry(self, token: int, logprob: float) -> bytes:
        """The object of a token and its log probability, but for its closing brace."""
        head = self._heads.get(token)
        if head is None:
            members = {"token": self.name(token), "bytes": list(self._token_bytes(token))}
            head = self._heads[token] = encode(members)[:-1] + b',"logprob":'
        return head + encode(shown(logprob))


def entry_list(spelling: Spelling, entries: Iterable[TokenLogprobs]) -> msgspec.Raw:
    """Returns a list of tokens with their alternatives, in the shape of Chat Completions."""
    entry, parts = spelling.entry, []
    for found in entries:
        others = b"},".join([entry(token, value) for token, value in zip(found.ids, found.values, strict=True)])
        parts.append(b'%b,"top_logprobs":[%b]}' % (entry(found.token, found.logprob), others + b"}" if others else b""))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def prompt_list(spelling: Spelling, entries: Sequence[TokenLogprobs], alternatives: int) -> msgspec.Raw:
    """Returns `prompt_logprobs`: null for the first token, for each other an object of tokens by their ids, the prompt's own
    first, then so many of its alternatives."""
    parts = [b"null"]
    for found in entries:
        members = [_ranked(spelling, found.token, found.logprob, found.rank)]
        rank, last = 0, inf
        for place, (token, value) in enumerate(zip(found.ids[:alternatives], found.values, strict=False), 1):
            if value < last:
                rank, last = place, value
            if token != found.token:
                members.append(_ranked(spelling, token, value, rank))
        parts.append(b"{" + b",".join(members) + b"}")
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _ranked(spelling: Spelling, token: int, logprob: float, rank: int) -> bytes:
    value = encode({"logprob": shown(logprob), "rank": rank, "decoded_token": spelling.text(token)})
    return b'"%d":%b' % (token, value)


class Columns:
    """The parallel arrays of Completions for one choice. `take` empties them; the places of their tokens go on.

    `echoed` is the text that is put before the choice's own, None without; then the tokens of `prompt` have entries, with so
    many `alternatives`.
    """

    def __init__(self, spelling: Spelling, prompt: Sequence[int], echoed: str | None, alternatives: int) -> None:
        self._spelling = spelling
        self._begin = 0 if echoed is None else len(echoed)
        self._alternatives = alternatives
        self._place = 0  # of the prompt's next token
        self._first = None if echoed is None else prompt[0]  # it follows nothing, and has no log probability
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[msgspec.Raw | None] = []
        self._places: list[int] = []

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._tokens)

    def begin(self) -> None:
        """Takes the prompt's first token, if it has not been taken: what comes next comes behind it."""
        if self._first is not None:
            first, self._first = self._first, None
            self._add(self._spelling.name(first), None, None, 0)
            self._place = len(self._spelling.text(first))

    def leave_out_prompt(self) -> None:
        """Says that other columns have the prompt's tokens."""
        self._first = None

    def add_prompt(self, entries: Iterable[TokenLogprobs]) -> None:
        """Takes the prompt's next tokens, from its second on."""
        self.begin()
        for found in entries:
            token, count = found.token, self._alternatives
            top = self._top(found, found.ids[:count], found.values)
            self._add(self._spelling.name(token), shown(found.logprob), top, self._place)
            self._place += len(self._spelling.text(token))

    def add(self, entries: Iterable[TokenLogprobs], offsets: Iterable[int]) -> None:
        """Takes the choice's own next tokens; `offsets` are where they begin in its own text."""
        self.begin()
        for found, offset in zip(entries, offsets, strict=True):
            top = self._top(found, found.ids, found.values)
            self._add(self._spelling.name(found.token), shown(found.logprob), top, self._begin + offset)

    def _add(self, token: str, logprob: float | None, top: msgspec.Raw | None, place: int) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._tops.append(top)
        self._places.append(place)

    def _top(self, found: TokenLogprobs, ids: Sequence[int], values: Sequence[float]) -> msgspec.Raw:
        """Returns the object of the alternatives and the token itself; of several with one string the first stays."""
        name = self._spelling.name
        top: dict[str, float] = {}
        for token, value in zip(ids, values, strict=False):
            top.setdefault(name(token), shown(value))
        top.setdefault(name(found.token), shown(found.logprob))
        return msgspec.Raw(encode(top))

    def take(self) -> dict[str, Any]:
        """Returns the arrays so far, which then are empty."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._places,
        }
        self._clear()
        return taken
