"""The scripted server as a process of its own, forked from one that has imported all it needs: to import it takes a second.

The parent of all servers is multiprocessing's fork server; it runs nothing else, and ends with the test process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

START_S, STOP_S = 60.0, 30.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.scripted_server"])


class ForkedServer:
    """`python -m tests.support.scripted_server` with these arguments; `url` is its address, "" if it ended before it had one.

    `log` takes its standard error; without one it is this process's. Its environment is what this process had when it started
    the first of them.
    """

    def __init__(self, arguments: Sequence[str], log: Path | None = None) -> None:
        output, its_output = _CONTEXT.Pipe(duplex=False)
        its_input, self._input = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_serve, args=(arguments, its_input, its_output, log), daemon=True)
        self._process.start()
        its_input.close()
        its_output.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with output, os.fdopen(os.dup(output.fileno())) as lines:
            if not output.poll(START_S):
                self.stop()
                raise TimeoutError(f"the server has said nothing for {START_S} s")
            self.url = lines.readline().strip()

    def stop(self) -> int | None:
        """Ends its standard input and waits until it has stopped; returns its exit status. None: it had to be killed."""
        self._input.close()
        self._process.join(STOP_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
        return code


def _serve(arguments: Sequence[str], input: Connection, output: Connection, log: Path | None) -> None:
    from tests.support import scripted_server

    os.dup2(input.fileno(), 0)
    os.dup2(output.fileno(), 1)
    input.close()
    output.close()
    if log is not None:
        with log.open("w") as errors:
            os.dup2(errors.fileno(), 2)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.argv[1:] = arguments
    scripted_server.main()
