"""Nodes that a kernel library calls back for: ops that are interpreted, and pieces of a step that a device runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flare.core.graph import DEVICE, INTERPRETED, Named
from flare.errors import CoreError

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


def called_nodes(nodes: Sequence[Named], interpret: Run | None, pieces: Mapping[int, Run]) -> CalledNodes | None:
    """What the library of a program with these nodes calls back for; None where it does not. `pieces` are by number of a node.

    Raises CoreError for a piece that nobody runs.
    """
    found: dict[int, Run] = {}
    for index, node in enumerate(nodes):
        if node.kernel == INTERPRETED and interpret is not None:
            found[index] = interpret
        elif node.kernel == DEVICE:
            if index not in pieces:
                raise CoreError(
                    f"node {index}: a piece for a device in a graph of the processor; export the core again"
                )
            found[index] = pieces[index]
    return CalledNodes(found) if found else None
