"""Mutations of plain data, such as a decoded file: a value changed, an element or key dropped, doubled, swapped or renamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

OTHERS = (0, -1, 1 << 31, (1 << 63) - 1, -(1 << 63), 1.5, True, None, "", "a\nb", "x" * 2000, [], {})
"""What any value may become."""


def places(tree: Any, place: Place = ()) -> Iterator[Place]:
    """Yields the place of every value in a tree of dicts and lists, the tree's own first."""
    yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*place, key))


def mutations(value: Any) -> Iterator[tuple[Place, Any]]:
    """Yields what one value can become by one mutation, and the place within it that is another then."""
    yield from (((), other) for other in OTHERS if type(other) is not type(value) or other != value)
    match value:
        case bool():
            yield (), not value
        case int() | float():
            yield from (((), other) for other in (value + 1, value - 1, value + 64, value - 64, 2 * value))
        case str():
            yield (), f"{value}x"
        case list():
            for index in range(len(value)):
                yield (index,), value[:index] + value[index + 1 :]
                yield (index,), value[: index + 1] + value[index:]
            for index in range(len(value) - 1):
                yield (index,), value[:index] + value[index : index + 2][::-1] + value[index + 2 :]
        case dict():
            for key in value:
                rest = {name: each for name, each in value.items() if name != key}
                yield (key,), rest
                yield (key,), {f"{key}x": value[key], **rest}
            yield ("x",), {**value, "x": 1}


def at(tree: Any, place: Place) -> Any:
    """Returns the value at a place."""
    for key in place:
        tree = tree[key]
    return tree


def put(tree: Any, place: Place, value: Any) -> Any:
    """Returns the tree with another value at a place; what is not on the way there is shared."""
    if not place:
        return value
    made = tree.copy()
    made[place[0]] = put(tree[place[0]], place[1:], value)
    return made
