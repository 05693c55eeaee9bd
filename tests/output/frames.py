"""Replies in frames of control tokens: texts and tokens, cut in all kinds of ways."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flare.output import OutputSyntax
from tests.output.feeding import OTHER, Fed, feed


class Tok(NamedTuple):
    """One control token, by its spelling."""

    text: str


Item = str | Tok


class Frames:
    """A format's control tokens, and its syntax with and without their ids. `options` go to `feed`."""

    def __init__(self, format: str, *spellings: str, **options: Any) -> None:
        self.options = options
        self.ids = {spelling: 100 + index for index, spelling in enumerate(spellings)}
        self.tokens = OutputSyntax(tools=format, spelled=frozenset(self.ids.values()))
        self.texts = OutputSyntax(tools=format)

    def items(self, text: str) -> list[Item]:
        """A text with every spelling of a control token made that token."""
        items: list[Item] = [text]
        for spelling in self.ids:
            split: list[Item] = []
            for item in items:
                if isinstance(item, Tok):
                    split.append(item)
                    continue
                first, *rest = item.split(spelling)
                split += [first, *(piece for part in rest for piece in (Tok(spelling), part))]
            items = [item for item in split if item]
        return items

    def pushed(self, items: Iterable[Item], size: int = 0, seed: int | None = None) -> list[tuple[int, str]]:
        """The tokens; texts whole, in pieces of one `size`, or at random."""
        dice = random.Random(seed)
        out: list[tuple[int, str]] = []
        for item in joined(items):
            if isinstance(item, Tok):
                out.append((self.ids[item.text], item.text))
                continue
            at = 0
            while at < len(item):
                step = dice.randint(1, 9) if seed is not None else size or len(item)
                out.append((OTHER, item[at : at + step]))
                at += step
        return out

    def same(self, reply: str | Sequence[Item], **options: Any) -> Fed:
        """Feeds a reply in many cuts, its control tokens whole; what comes out must be the same.

        A reply without spellings of control tokens in its texts must give the same where the core does not name them.
        """
        options = self.options | options
        items = self.items(reply) if isinstance(reply, str) else list(reply)
        found = feed(self.pushed(items), syntax=self.tokens, **options)
        cuts = [self.pushed(items, size) for size in (1, 3)] + [self.pushed(items, seed=seed) for seed in range(4)]
        for cut in [*cuts, [piece for token in cuts[0] for piece in (token, (OTHER, ""))]]:
            other = feed(cut, syntax=self.tokens, **options)
            assert (other.parts, other.error) == (found.parts, found.error)
        texts = [item for item in items if isinstance(item, str)]
        if not any(spelling in text for text in texts for spelling in self.ids):
            whole = "".join(item if isinstance(item, str) else item.text for item in items)
            for split in (whole, list(whole), [whole[i : i + 3] for i in range(0, len(whole), 3)]):
                other = feed(split, syntax=self.texts, **options)
                assert (other.parts, other.error) == (found.parts, found.error)
        return found


def joined(items: Iterable[Item]) -> list[Item]:
    """Neighbouring texts as one."""
    out: list[Item] = []
    for item in items:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out
