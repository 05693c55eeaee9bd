"""A server as a process of its own, as users run it: the scripted one, or `flare serve` over a core."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.forked_server import ForkedServer

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 60.0
IDLE_S = 15.0
POLL_S = 0.01


class Process:
    """A running server. `url` is its address without /v1, `log` the file of its standard error."""

    def __init__(self, url: str, log: Path, prompts: Path, key: str = "") -> None:
        self.url = url
        self.log = log
        self._prompts = prompts
        self._authorization = {"Authorization": f"Bearer {key}"} if key else {}

    def prompts(self) -> list[str]:
        """Every prompt that a scripted server has seen, in order; a control token is one NUL."""
        return [json.loads(line) for line in self._prompts.read_text().splitlines()]

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own, with the server's key; `body` is bytes, or what JSON is made from."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **self._authorization, **(headers or {})}
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """What the server says of its state."""
        return json.loads(self.request("GET", "/v1/flare/status")[2])

    def idle(self) -> None:
        """Waits until nothing of any request is left. Raises AssertionError with the server's state after IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        while True:
            status = self.status()
            engine = status["engine"]
            held = [engine["active"], engine["waiting"], status["admission"]["used"], status["bodies"]["used_bytes"]]
            if not any(held) and engine["free_pages"] == engine["total_pages"]:
                return
            assert time.monotonic() < deadline, status
            time.sleep(POLL_S)


@contextmanager
def scripted(
    folder: Path,
    replies: Sequence[Any] | Mapping[str, Any] = (),
    *,
    special: Sequence[str] = (),
    plain: str = "Fine.",
    context: int = 1 << 20,
    settings: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> Iterator[Process]:
    """The scripted server, whose replies are numbered or named; see tests/support/scripted_server.py. At the end it must
    be idle, and go in peace. `folder` takes its files."""
    files = {name: folder / f"{name}.json" for name in ("replies", "prompts")}
    files["replies"].write_text(json.dumps(replies))
    files["prompts"].touch()
    options: dict[str, object] = {
        "named" if isinstance(replies, Mapping) else "replies": files["replies"],
        "prompts": files["prompts"],
        "special": json.dumps(special),
        "plain": plain,
        "context": context,
        "settings": json.dumps(settings or {}),
        "model": json.dumps(model or {}),
    }
    log = folder / "log.txt"
    server = ForkedServer([f"--{name}={value}" for name, value in options.items()], log)
    try:
        assert server.url, log.read_text()
        process = Process(server.url, log, files["prompts"], key=(settings or {}).get("api_key", ""))
        yield process
        process.idle()
    finally:
        assert server.stop() == 0, log.read_text()


@contextmanager
def served(folder: Path, core: Path) -> Iterator[Process]:
    """`flare serve CORE` on a free port, ended as a service manager would. `folder` takes its log."""
    log = folder / "log.txt"
    command = [sys.executable, "-m", "flare.cli", "serve", str(core), "--port", "0"]
    with log.open("w") as errors, subprocess.Popen(command, cwd=ROOT, stderr=errors) as server:
        try:
            deadline = time.monotonic() + START_S
            while (told := re.search(r"on (http://127\.0\.0\.1:\d+)/v1\n", log.read_text())) is None:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(POLL_S)
            process = Process(told[1], log, folder / "prompts.json")
            yield process
            process.idle()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0, log.read_text()
