"""The fake libcuda.so.1 (driver.c): built with the system's compiler, loaded in the place of NVIDIA's, and set up by tests.

Its declarations come from the driver's header, which Triton carries.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from ctypes import c_char_p, c_int, c_int64, c_uint64
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.c")
SONAME = "libcuda.so.1"


def header() -> Path:
    """The driver's header, of Triton's package."""
    package = importlib.util.find_spec("triton")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "backends/nvidia/include/cuda.h"


def build(folder: Path) -> Path:
    """Compiles the library into a folder and returns its path."""
    folder.mkdir(parents=True)
    path = folder / SONAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}"]
    subprocess.run(["gcc", *flags, f"-I{header().parent}", SOURCE, "-o", path, "-ldl"], check=True)
    return path


class FakeCuda:
    """The loaded library. A process has one at most, and it must come before the first call of the driver: what then asks for
    libcuda.so.1 gets this one, since it has that name and is there already."""

    def __init__(self, path: Path) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            mapped = line.partition("/")[2]
            if mapped.endswith(("/libcuda.so.1", "/libcuda.so")) and f"/{mapped}" != str(path):
                raise RuntimeError(f"/{mapped} is loaded: a process has one driver, the fake or a real one")
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library.fake_set.argtypes = [c_char_p, c_int64]
        self.library.fake_fail.argtypes = [c_char_p]

    def set(self, name: str, value: int) -> None:
        """Sets `capability` (90 is 9.0), `memory` in bytes, the number of `devices`, the CUDA version of the `driver`."""
        assert self.library.fake_set(name.encode(), value) == 0

    def fail(self, text: str) -> None:
        """Has a call fail: "cuGraphLaunch=719@2" gives the second next cuGraphLaunch the result 719."""
        assert self.library.fake_fail(text.encode()) == 0

    def reset(self) -> None:
        """Forgets all that happened; what was allocated is gone."""
        self.library.fake_reset()

    def blocks(self) -> list[tuple[int, int]]:
        """Address and size of what is allocated, pinned host memory too."""
        begin, size = (c_uint64 * 4096)(), (c_uint64 * 4096)()
        count = self.library.fake_blocks(begin, size, c_int(4096))
        return list(zip(begin[:count], size[:count], strict=True))

    def contexts(self) -> int:
        """How often the primary context is held."""
        return self.library.fake_contexts()

    def misfrees(self) -> int:
        """How often something was to be freed while work was under way, which the driver refused."""
        return self.library.fake_misfrees()
