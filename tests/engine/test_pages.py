"""The page pool against a plain count of who holds what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flare.engine.pages import PageError, PagePool


class Holders(RuleBasedStateMachine):
    """Holders take, share and release pages; the pool must agree with their lists after every call."""

    @initialize(total=st.integers(1, 12))
    def make(self, total: int) -> None:
        self.pool = PagePool(total)
        self.held: list[list[int]] = [[], [], []]

    @rule(holder=st.integers(0, 2))
    def allocate(self, holder: int) -> None:
        everything = {page for pages in self.held for page in pages}
        if len(everything) == self.pool.total:
            with pytest.raises(PageError, match="no page is free"):
                self.pool.allocate()
        else:
            page = self.pool.allocate()
            assert page not in everything and 0 <= page < self.pool.total
            self.held[holder].append(page)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), holder=st.integers(0, 2))
    def share(self, data: st.DataObject, holder: int) -> None:
        page = data.draw(st.sampled_from(sorted({page for pages in self.held for page in pages})))
        self.pool.share(page)
        self.held[holder].append(page)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.held if pages]))
        self.pool.release(pages.pop(data.draw(st.integers(0, len(pages) - 1))))

    @rule(page=st.integers(0, 11))
    def misuse(self, page: int) -> None:
        if page < self.pool.total and self.pool.holders(page) == 0:
            for call in (self.pool.share, self.pool.release):
                with pytest.raises(PageError, match=f"page {page} is free"):
                    call(page)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = Counter(page for pages in self.held for page in pages)
        for page in range(self.pool.total):
            assert self.pool.holders(page) == counts[page]
        assert self.pool.used == len(counts) and self.pool.free == self.pool.total - len(counts)
        self.pool.check_integrity(self.held)


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_order_is_the_same_for_the_same_calls() -> None:
    def run() -> list[int]:
        pool = PagePool(6)
        pages = [pool.allocate() for _ in range(4)]
        for page in (pages[1], pages[3]):
            pool.release(page)
        return pages + [pool.allocate() for _ in range(4)]

    assert run() == run() == [0, 1, 2, 3, 3, 1, 4, 5]


def test_integrity_finds_a_page_that_nobody_holds() -> None:
    pool = PagePool(4)
    kept = pool.allocate()
    pool.check_integrity([[kept]])
    with pytest.raises(PageError, match=r"page 0 counts 1 holders and has 0, in a pool of 4: free \[3, 2, 1\]"):
        pool.check_integrity()


def test_integrity_finds_a_holder_too_many_and_one_too_few() -> None:
    pool = PagePool(2)
    page = pool.allocate()
    with pytest.raises(PageError, match="page 0 counts 1 holders and has 2"):
        pool.check_integrity([[page], [page]])
    pool.share(page)
    pool.check_integrity([[page], [page]])
    with pytest.raises(PageError, match="page 0 counts 2 holders and has 1"):
        pool.check_integrity([[page]])
