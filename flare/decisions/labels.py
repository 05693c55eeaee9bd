"""Labels of options: short spellings, each of which is one token right behind a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from flare.text.prompt import Rendered
    from flare.text.tokenizer import Tokenizer

SPELLINGS = (
    *ascii_uppercase,
    *(first + second for first in ascii_uppercase for second in ascii_uppercase),
    *ascii_lowercase,
    *digits,
)
"""Candidates in the order in which they are taken. Digits come last: beside levels they would look like their numbers."""

MAX_KEPT = 256
MAX_KEPT_CHARACTERS = 200
"""Of the ends of prompts whose labels are remembered: a template's own are short, and few."""


class Labels(NamedTuple):
    """Spellings with their tokens."""

    spellings: tuple[str, ...]
    tokens: tuple[int, ...]


class LabelFinder:
    """Finds labels behind prompts of one tokenizer, which end with a text that they share. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, shared: str) -> None:
        self._tokenizer = tokenizer
        self._shared = shared
        self._found: dict[tuple[Rendered, int], Labels] = {}

    def find(self, rendered: Rendered, prompt: Sequence[int], count: int) -> Labels:
        """Returns the first `count` labels that are one token behind a prompt, whose tokens are given; fewer where there are no
        more, or where a prompt does not end as it would by itself. The tokens are distinct, and none is a control token.

        Each is tokenized behind the end of the prompt, from the last control token on: a tokenizer cuts its text there, so that
        what comes before has no effect. Where the request's own text follows it, in a template without such tokens, the end
        begins with what all prompts share; a label then changes none of the tokens from there on.
        """
        end = self._end(rendered, prompt)
        if end is None:
            return Labels((), ())
        key = (end, count)
        found = self._found.get(key)
        if found is None:
            found = self._search(end, count)
            if len(end.text) <= MAX_KEPT_CHARACTERS and len(self._found) < MAX_KEPT:
                self._found[key] = found
        return found

    def _search(self, end: Rendered, count: int) -> Labels:
        before = self._tokenizer.encode_rendered(*end)
        found: dict[int, str] = {}
        for spelling, token in self._single(end, before):
            found.setdefault(token, spelling)
            if len(found) == count:
                break
        return Labels(tuple(found.values()), tuple(found))

    def _single(self, end: Rendered, before: list[int]) -> Iterator[tuple[str, int]]:
        for spelling in SPELLINGS:
            tokens = self._tokenizer.encode_rendered(end.text + spelling, end.mark)
            if tokens[:-1] == before and tokens[-1] not in self._tokenizer.control_ids:
                yield spelling, tokens[-1]

    def _end(self, rendered: Rendered, prompt: Sequence[int]) -> Rendered | None:
        """Returns the prompt's end, None where it is not made of the prompt's last tokens.

        The first tokens of the shared text may be others than in the prompt: many tokenizers put a space before any text. They
        end in its first half.
        """
        controls = self._tokenizer.controls.sequence(rendered.text)
        shared = rendered.text.rfind(self._shared)
        control = rendered.text.rfind(controls[-1]) if controls else -1
        begins = [(control, 0)] if control > shared else []
        if shared >= 0:
            begins.append((shared, len(self._shared.encode()) // 2))
        for begin, others in begins:
            text = rendered.text[begin:]
            end = rendered._replace(text=text, mark=rendered.mark if rendered.mark in text else "")
            tokens = self._tokenizer.encode_rendered(*end)
            same = 0
            for token, other in zip(reversed(tokens), reversed(prompt), strict=False):
                if token != other:
                    break
                same += 1
            before = tokens[: len(tokens) - same]
            if same and sum(len(self._tokenizer.token_bytes(token)) for token in before) <= others:
                return end
        return None
