"""Calls into native code that follows its input's nesting on the stack: an overflow there would end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK = 512 << 20
"""Bytes of address space of the stack; memory is what is touched. llguidance takes up to 20 KB a level of a schema, of which
there are 5000, and 4 KB of a grammar."""

_starting = threading.Lock()

T = TypeVar("T")


def on_deep_stack(function: Callable[[], T]) -> T:
    """Returns what a function returns, or raises what it raises, in a thread whose stack has STACK bytes."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="deep-stack").start()
        finally:
            threading.stack_size(before)
    return made.result()
