"""The scripted server as a process of its own, so that its memory, files and end are its own."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.forked_server import ForkedServer

VERSION = {"anthropic-version": "2023-06-01"}


class ServerProcess:
    """`tests.support.scripted_server` with these options; `port` is where it listens."""

    def __init__(self, *options: str) -> None:
        self._process = ForkedServer(options)
        assert self._process.url, f"the server did not start; it ended with {self._process.stop()}"
        self.port = int(self._process.url.rpartition(":")[2])

    def _memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def peak_bytes(self) -> int:
        """The most memory that it ever had."""
        return self._memory("VmHWM")

    def resident_bytes(self) -> int:
        return self._memory("VmRSS")

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    def request(self, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """One request on a connection of its own; `_` in a header's name stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        names = VERSION | {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            connection.request(method, path, data, names)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        return self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers)

    def send(self, data: bytes) -> int:
        """Sends bytes on a connection of their own; returns the status that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            try:
                connection.sendall(data)
            except ConnectionError:
                pass  # refused before all was sent
            return int(connection.recv(65536).split()[1])

    def numbers(self) -> dict[str, Any]:
        """What it reports of itself."""
        status, data = self.request("GET", "/metrics?format=json")
        assert status == 200
        return json.loads(data)

    def until(self, true: Callable[[], bool], patience_s: float = 30.0) -> None:
        """Waits until something holds. Raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError("the server did not come to the expected state")
            time.sleep(0.02)

    def close(self) -> None:
        assert self._process.stop() == 0
