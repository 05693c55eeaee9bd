"""The API within a process, over a scripted replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from flare.api import EventReply, InProcess
from flare.config import ServerSettings
from flare.runtime import Runtime
from flare.text.template import ChatTemplate
from tests.support.live_server import TEMPLATE, VOCABULARY, byte_tokenizer, make_model
from tests.support.scripted_replay import ScriptedReplay


class Local(InProcess):
    """An InProcess over a scripted replay, which `replay` is."""

    def __init__(self, script: Any = None, *, max_waiting: int = 64, slots: int = 4, **settings: Any) -> None:
        self.replay = ScriptedReplay(
            vocabulary=VOCABULARY, script=script, max_context=512, max_step_tokens=64, kv_pages=256, slots=slots
        )
        runtime = Runtime(
            replay=self.replay,
            tokenizer=byte_tokenizer(),
            template=ChatTemplate(TEMPLATE, bos_token="<|bos|>", eos_token="<|im_end|>"),
            model=make_model(),
            max_waiting=max_waiting,
        )
        super().__init__(runtime, ServerSettings(**settings))

    def close(self) -> None:
        self.replay.resume()
        super().close()

    def until(self, true: Callable[[], bool]) -> None:
        """Waits until something holds on the loop. Raises TimeoutError."""

        async def wait() -> None:
            async with asyncio.timeout(15):
                while not true():
                    await asyncio.sleep(0.002)

        self.run(wait())

    def idle(self) -> None:
        """Waits until nothing of any request is left, and checks it."""
        generator = self.service.generator
        self.until(lambda: not generator.answers and generator.admission.used == generator.bodies.used == 0)
        self.until(lambda: (s := self.runtime.stats()).active == s.waiting == 0 and s.free_pages == s.total_pages)
        self.until(lambda: not self._calls)


def stream(model: InProcess, path: str, body: Any) -> EventReply:
    answer = model.request(path, body | {"stream": True})
    assert isinstance(answer, EventReply), answer
    return answer
