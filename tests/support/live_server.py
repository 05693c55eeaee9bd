"""The real server on a real socket, over a scripted replay: no weights, exact replies, no sleeping."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Base

from flare.config import ServerSettings
from flare.http.server import Server
from flare.http.startup import bind
from flare.runtime import Runtime
from flare.served import ServedModel
from flare.text.template import ChatTemplate
from flare.text.tokenizer import Tokenizer
from flare.thinking import NO_THINKING
from tests.support.scripted_replay import ScriptedReplay

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM_START, IM_END, BOS = 256, 257, 258
VOCABULARY = 259
EOS = IM_END


def byte_tokenizer(*more: str) -> Tokenizer:
    """One token a byte (its id is the byte's value), three special tokens, and `more` of them, from VOCABULARY on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    base = Base(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|bos|>", *more)])
    return Tokenizer(base, bos_token_id=BOS, eos_token_ids=[EOS])


def reply(text: str | bytes) -> list[int]:
    """The tokens of a scripted reply that ends with the end token."""
    return [*(text.encode() if isinstance(text, str) else text), EOS]


def make_model(**changes: Any) -> ServedModel:
    values: dict[str, Any] = {
        "id": "org/tiny",
        "root": "org/tiny",
        "names": ("org/tiny",),
        "created": 1_700_000_000,
        "fingerprint": "core-0123456789abcdef",
        "context_length": 512,
        "vocabulary": VOCABULARY,
        "max_concurrency": 4,
        "prefill_chunk": 64,
        "bos": BOS,
        "eos": frozenset({EOS}),
        "thinking": NO_THINKING,
        "inline_system": False,
        "has_template": True,
        "defaults": {"temperature": 0.0, "seed": 0},
    }
    return ServedModel(**(values | changes))


class LiveServer:
    """A server in a thread of this process. `replay` scripts it, `runtime` shows its state.

    With `runtime` given it serves that one, and `replay` is unused.
    """

    def __init__(
        self,
        *,
        script: Callable[[tuple[int, ...], int], Any] | None = None,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        replay: Mapping[str, Any] | None = None,
        max_waiting: int = 64,
        template: str = TEMPLATE,
        runtime: Runtime | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"max_context": 512, "max_step_tokens": 64, "kv_pages": 256} | dict(replay or {})
        self.replay = ScriptedReplay(vocabulary=VOCABULARY, script=script, **sizes)
        self.runtime = runtime or Runtime(
            replay=self.replay,
            tokenizer=byte_tokenizer(),
            template=ChatTemplate(template, bos_token="<|bos|>", eos_token="<|im_end|>"),
            model=make_model(**dict(model or {})),
            max_waiting=max_waiting,
        )
        self.settings = ServerSettings(**{"port": 0, **dict(settings or {})})
        self.server = Server(self.runtime, self.settings)
        self.sock: socket.socket = bind("127.0.0.1", 0)
        self.port: int = self.sock.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self.on_loop(self.server.start(self.sock))
        return self

    def __exit__(self, *_: object) -> None:
        self.replay.resume()
        self.on_loop(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.runtime.close()
        self.sock.close()

    def on_loop(self, work: Any) -> Any:
        """Runs a coroutine on the server's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def until(self, true: Callable[[], bool]) -> None:
        """Waits until something holds on the server's loop. Raises TimeoutError."""

        async def wait() -> None:
            async with asyncio.timeout(15):
                while not true():
                    await asyncio.sleep(0.002)

        self.on_loop(wait())

    def idle(self) -> None:
        """Waits until nothing of any request is left, its body included, and checks it."""
        generator = self.server.generator
        self.until(
            lambda: (
                not generator.answers
                and generator.admission.used == generator.bodies.used == 0
                and not self.server.app.keeper.streams
            )
        )
        self.until(lambda: (s := self.runtime.stats()).active == s.waiting == 0 and s.free_pages == s.total_pages)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own; `body` is bytes, or what JSON is made from."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, data = self.request("POST", path, body, headers)
        return status, json.loads(data)


def events(data: bytes) -> list[Any]:
    """The data frames of a stream, decoded; the sentinel stays as text. Comments are left out."""
    frames = [frame for frame in data.split(b"\n\n") if frame and not frame.startswith(b":")]
    assert all(frame.startswith(b"data: ") for frame in frames), frames
    return [frame[6:].decode() if frame == b"data: [DONE]" else json.loads(frame[6:]) for frame in frames]
