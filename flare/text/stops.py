"""Stop strings: where an answer's text ends because the client said so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopMatcher:
    """Watches one choice's text. Used by one thread at a time.

    The match that counts is the one that ends first, as if the text came character by character; of several that end
    at the same place, the longest. So the result does not depend on how the text is cut into pieces, and text that
    could still become a match, and only that, is held back. The text before the match stays, the match and everything
    behind it goes. Time is linear in the text, whatever the strings: they are searched together, by one automaton.
    """

    __slots__ = ("_first", "_held", "_node", "_root", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are nonempty; with none, all text passes."""
        self._root = _automaton(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._node = self._root
        self._held = ""
        self.matched: str | None = None
        """The string that matched, once one has."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is certain to be shown, and the stop string if this text completed one.

        After a match nothing is shown any more, and the same string is returned.
        """
        node = self._node
        if node is self._root and self._first.isdisjoint(text):
            return (text, None) if self.matched is None else ("", self.matched)
        if self.matched is not None:
            return "", self.matched
        root = self._root
        for index, char in enumerate(text):
            child = node.children.get(char)
            while child is None and node is not root:
                node = node.fallback
                child = node.children.get(char)
            node = root if child is None else child
            if node.stop is not None:
                self.matched = node.stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(node.stop)], node.stop
        self._node = node
        seen = self._held + text
        certain = len(seen) - node.depth
        self._held = seen[certain:]
        return seen[:certain], None

    def flush(self) -> str:
        """The text still held back, when generation ends without a match."""
        held, self._held, self._node = self._held, "", self._root
        return held


class _Node:
    """A beginning of some stop string, `depth` characters long. `fallback` is its longest end that is such a beginning
    too; `stop` is the longest stop string that ends here."""

    __slots__ = ("children", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.fallback: Any = None
        self.stop: str | None = None


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            child = node.children.get(char)
            if child is None:
                child = node.children[char] = _Node(node.depth + 1)
            node = child
        node.stop = stop
    # By increasing depth, so that a node's fallback is complete before it is needed.
    queue = list(root.children.values())
    for node in queue:
        if node.fallback is None:
            node.fallback = root
        for char, child in node.children.items():
            fallback = node.fallback
            while char not in fallback.children and fallback is not root:
                fallback = fallback.fallback
            child.fallback = fallback.children.get(char, root)
            if child.stop is None:
                child.stop = child.fallback.stop
            queue.append(child)
    return root
