"""The servers that are compared: how each is started, and what a request to it needs for an answer of full length."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

HOST = "127.0.0.1"
POLL_S = 0.005


@dataclass(frozen=True)
class Contestant:
    """One server program with its weights. `{port}` in an argument of `command` is replaced by the port."""

    name: str
    weights: str
    command: list[str]
    model: str = "model"
    full_length: dict[str, Any] = field(default_factory=dict)  # joins a request whose answer must not end early
    environment: dict[str, str] = field(default_factory=dict)


def flare(program: str, core: Path, threads: int | None, weights: str) -> Contestant:
    """`flare serve`; without `threads`, as many as it takes by itself."""
    command = [program, "serve", str(core), "--host", HOST, "--port", "{port}"]
    if threads is not None:
        command += ["--threads", str(threads)]
    return Contestant("flare", weights, command, full_length={"ignore_eos": True})


def llama(python: str, gguf: Path, threads: int, weights: str, end_token: int = 2) -> Contestant:
    """llama-cpp-python's server with its own defaults, among them a context of 2048 tokens; it serves one at a time."""
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--host", HOST, "--port", "{port}"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    # Without the next option a request that arrives cuts off the one that is being answered.
    command += ["--interrupt_requests", "false", "--verbose", "false"]
    return Contestant("llama-cpp-python", weights, command, full_length={"logit_bias": {str(end_token): -100}})


def transformers(python: str, checkpoint: Path, threads: int, weights: str) -> Contestant:
    """`transformers serve`, run by the interpreter that has it, on a Hugging Face directory."""
    program = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    command = [python, "-c", program, "serve", str(checkpoint), "--host", HOST, "--port", "{port}", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    return Contestant("transformers serve", weights, command, model=str(checkpoint), environment=offline)


class Server:
    """A running contestant; a context manager that ends the process and all its children."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant, self.port = contestant, free_port()
        self.log = tempfile.TemporaryFile()
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [part.replace("{port}", str(self.port)) for part in contestant.command],
            env=os.environ | contestant.environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        machine.stop(self.process)
        self.log.close()

    def wait_until_ready(self, limit_s: float = 180.0) -> float:
        """Polls until the server answers GET /health or /v1/models with 200; returns seconds since process start."""
        while not any(self.answers(path) for path in ("/health", "/v1/models")):
            self.check_alive(limit_s)
            time.sleep(POLL_S)
        return time.perf_counter() - self.started

    def check_alive(self, limit_s: float) -> None:
        """Raises RuntimeError, with the end of the server's output, when it has ended or `limit_s` have passed."""
        ended = self.process.poll() is not None
        if ended or time.perf_counter() - self.started > limit_s:
            self.log.seek(0)
            tail = self.log.read()[-400:].decode(errors="replace").strip()
            state = f"ended with code {self.process.returncode}" if ended else f"was not ready after {limit_s:.0f} s"
            raise RuntimeError(f"{self.contestant.name} {state}: {tail}")

    def answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def first_text(self, body: dict[str, Any], limit_s: float = 180.0) -> bool:
        """Sends one streaming chat request; True as soon as some text has arrived, False if it was not accepted."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=limit_s)
        payload = json.dumps(body | {"model": self.contestant.model, "stream": True})
        try:
            connection.request("POST", "/v1/chat/completions", payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status == 200 and any(event_text(event) for event in events(response))
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def events(lines: Any) -> Any:
    """The JSON objects of a server-sent event stream, given its lines as bytes, up to [DONE]."""
    for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def event_text(event: dict[str, Any]) -> str:
    """The text that one chat completion chunk carries."""
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
