"""The scheduler as pure code: random arrivals, cancels, lengths and pools against one-by-one generation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.engine.pages import PageError
from flare.engine.request import Request, StopCause
from flare.engine.sampling import SamplingParams
from flare.engine.scheduler import Scheduler
from tests.support.one_by_one import one_by_one
from tests.support.scripted_replay import ScriptedModel

MODEL = ScriptedModel(vocabulary=11)
GREEDY = SamplingParams(temperature=0)


def alone(request: Request, context: int) -> tuple[list[int], StopCause]:
    return one_by_one(MODEL, request, context)


class Driver:
    """Runs a scheduler's plans on paged cells and checks every plan's promises."""

    def __init__(self, slots: int, step_tokens: int, page_tokens: int, pages: int, context: int) -> None:
        self.scheduler = Scheduler(
            slots=slots, max_step_tokens=step_tokens, page_tokens=page_tokens, pages=pages, context=context
        )
        self.cells = [[0xDEAD] * page_tokens for _ in range(pages)]
        self.causes: dict[int, StopCause] = {}
        self.trace: list[list[tuple[int, int, int, tuple[int, ...]]]] = []

    def step(self) -> None:
        scheduler, cells, page_tokens = self.scheduler, self.cells, self.scheduler.page_tokens
        chunks = scheduler.plan()
        self.check(chunks)
        self.trace.append([(c.request.id, c.request.slot, c.length, tuple(c.request.pages)) for c in chunks])
        last: list[int] = []
        for request, length, sampled in chunks:
            start, end = request.computed, request.computed + length
            before = [cell for page in request.pages for cell in cells[page]][:start]
            for position, cell in enumerate(MODEL.extend(before, request.tokens[start:end]), start):
                cells[request.pages[position // page_tokens]][position % page_tokens] = cell
            if sampled:
                last.append(MODEL.peak([cell for page in request.pages for cell in cells[page]][:end]))
        scheduler.commit(chunks)
        for chunk, token in zip([chunk for chunk in chunks if chunk.sampled], last, strict=True):
            cause = scheduler.accept(chunk.request, token)
            if cause is not None:
                self.causes[chunk.request.id] = cause
        scheduler.check_integrity()

    def check(self, chunks: list) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        planned = [chunk.request for chunk in chunks]
        running = scheduler.running
        assert len(set(map(id, planned))) == len(planned) <= scheduler.slots
        assert set(map(id, planned)) <= set(map(id, running))
        assert all(chunk.length >= 1 for chunk in chunks)
        assert sum(chunk.length for chunk in chunks) <= scheduler.max_step_tokens
        for request, length, sampled in chunks:
            assert len(request.pages) * scheduler.page_tokens >= request.computed + length
            assert sampled == (request.computed + length == len(request.tokens))
        order = [request.id for request in running] + [request.id for request in scheduler.waiting]
        assert order == sorted(order), "somebody runs who came after somebody who waits"
        if running:
            assert running[0] in planned, "the oldest makes no progress"
        for request in running:
            if len(request.tokens) - request.computed == 1 and request not in planned:
                assert request is running[-1] and scheduler.pool.free == 0, "a decoding slot was left out"
        prompts = [r.computed == 0 or len(r.tokens) - r.computed > 1 for r in planned]
        assert prompts == sorted(prompts), "a prompt's chunk comes before a decoding slot"


@dataclass(frozen=True)
class Sizes:
    slots: int
    step_tokens: int
    page_tokens: int
    pages: int
    context: int


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    slots, page_tokens = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    pages = draw(st.integers(-(-2 // page_tokens), 14))
    context = draw(st.integers(2, pages * page_tokens))
    return Sizes(slots, draw(st.integers(slots, slots + 8)), page_tokens, pages, context)


arrival = st.tuples(
    st.just("arrive"),
    st.lists(st.integers(0, 10), min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(1, 30)),
    st.sets(st.integers(0, 10), max_size=1),
)
cancel = st.tuples(st.just("cancel"), st.integers(0, 30))
run = st.tuples(st.just("run"), st.integers(1, 6))
events = st.lists(st.one_of(arrival, arrival, cancel, run), max_size=30)


def play(size: Sizes, schedule: list) -> tuple[Driver, list[Request], set[int]]:
    """Plays a schedule and then steps until idle, at most once for every token that the longest replies could have."""
    driver = Driver(size.slots, size.step_tokens, size.page_tokens, size.pages, size.context)
    requests: list[Request] = []
    cancelled: set[int] = set()
    for event in schedule:
        match event:
            case ("arrive", prompt, most, stops):
                prompt = prompt[: size.context - 1]
                requests.append(Request(len(requests), prompt, most, GREEDY, stop_tokens=frozenset(stops)))
                driver.scheduler.add(requests[-1])
            case ("cancel", which) if requests:
                request = requests[which % len(requests)]
                if request.id not in driver.causes and request.id not in cancelled:
                    driver.scheduler.remove(request)
                    driver.scheduler.check_integrity()
                    cancelled.add(request.id)
            case ("run", times):
                for _ in range(times):
                    if not driver.scheduler.idle:
                        driver.step()
    bound = sum(request.limit for request in requests)
    while not driver.scheduler.idle:
        driver.step()
        assert len(driver.trace) <= bound, "somebody starves"
    driver.scheduler.pool.check_integrity()
    assert sorted(driver.scheduler.free_slots) == list(range(size.slots))
    return driver, requests, cancelled


@settings(max_examples=300, deadline=None)
@given(sizes(), events)
@example(Sizes(2, 2, 1, 4, 4), [("arrive", [1, 2], None, set()), ("arrive", [3], None, set())])
def test_any_schedule_equals_one_by_one(size: Sizes, schedule: list) -> None:
    driver, requests, cancelled = play(size, schedule)
    for request in requests:
        reply, cause = alone(request, size.context)
        got = request.tokens[len(request.prompt) :]
        if request.id in cancelled:
            assert got == reply[: len(got)]
        else:
            assert (got, driver.causes[request.id]) == (reply, cause)


@settings(max_examples=60, deadline=None)
@given(sizes(), events)
def test_the_same_schedule_gives_the_same_plans(size: Sizes, schedule: list) -> None:
    assert play(size, schedule)[0].trace == play(size, schedule)[0].trace


@settings(max_examples=100, deadline=None)
@given(sizes(), events)
def test_replies_within_their_promise_are_never_preempted(size: Sizes, schedule: list) -> None:
    short = [(*event[:2], min(event[2] or 1, size.page_tokens), event[3]) if event[0] == "arrive" else event
             for event in schedule]  # fmt: skip
    assert play(size, short)[0].scheduler.preemptions == 0


def test_exhausted_pool_preempts_the_youngest_and_resumes_it_in_order() -> None:
    # Two slots of 16 tokens share 6 pages of 4: both fit at first, not at the end.
    driver = Driver(slots=2, step_tokens=8, page_tokens=4, pages=6, context=24)
    requests = [Request(i, [i + 1] * 4, 12, GREEDY) for i in range(3)]
    for request in requests:
        driver.scheduler.add(request)
    while not driver.scheduler.preemptions:
        driver.step()
    victim = requests[1]
    assert (victim.slot, victim.pages, victim.computed, victim.preemptions) == (-1, [], 0, 1)
    assert victim.generated > 0 and list(driver.scheduler.waiting) == [victim, requests[2]]
    assert driver.scheduler.recomputed_tokens == len(victim.tokens) - 1
    while not driver.scheduler.idle:
        driver.step()
    assert [r.tokens[4:] for r in requests] == [alone(r, 24)[0] for r in requests]
    assert list(driver.causes) == [0, 1, 2], "they end in order of arrival"
    assert driver.scheduler.prefill_tokens == 12, "recomputed tokens are no prefill"


def test_a_long_prompt_does_not_hold_decoding_slots() -> None:
    driver = Driver(slots=2, step_tokens=4, page_tokens=4, pages=20, context=80)
    first, long = Request(0, [1], 20), Request(1, [2] * 30, 1)
    driver.scheduler.add(first)
    driver.step()
    driver.scheduler.add(long)
    for generated in range(2, 12):
        driver.step()
        assert first.generated == generated
        assert long.prefilled == min(30, 3 * (generated - 1))
    assert long.generated == 1


def test_admission_waits_while_the_pool_is_promised() -> None:
    # Each needs 3 pages in the end; two are promised 6 of the 8, a third does not fit beside them.
    driver = Driver(slots=4, step_tokens=32, page_tokens=4, pages=8, context=32)
    requests = [Request(i, [i] * 8, 4) for i in range(6)]
    for request in requests:
        driver.scheduler.add(request)
    driver.step()
    assert [request.id for request in driver.scheduler.running] == [0, 1]
    while not driver.scheduler.idle:
        driver.step()
    assert driver.scheduler.preemptions == 0 and len(driver.causes) == 6


def test_no_page_is_promised_that_a_short_reply_cannot_use() -> None:
    driver = Driver(slots=4, step_tokens=32, page_tokens=4, pages=8, context=32)
    for number in range(4):
        driver.scheduler.add(Request(number, [number] * 8, 1, GREEDY))
    driver.step()
    assert len(driver.causes) == 4, "four prompts of two pages fill the pool and are done in one step"


@pytest.mark.parametrize(
    ("most", "context", "stop", "cause"),
    [
        (3, 20, False, StopCause.MAX_TOKENS),
        (3, 20, True, StopCause.STOP_TOKEN),  # on the last allowed token: the stop, not the limit
        (None, 7, False, StopCause.CONTEXT_FULL),
        (None, 7, True, StopCause.STOP_TOKEN),
        (9, 7, False, StopCause.CONTEXT_FULL),
        (3, 7, False, StopCause.MAX_TOKENS),  # both limits at once: the request's own
    ],
)
def test_the_cause_is_decided_at_the_last_token(most: int | None, context: int, stop: bool, cause: StopCause) -> None:
    prompt, reply = next(
        (prompt, reply)
        for prompt in ([first, 2, 3, 4] for first in range(11))
        if len(set(reply := alone(Request(0, prompt, 3, GREEDY), 100)[0])) == 3
    )
    driver = Driver(slots=1, step_tokens=8, page_tokens=4, pages=5, context=context)
    request = Request(0, prompt, most, GREEDY, stop_tokens=frozenset([reply[2]] if stop else []))
    driver.scheduler.add(request)
    while not driver.scheduler.idle:
        driver.step()
    assert driver.causes[0] is cause and request.generated == 3


def test_a_lone_request_fills_the_whole_pool() -> None:
    driver = Driver(slots=3, step_tokens=5, page_tokens=4, pages=3, context=12)
    request = Request(0, [1, 2], None)
    driver.scheduler.add(request)
    while not driver.scheduler.idle:
        driver.step()
    assert driver.causes[0] is StopCause.CONTEXT_FULL and len(request.tokens) == 12


def test_sizes_that_could_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slots is 5, it must be from 1 to max_step_tokens \(4\)"):
        Scheduler(slots=5, max_step_tokens=4, page_tokens=4, pages=4, context=8)
    with pytest.raises(ValueError, match="context is 17, it must be from 2 to the pool's 16 tokens"):
        Scheduler(slots=2, max_step_tokens=4, page_tokens=4, pages=4, context=17)


def test_integrity_finds_a_lost_slot() -> None:
    scheduler = Scheduler(slots=2, max_step_tokens=4, page_tokens=4, pages=4, context=8)
    scheduler.free_slots.pop()
    with pytest.raises(PageError, match=r"slots in use \[\] and free \[1\] are not the 2 slots"):
        scheduler.check_integrity()
