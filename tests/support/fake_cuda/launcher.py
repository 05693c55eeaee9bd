"""Runs a command of flare in a process whose CUDA driver is the fake one:

    python -m tests.support.fake_cuda.launcher LIBRARY PACKAGE GRAPHS [GRAPHS...] -- serve CORE ...

LIBRARY is what `library.build` made, PACKAGE holds the kernels' sources, GRAPHS are the core's graph files. flare itself stays
free of torch and Triton: only this module, which no server runs outside the tests, knows them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

USAGE = "python -m tests.support.fake_cuda.launcher LIBRARY PACKAGE GRAPHS [GRAPHS...] -- COMMAND [OPTIONS]"

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


def main(arguments: list[str]) -> None:
    end = arguments.index("--") if "--" in arguments else 0
    if end < 3:
        _refuse(f"usage: {USAGE}")
    library, package, *files = arguments[:end]
    for file in (library, *files):
        if not Path(file).is_file():
            _refuse(f"{file}: no such file; usage: {USAGE}")
    from flare.core.cuda_graph import decode_cuda_graphs
    from tests.support.fake_cuda.executor import Executor
    from tests.support.fake_cuda.library import FakeCuda

    graphs = [decode_cuda_graphs(Path(file).read_bytes(), file) for file in files]
    executor = Executor(FakeCuda(Path(library).resolve()), *graphs, package=package)
    sys.argv = ["flare", *arguments[end + 1 :]]
    from flare.cli import main as flare

    flare()
    assert executor  # the driver calls it as long as the command runs


def _refuse(problem: str) -> None:
    print(problem, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
