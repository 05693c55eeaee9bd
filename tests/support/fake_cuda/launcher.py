"""Runs a command of flare in a process whose CUDA driver is the fake one:

    python -m tests.support.fake_cuda.launcher LIBRARY PACKAGE GRAPHS [GRAPHS...] -- serve CORE ...

LIBRARY is what `library.build` made, PACKAGE holds the kernels' sources, GRAPHS are the core's graph files. flare itself stays
free of torch and Triton: only this module, which no server runs outside the tests, knows them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


def main(arguments: list[str]) -> None:
    library, package, *rest = arguments
    end = rest.index("--")
    from flare.core.cuda_graph import decode_cuda_graphs
    from tests.support.fake_cuda.executor import Executor
    from tests.support.fake_cuda.library import FakeCuda

    graphs = [decode_cuda_graphs(Path(file).read_bytes(), file) for file in rest[:end]]
    executor = Executor(FakeCuda(Path(library)), *graphs, package=package)
    sys.argv = ["flare", *rest[end + 1 :]]
    from flare.cli import main as flare

    flare()
    assert executor  # the driver calls it as long as the command runs


if __name__ == "__main__":
    main(sys.argv[1:])
