"""A process of benchmarks.gpu_check whose driver is the fake one, with a planted defect where one is named:

    python -m tests.support.fake_cuda.check_child LIBRARY DEFECT GROUP FOLDER SKIP

DEFECT: some of these, joined by commas. "result=SOURCE" has a kernel's first result be wrong; "bit=SOURCE" has it be a bit off,
in the bucket of one token alone; "fault=N" has the N-th launch of a graph lose the device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


def main(arguments: list[str]) -> int:
    library, defect, group, folder, skip = arguments
    import warnings

    import torch

    from benchmarks.gpu_check.child import main as child
    from flare.core.cuda_graph import Kernel, decode_cuda_graphs
    from tests.support.fake_cuda.executor import Executor, by_name
    from tests.support.fake_cuda.library import FakeCuda

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's about NaN, which a device does not give
    defects = dict(part.split("=") for part in defect.split(",") if part)

    class Spoiled(Executor):
        def _launch(self, kernel: Kernel, grid: tuple[int, ...], raw: list[bytes]) -> None:
            super()._launch(kernel, grid, raw)
            given = {name: parameters[0] for name, parameters in by_name(kernel, raw).items()}
            if kernel.source == defects.get("result"):
                self._argument(kernel.signature["out"], given["out"])[0] += 1
            elif kernel.source == defects.get("bit") and int.from_bytes(given["tokens"], "little") == 1:
                self._argument(kernel.signature["out"], given["out"]).view(torch.uint8)[0] ^= 1

    fake = FakeCuda(Path(library))
    graphs = [decode_cuda_graphs(file.read_bytes(), file.name) for file in Path(folder).glob("*/graphs/cuda-*.msgpack")]
    executor = Spoiled(fake, *graphs)
    if "fault" in defects and skip == "0":
        fake.fail(f"cuGraphLaunch=700@{defects['fault']}")
    code = child(group, Path(folder), int(skip))
    assert executor  # the driver calls it as long as the checks run
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
