"""Which spellings are control tokens, and how message text is kept from forming them.

A *control* is a token that tokenizer.json lists under `added_tokens`, special or not (tool tags are often not), except
runs of white space, which carry no structure. A prompt's controls must all come from the chat template: text that a
message, a tool description or a template variable brings along never becomes one.

Before rendering, a *mark* (one private-use character that occurs nowhere in the request or the template) is put behind
the first character of every control spelling in the request's strings. The template then prints broken spellings,
which nothing matches. Afterwards the prompt is cut at the controls that are left, all of them the template's own, the
marks are removed, and the text between the cuts is encoded by a tokenizer that knows no controls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flare.errors import RequestError

# The marks to choose from: the private use area of the basic plane. A request that holds all of them is refused.
_MARKS = range(0xE000, 0xF900)


class Protected(NamedTuple):
    """A request's values with broken spellings.

    `mark` is "" when nothing had to be broken; `loose` tells that unbroken first characters of spellings are left, so
    that a template that joins or shortens strings could still form a spelling out of them.
    """

    value: Any
    mark: str
    loose: bool


class Controls:
    """The spellings of one tokenizer's controls. Immutable after construction; safe to use from several threads."""

    def __init__(self, spellings: list[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is given where controls are matched on normalised text: more texts then spell them."""
        self._single = tuple(sorted({s for s in spellings if len(s) == 1}))
        self._several = sorted({s for s in spellings if len(s) > 1})
        self._first = tuple(sorted({s[0] for s in spellings}))
        self._normalize = normalize
        self._pattern: re.Pattern[str] | None = None

    def protect(self, value: Any, *, strict: bool = False, avoid: str = "") -> Protected:
        """Breaks spellings in every string of `value` (JSON-like: dicts with their keys, lists, strings).

        `strict` breaks behind every first character of a spelling, whatever follows it. `avoid` is text whose
        characters may not serve as the mark. Values without any spelling are returned as they are, not copied.
        Raises RequestError when no mark is free.
        """
        suspects = [s for s in _strings(value) if self._normalize or any(c in s for c in self._first)]
        if not suspects:
            return Protected(value, "", False)
        mark = self._free_mark(value, avoid)
        breaker = self._break_all if strict else self._break
        broken = {s: breaker(s, mark) for s in suspects}
        loose = not strict and any(self._is_loose(text, mark) for text in broken.values())
        if all(s == text for s, text in broken.items()):
            return Protected(value, "", loose)
        return Protected(_replaced(value, broken), mark, loose)

    def sequence(self, text: str) -> list[str]:
        """The control spellings that stand unbroken in `text`, in order."""
        return self._compiled().findall(text)

    def _break(self, text: str, mark: str) -> str:
        pattern = self._compiled()
        for char in self._single:
            text = text.replace(char, char + mark)
        # Breaking one spelling can free another one inside it, so look again until none is left.
        while pattern.search(text):
            text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        if self._normalize and pattern.search(self._normalize(text)):
            text = mark.join(text)
        return text

    def _break_all(self, text: str, mark: str) -> str:
        for char in self._first:
            # A letter is left alone: templates compare words, such as types, with literals.
            if not char.isalnum():
                text = text.replace(char, char + mark)
        return self._break(text, mark)

    def _is_loose(self, text: str, mark: str) -> bool:
        return any(text.count(char) > text.count(char + mark) for char in self._first)

    def _free_mark(self, value: Any, avoid: str) -> str:
        used = set(avoid)
        for text in _strings(value):
            if not text.isascii():
                used.update(text)
        for code in _MARKS:
            if chr(code) not in used:
                return chr(code)
        raise RequestError("the request uses every private-use character; remove some of them")

    def _compiled(self) -> re.Pattern[str]:
        # Compiled on first need: a tokenizer may list thousands of controls and most prompts spell none.
        if self._pattern is None:
            self._pattern = re.compile(_trie_pattern(self._several) if self._several else r"(?!)")
        return self._pattern


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys of objects included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def _replaced(value: Any, broken: dict[str, str]) -> Any:
    if isinstance(value, str):
        return broken.get(value, value)
    if isinstance(value, dict):
        return {_replaced(key, broken): _replaced(item, broken) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, broken) for item in value]
    return value


def _trie_pattern(spellings: list[str]) -> str:
    """A pattern that matches the longest spelling at a place. Shared beginnings are merged, so that a failed attempt
    costs one walk down a trie, however many spellings there are."""
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for char in spelling:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        chain = ""
        while len(node) == 1 and "" not in node:
            char, node = next(iter(node.items()))
            chain += re.escape(char)
        branches = [re.escape(char) + pattern(child) for char, child in node.items() if char]
        if not branches:
            return chain
        return chain + "(?:" + "|".join(branches) + ")" + ("?" if "" in node else "")

    return pattern(trie)
