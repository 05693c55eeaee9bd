"""Starts a server on a core, asks it one question over HTTP, prints the answer as it comes, and stops the server.

    python -m benchmarks.ask cores/smollm2 "What is the capital of France?"

Standard library only: the shortest complete client of the server's streaming chat.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from pathlib import Path
from shlex import quote

from benchmarks.contestants import HOST, Server, event_text, events, flare

GO_ON = """
To go on:
  {flare} serve {core}
  curl http://{host}:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "temperature": 0, "stream": true}}'
  {flare} chat {core} --temperature 0"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("core", type=Path)
    parser.add_argument("question")
    parser.add_argument("--flare", default=str(Path(sys.executable).parent / "flare"), help="the program to start")
    arguments = parser.parse_args()
    with Server(flare(arguments.flare, arguments.core, None, "")) as server:
        print(f"$ {arguments.flare} serve {arguments.core} --port {server.port}", flush=True)
        try:
            ready = server.wait_until_ready(limit_s=60)
        except RuntimeError as error:
            raise SystemExit(str(error)) from None
        print(f"ready {ready:.2f} s after process start\n\n> {arguments.question}\n", flush=True)
        ask(server, arguments.question, ready)
    print(GO_ON.format(flare=quote(arguments.flare), core=quote(str(arguments.core)), host=HOST))


def ask(server: Server, question: str, ready: float) -> None:
    """Prints the streamed answer, then when its parts came."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=120)
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200, "stream": True}
    body |= {"model": "smollm2", "temperature": 0, "stream_options": {"include_usage": True}}
    sent, first, usage = time.perf_counter(), 0.0, {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {response.read(500).decode(errors='replace')}")
    for event in events(response):
        if event.get("error"):
            raise SystemExit(f"the server ended the stream with an error: {event['error']}")
        usage = event.get("usage") or usage
        text = event_text(event)
        first = first or (time.perf_counter() if text else 0.0)
        print(text, end="", flush=True)
    ended = time.perf_counter()
    connection.close()
    if not first:
        raise SystemExit("the server ended the stream without any text")
    tokens = usage["completion_tokens"]
    rate = (tokens - 1) / (ended - first) if tokens > 1 else 0.0
    print(
        f"\n\nprocess start to first token {ready + first - sent:.2f} s: "
        f"ready {ready:.2f} s, then {(first - sent) * 1000:.0f} ms for {usage['prompt_tokens']} prompt tokens\n"
        f"answer: {tokens} tokens at {rate:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
