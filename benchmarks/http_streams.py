"""The HTTP side alone: how many tokens a second reach many clients when the model costs nothing.

`python -m benchmarks.http_streams [--streams 64 256] [--tokens N]` starts the server over a scripted core, opens all
streams at once, and reads them with one epoll loop in this process: tokens per second, the 99th percentile of the gap
between a stream's reads, the share of the slowest stream, and the server's peak memory.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = b'"delta":{"content":"a'
READ_BYTES = 1 << 16


@dataclass
class Stream:
    """One client's stream. `tail` is the end of what came, in which a mark may begin."""

    tokens: int = 0
    last: float = 0.0
    tail: bytes = b""
    gaps: list[float] = field(default_factory=list)
    ended: float = 0.0

    def take(self, data: bytes, now: float) -> None:
        text = self.tail + data
        self.tokens += text.count(MARK)
        self.tail = text[-(len(MARK) - 1) :]
        if self.last:
            self.gaps.append(now - self.last)
        self.last = now


def connect(port: int, tokens: int) -> socket.socket:
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": tokens}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(head.encode() + body)
    return sock


def measure(port: int, streams: int, tokens: int) -> dict[str, float]:
    """Opens `streams` streams of `tokens` tokens each and reads all to their end. Raises RuntimeError if one is short."""
    selector = selectors.DefaultSelector()
    seen = [Stream() for _ in range(streams)]
    begun = time.perf_counter()
    for stream in seen:
        selector.register(connect(port, tokens), selectors.EVENT_READ, stream)
    open_streams = streams
    while open_streams:
        for key, _ in selector.select():
            data = key.fileobj.recv(READ_BYTES)  # type: ignore[union-attr]
            now = time.perf_counter()
            if data:
                key.data.take(data, now)
            else:
                key.data.ended = now
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                open_streams -= 1
    wall = time.perf_counter() - begun
    short = [stream.tokens for stream in seen if stream.tokens != tokens]
    if short:
        raise RuntimeError(f"{len(short)} of {streams} streams are short: {short[0]} of {tokens} tokens")
    gaps = sorted(gap for stream in seen for gap in stream.gaps)
    ends = [stream.ended - begun for stream in seen]
    return {
        "tokens_s": streams * tokens / wall,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "gap_max_ms": gaps[-1] * 1e3,
        "slowest": min(ends) / max(ends),
    }


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the server is gone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| streams | tokens/s | gap p99, ms | longest gap, ms | first end / last end | peak memory, MiB |")
    print("|---:|---:|---:|---:|---:|---:|")
    for streams in options.streams:
        command = [sys.executable, "-m", "tests.support.scripted_server", "--endless", "--slots", str(streams)]
        server = subprocess.Popen(
            [*command, "--context", "16384"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            measure(port, streams, 50)
            runs = [measure(port, streams, options.tokens) for _ in range(options.rounds)]
            runs.sort(key=lambda run: run["tokens_s"])
            middle = runs[len(runs) // 2]
            memory = peak_mib(server.pid)
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)
        figures = [f"{middle['tokens_s']:.0f}", f"{middle['gap_p99_ms']:.1f}", f"{middle['gap_max_ms']:.0f}"]
        print(f"| {streams} | {' | '.join(figures)} | {middle['slowest']:.2f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
