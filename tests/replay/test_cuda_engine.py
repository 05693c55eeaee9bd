"""The engine on a cuda replay: histories and rows that move, log probabilities, and failures of the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate

import pytest

from flare.engine import Delivery, Engine, EngineLimits, Request, SamplingParams
from flare.replay.cuda import CudaReplay
from tests.replay.conftest import Open
from tests.support.fake_cuda.library import FakeCuda
from tests.support.tiny_cuda.core import SCALE
from tests.support.tiny_cuda.sizes import V

PATIENCE = 60.0  # seconds until a test that waits for an event fails
GREEDY = SamplingParams(temperature=0)
PENALISED = SamplingParams(temperature=0, presence_penalty=1.0)


class Run:
    """An engine, and all that it delivered."""

    def __init__(self, replay: CudaReplay) -> None:
        self.engine = Engine(replay, EngineLimits(), self._deliver)
        self.replies: dict[int, list[int]] = {}
        self.scores: dict[int, list[float]] = {}
        self.errors: dict[int, str | None] = {}
        self._changed = threading.Condition()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.errors) == count, PATIENCE)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        with self._changed:
            for delivery in deliveries:
                number = delivery.request.id
                self.replies.setdefault(number, []).extend(delivery.tokens)
                self.scores.setdefault(number, []).extend(entry.logprob for entry in delivery.scores or ())
                if delivery.final:
                    self.errors[number] = delivery.error
            self._changed.notify_all()


@pytest.fixture
def run(open_tiny: Open) -> Iterator[Run]:
    """An engine that starts once its requests are there."""
    made = Run(open_tiny(kv_pages=12))
    yield made
    made.engine.close()


def penalised(prompt: list[int], count: int) -> list[int]:
    """What the tiny core draws with a penalty: the likeliest token plus the sum of all before, modulo V."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((V - 1 + sum(tokens)) % V)
    return tokens[len(prompt) :]


def test_requests_come_and_go_and_each_reply_is_its_own(run: Run) -> None:
    """More requests than slots, of different lengths: rows change hands, and their histories with them."""
    prompts = [[1, 2, 3], [60] * 20, [7], [5, 5], [9, 8, 7, 6], [2], [30, 31]]
    counts = [6, 2, 5, 1, 4, 3, 6]
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        run.engine.submit(Request(number, prompt, count, PENALISED if number % 3 != 2 else GREEDY))
    run.engine.start()
    run.wait(len(prompts))
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        wanted = penalised(prompt, count) if number % 3 != 2 else [V - 1] * count
        assert (run.replies[number], run.errors[number]) == (wanted, None), number
    assert run.engine.healthy and run.engine.stats().free_pages == 12


def test_prompts_are_scored(run: Run) -> None:
    prompt = [4, 11, 3, 8, 2, 60, 1]
    run.engine.submit(Request(0, prompt, 2, GREEDY, score=0), Request(1, [6, 7], 2, PENALISED))
    run.engine.start()
    run.wait(2)
    sums = accumulate(token + 1 for token in prompt)
    assert run.scores[0] == [SCALE * total * (token + 1) for total, token in zip(sums, prompt[1:], strict=False)]
    assert run.replies == {0: [V - 1] * 2, 1: penalised([6, 7], 2)}


def test_a_failed_launch_ends_the_steps_requests_alone(run: Run, fake: FakeCuda) -> None:
    fake.fail("cuGraphLaunch=701")
    run.engine.submit(Request(0, [1, 2], 3, PENALISED))
    run.engine.start()
    run.wait(1)
    assert run.errors[0] and "cuGraphLaunch" not in run.errors[0]
    run.engine.submit(Request(1, [3, 4], 3, PENALISED))
    run.wait(2)
    assert (run.replies[1], run.errors[1], run.engine.healthy) == (penalised([3, 4], 3), None, True)


def test_a_lost_device_ends_the_engine(run: Run, fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    fake.fail("cuStreamSynchronize=719@3")
    run.engine.submit(Request(0, [1, 2], 9, PENALISED), Request(1, [3], 9, GREEDY))
    run.engine.start()
    run.wait(2)
    assert all(run.errors.values()) and not run.engine.healthy
    assert "its replay is dead: cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED" in caplog.text
