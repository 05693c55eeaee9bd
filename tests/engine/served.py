"""An engine whose steps a test lets through one by one, and what it delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flare.engine import Delivery, Engine, EngineLimits, Request, SamplingParams
from tests.support.one_by_one import one_by_one
from tests.support.scripted_replay import ScriptedReplay

GREEDY = SamplingParams(temperature=0)
PATIENCE = 20.0  # seconds until a test that waits for an event fails


class Served:
    """An engine whose steps the test lets through one by one, and everything that it delivered."""

    def __init__(self, max_waiting: int = 64, stepped: bool = True, **sizes: object) -> None:
        self.replay = ScriptedReplay(**sizes)
        self.replay.on_step = self._on_step if stepped else None
        self.engine = Engine(self.replay, EngineLimits(max_waiting=max_waiting), self._deliver)
        self.batches: list[list[Delivery]] = []
        self.finals: dict[int, Delivery] = {}
        self.replies: dict[int, list[int]] = {}
        self.submitted: list[Request] = []
        self.changed = threading.Condition()
        self.held = False
        self.permits = 0
        self.free = False

    def submit(self, request: Request) -> Request:
        self.engine.submit(request)
        self.submitted.append(request)
        return request

    def wait(self, predicate: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, PATIENCE), "the engine did not come to the expected state"

    def settle(self) -> None:
        """Returns when the engine has come to its next step, or has nothing live."""
        self.wait(lambda: self.held or len(self.finals) == len(self.submitted))

    def step(self, times: int = 1) -> None:
        """Lets steps through; each is done, and delivered, when this returns."""
        for _ in range(times):
            self.settle()
            with self.changed:
                if self.held:
                    self.held = False
                    self.permits += 1
                    self.changed.notify_all()
            self.settle()

    def run(self) -> None:
        """Lets everything through until nothing is live."""
        with self.changed:
            self.free = True
            self.changed.notify_all()
        self.wait(lambda: len(self.finals) == len(self.submitted))

    def stop(self) -> None:
        with self.changed:
            self.free = True
            self.changed.notify_all()
        self.engine.close()

    def _on_step(self, n_tokens: int, n_rows: int) -> None:
        with self.changed:
            if self.free:
                return
            self.held = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.permits > 0 or self.free, PATIENCE)
            self.held = False
            self.permits = max(0, self.permits - 1)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        with self.changed:
            self.batches.append(deliveries)
            for delivery in deliveries:
                key = delivery.request.id
                assert key not in self.finals, "a delivery after the final one"
                self.replies.setdefault(key, []).extend(delivery.tokens)
                if delivery.final:
                    self.finals[key] = delivery
            self.changed.notify_all()

    def assert_idle(self) -> None:
        """Exact counts with nothing live: every page and slot is free and every request is counted once."""
        stats = self.engine.stats()
        assert (stats.active, stats.waiting, stats.free_pages) == (0, 0, stats.total_pages)
        assert stats.completed + stats.cancelled + stats.failed == len(self.submitted) == len(self.finals)
        self.engine._scheduler.check_integrity()
        assert self.replay.refusals == []


def request(number: int, prompt: list[int], most: int | None, sampling: SamplingParams = GREEDY) -> Request:
    return Request(number, prompt, most, sampling)


def expected(served: Served, number: int) -> list[int]:
    wanted = served.submitted[number]
    return one_by_one(served.replay.model, wanted, served.engine.context_length)[0]
