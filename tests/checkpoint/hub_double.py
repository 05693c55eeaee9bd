"""A hub on loopback: the few routes that a snapshot download walks, with etags, ranges, and failures on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """One repository's files by name. Tests set the failures; `requests` records (method, path, Range header)."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.repository = repository
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.status: tuple[int, str] | None = None  # answer of every route, with its X-Error-Code
        self.gated = False  # files are refused, the listing is not
        self.cut: str | None = None  # this file's first answer ends in the middle
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    @property
    def commit(self) -> str:
        """A commit id that follows the content."""
        return hashlib.sha1(b"".join(name.encode() + self.files[name] for name in sorted(self.files))).hexdigest()

    def downloaded(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Runs the double for the duration of the block; `hub.url` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer("HEAD")

        def do_GET(self) -> None:
            self.answer("GET")

        def answer(self, method: str) -> None:
            hub.requests.append((method, self.path, self.headers.get("Range")))
            path = self.path.partition("?")[0]
            if hub.status is not None:
                self.reply(hub.status[0], {"X-Error-Code": hub.status[1], "X-Error-Message": "no"}, b"")
            elif path == f"/api/models/{hub.repository}/revision/main":
                siblings = [{"rfilename": name} for name in hub.files]
                self.json({"id": hub.repository, "modelId": hub.repository, "sha": hub.commit, "siblings": siblings})
            elif path == f"/api/models/{hub.repository}/tree/{hub.commit}":
                self.json(
                    [
                        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for name, content in hub.files.items()
                    ]
                )
            elif match := re.fullmatch(rf"/{hub.repository}/resolve/{hub.commit}/([^/]+)", path):
                self.file(method, match[1])
            else:
                self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"")

        def file(self, method: str, name: str) -> None:
            if hub.gated:
                self.reply(403, {"X-Error-Code": "GatedRepo"}, b"")
                return
            content = hub.files[name]
            headers = {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": hub.commit,
                "Accept-Ranges": "bytes",
            }
            ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(ranged[1]) if ranged else 0
            if ranged:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            body = content[start:]
            if method == "GET" and hub.cut == name:
                hub.cut = None
                self.reply(200, headers, body[: len(body) // 2], length=len(body))
                self.close_connection = True
                return
            self.reply(206 if ranged else 200, headers, b"" if method == "HEAD" else body, length=len(body))

        def json(self, value: object) -> None:
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def reply(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
