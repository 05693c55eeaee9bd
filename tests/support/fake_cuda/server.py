"""`flare serve` on a core's cuda target, in a process of its own whose driver is the fake one."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LAUNCHER = "tests.support.fake_cuda.launcher"
KERNELS = "ignition.targets.cuda.kernels"
PATIENCE_S = 240
"""For an answer: an interpreted step of a tiny model takes seconds."""


class FakeDeviceServer:
    """Serves a core that has a cuda target for sm_90a, with these options besides. `with` ends it. launcher: how Python runs
    the launcher; fail: the driver's setting of that name."""

    def __init__(
        self, core: Path, library: Path, *options: str, launcher: Sequence[str] = ("-m", LAUNCHER), fail: str = ""
    ) -> None:
        graphs = core / "graphs" / "cuda-sm_90a.msgpack"
        command = [sys.executable, *launcher, library, KERNELS, graphs, "--", "serve", core]
        command += ["--port", "0", "--kv-memory", "1MiB", *options]
        environment = os.environ | {"FAKE_CUDA_FAIL": fail}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if found := re.search(r"^serving .*:(\d+)/", line):
                self.port = int(found[1])
                return
        raise AssertionError("".join(said))

    def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        return self._request("POST", path, json.dumps(body), status)

    def get(self, path: str) -> Any:
        return self._request("GET", path)

    def _request(self, method: str, path: str, body: str | None = None, status: int = 200) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == status, answer
            return answer
        finally:
            connection.close()

    def ended(self) -> tuple[int, str]:
        """Waits until the process ends by itself; returns its exit code, and what it wrote since it served."""
        _, said = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, said

    def __enter__(self) -> FakeDeviceServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            self._process.communicate()
