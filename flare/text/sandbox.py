"""The Jinja environment that chat templates run in: immutable, deterministic, and bounded.

A template may read what it is given and print; it cannot change it, reach Python, or see the time. Work is counted in
*steps*, not seconds, so that the same request is accepted or refused everywhere alike: every loop counts its items,
every call and filter counts one, and every string made counts its length. A template over the limits ends with
`LimitExceeded`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
"""Most steps of one rendering: some seconds of work."""

MAX_CHARS = 32 * 1024 * 1024
"""Most characters of a rendered prompt, and of any string on the way to it."""

MAX_WIDTH = 1_000_000
"""Most characters of padding, and most of whatever else a call asks for by number."""

MAX_ITEMS = 1_000_000
"""Most items of a list that the template makes."""

_CHARS_PER_STEP = 64
_FORMATS = {"format", "format_map"}
_SIZED = _FORMATS | {"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "tojson", "slice", "batch", "round"}
_WIDTH_IN_FORMAT = re.compile(r"[0-9]{7}")


class Refused(Exception):
    """The template called raise_exception; the text is its author's."""


class LimitExceeded(Exception):
    """The template would take too much; `str` says what."""


class _Running(threading.local):
    """What the rendering on this thread has left, and what it was given besides variables."""

    steps = MAX_STEPS
    mark = ""
    clock: Callable[[], datetime] | None = None


_running = _Running()


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face chat templates expect, with the limits above. Shared by threads."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in ("random", "pprint"):  # neither deterministic nor bounded
            del self.filters[name]
        self.filters = {name: _counted_filter(name, filter) for name, filter in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _make_dict,
            "namespace": _PlainNamespace,
        }

    def begin(self, mark: str, clock: Callable[[], datetime]) -> None:
        """Starts a rendering on this thread with a full budget. `tojson` leaves the character `mark` as it is."""
        _running.steps, _running.mark, _running.clock = MAX_STEPS, mark, clock

    # Hooks that compiled templates go through.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _CountingTransformer(self).visit(super()._parse(source, name, filename))

    def looped(self, items: Any) -> Any:
        """Counts the items that a loop is going to visit."""
        if hasattr(items, "__len__"):
            _spend(len(items))
            return items
        if isinstance(items, jinja2.Undefined):
            return items
        return _counted(iter(items))

    def concatenated(self, *parts: Any) -> str:
        """The operator `~`."""
        return _bounded("".join(map(str, parts)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        name = getattr(__obj, "__name__", "")
        # The sandbox wraps `str.format`; the string it belongs to is inside.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        _check_arguments(name, owner if isinstance(owner, str) else "", args, kwargs, (*args, *kwargs.values()))
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(text) * max(times, 0), text)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 1_000_000:
                raise LimitExceeded("numbers of more than a million bits")
        elif operator == "**":
            if not all(isinstance(n, float) or (isinstance(n, int) and abs(n) <= 1000) for n in (left, right)):
                raise LimitExceeded("numbers of more than a million bits")
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            if _WIDTH_IN_FORMAT.search(left) or ("*" in left and any(_is_wide(v) for v in values)):
                raise LimitExceeded(f"padding of more than {MAX_WIDTH} characters")
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_size(len(left) + len(right), left)
        return _bounded(super().call_binop(context, operator, left, right))


class _CountingTransformer(NodeTransformer):
    """Routes loops and the operator `~` through the environment, which counts them."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _hook(self, name: str, args: list[Any], node: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        call.set_lineno(node.lineno, override=False).set_environment(self._environment)
        return call

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._hook("looped", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._hook("concatenated", node.nodes, node)


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on. It prints its body like a block of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(Namespace):
    """A namespace whose names cannot be those of Python's machinery."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("__"):
        raise jinja2.exceptions.SecurityError("this name is not for templates")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if _WIDTH_IN_FORMAT.search(format):
        raise LimitExceeded(f"padding of more than {MAX_WIDTH} characters")
    assert _running.clock is not None
    return _running.clock().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON, as transformers' filter gives it: nothing is escaped for HTML, non-ASCII stays unless asked for."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # Outside of strings JSON is ASCII, so escaping every other character of the whole is escaping the strings. The mark
    # is not part of the request's text and must be found again in the rendered prompt.
    return "".join(char if char.isascii() or char == _running.mark else json.dumps(char)[1:-1] for char in text)


def _counted_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    before = 2 if hasattr(filter, "jinja_pass_arg") else 1  # what Jinja passes, and the value: neither is an option

    @wraps(filter)  # keeps the attributes by which Jinja passes its context to a filter
    def counted(*args: Any, **kwargs: Any) -> Any:
        options = (*args[before:], *kwargs.values())
        _check_arguments(name, next((a for a in args if isinstance(a, str)), ""), args, kwargs, options)
        return _bounded(filter(*args, **kwargs))

    return counted


def _check_arguments(
    name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: tuple[Any, ...]
) -> None:
    """Refuses, before they run, the string functions whose result can be far larger than what they are given.

    `options` are the arguments that can say a width: not the value that a filter works on.
    """
    if name in _SIZED:
        wide = any(_is_wide(value) for value in options)
        if wide or (name in _FORMATS and _WIDTH_IN_FORMAT.search(text)):
            raise LimitExceeded(f"padding of more than {MAX_WIDTH} characters")
    elif name == "replace":
        strings = [value for value in (text, *args, *kwargs.values()) if isinstance(value, str)]
        old, new = strings[-2:] if len(strings) > 1 else ("", "")
        if len(new) > max(len(old), 1):
            _check_size(len(text) + text.count(old) * len(new))
    elif name == "join":
        items = next((a for a in args if isinstance(a, (list, tuple))), ())
        _check_size(sum(len(i) + len(text) for i in items if isinstance(i, str)))


def _is_wide(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > MAX_WIDTH


def _check_size(size: int, of: Any = "") -> None:
    if not isinstance(of, str) and size > MAX_ITEMS:
        raise LimitExceeded(f"lists of more than {MAX_ITEMS} items")
    if size > MAX_CHARS:
        raise LimitExceeded(f"more than {MAX_CHARS} characters")


def _bounded(value: Any) -> Any:
    """Counts one step, and the length of a string that was made."""
    if isinstance(value, str):
        _check_size(len(value))
        _spend(1 + len(value) // _CHARS_PER_STEP)
    else:
        _spend(1)
    return value


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _spend(1)
        yield item


def _spend(steps: int) -> None:
    _running.steps -= steps
    if _running.steps < 0:
        raise LimitExceeded(f"more than {MAX_STEPS} steps")
