"""A file of kernels whose import never ends, and has a child that never ends either: they wait for a pipe's other end."""

import os
import subprocess
from pathlib import Path

home = Path(os.environ["HOME"])  # what a test's process passes on
with subprocess.Popen(["cat", str(home / "pipe")]) as child:
    (home / f"{os.getpid()}.started").write_text(str(child.pid))
