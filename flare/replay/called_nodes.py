"""Nodes that a kernel library calls back for: ops that are interpreted, and pieces of a step that a device runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Run = Callable[[int, int, int], None]
"""Runs a node: its number, the address of eight bytes for each of its arguments (an address, or an offset in every page of the
pool), and the address of the pool. It may raise."""


class CalledNodes:
    """Such nodes of a program by their numbers. One step at a time; its nodes may run on several threads.

    Where a node fails, the step goes on, and is worth nothing: those behind it are not run.
    """

    def __init__(self, nodes: Mapping[int, Run]) -> None:
        self._nodes = dict(nodes)
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Forgets how the last step ended."""
        self._failure = None

    def run(self, index: int, arguments: int, kv: int) -> None:
        """Runs a node. Raises nothing: its caller is native code."""
        if self._failure is not None:
            return
        try:
            self._nodes[index](index, arguments, kv)
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """Raises what a node of the step raised first."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
