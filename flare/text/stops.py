"""Stops: where an answer ends because the client said so, by strings in its text or by sequences of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Part = TypeVar("Part", str, tuple[int, ...])
"""A part of an answer, or a stop: text, or tokens."""


class StopSet(Generic[Part]):
    """The stops of a request, as an automaton that searches them together. Immutable: all of its choices share it."""

    __slots__ = ("first", "nothing", "root")

    def __init__(self, stops: Sequence[Part]) -> None:
        """`stops` are nonempty; with none, all text passes."""
        self.root = _automaton(stops)
        self.first = frozenset(stop[0] for stop in stops)
        self.nothing: Part = stops[0][:0] if stops else ""


class StopMatcher(Generic[Part]):
    """Watches one choice, all of its text or all of its tokens. Used by one thread at a time.

    The match that counts is the one that ends first, as if the answer came item by item (characters or tokens); of
    several that end at the same place, the longest. So the result does not depend on how the answer is cut into parts,
    and what could still become a match, and only that, is held back. What comes before the match stays, the match and
    everything behind it goes. Time is linear in the answer, whatever the stops: they are searched together, by one
    automaton.
    """

    __slots__ = ("_first", "_held", "_node", "_nothing", "_root", "matched")

    def __init__(self, stops: StopSet[Part]) -> None:
        self._root = self._node = stops.root
        self._first = stops.first
        self._nothing: Part = stops.nothing
        self._held = self._nothing
        self.matched: Part | None = None
        """The stop that matched, once one has."""

    def push(self, part: Part) -> tuple[Part, Part | None]:
        """Returns what is certain to be shown, and the stop if this part completed one.

        After a match nothing is shown any more, and the same stop is returned.
        """
        node = self._node
        if node is self._root and self._first.isdisjoint(part):
            return (part, None) if self.matched is None else (self._nothing, self.matched)
        if self.matched is not None:
            return self._nothing, self.matched
        root = self._root
        for index, item in enumerate(part):
            child = node.children.get(item)
            while child is None and node is not root:
                node = node.fallback
                child = node.children.get(item)
            node = root if child is None else child
            if node.stop is not None:
                self.matched = node.stop
                seen = self._held + part[: index + 1]
                self._held = self._nothing
                return seen[: len(seen) - len(node.stop)], node.stop
        self._node = node
        seen = self._held + part
        certain = len(seen) - node.depth
        self._held = seen[certain:]
        return seen[:certain], None

    def flush(self) -> Part:
        """What is still held back, when generation ends without a match."""
        held, self._held, self._node = self._held, self._nothing, self._root
        return held


class _Node:
    """A beginning of some stop, `depth` items long. `fallback` is its longest end that is such a beginning too; `stop` is
    the longest stop that ends here."""

    __slots__ = ("children", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.children: dict[Any, _Node] = {}
        self.depth = depth
        self.fallback: Any = None
        self.stop: Any = None


def _automaton(stops: Sequence[str | tuple[int, ...]]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for item in stop:
            child = node.children.get(item)
            if child is None:
                child = node.children[item] = _Node(node.depth + 1)
            node = child
        node.stop = stop
    # By increasing depth, so that a node's fallback is complete before it is needed.
    queue = list(root.children.values())
    for node in queue:
        if node.fallback is None:
            node.fallback = root
        for item, child in node.children.items():
            fallback = node.fallback
            while item not in fallback.children and fallback is not root:
                fallback = fallback.fallback
            child.fallback = fallback.children.get(item, root)
            if child.stop is None:
                child.stop = child.fallback.stop
            queue.append(child)
    return root
