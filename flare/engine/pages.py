"""The pool of K/V pages: who holds which page is counted, so that a prefix can be held by many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PageError(RuntimeError):
    """The pool's bookkeeping was broken or misused; the text carries the state."""


class PagePool:
    """Pages 0 to total-1, each free or held by one or more holders. Every operation is O(1).

    A page with one holder may be written by it. A page with several is read-only for all: who must write there takes a
    fresh page, copies the contents and releases the shared one (copy on write).
    The page released last is given out first, so equal histories of calls give equal pages.
    """

    __slots__ = ("_free", "_holders", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with a holder, each counted once."""
        return self.total - len(self._free)

    def allocate(self) -> int:
        """A free page, now with one holder; its contents are undefined. Raises PageError when none is free."""
        if not self._free:
            raise PageError(f"no page is free of {self.total}")
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds a holder to a held page. Raises PageError for a free one."""
        if self._holders[page] == 0:
            raise PageError(f"page {page} is free and cannot be shared")
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Takes one holder away; the last one frees the page. Raises PageError for a free page."""
        holders = self._holders[page] - 1
        if holders < 0:
            raise PageError(f"page {page} is free and cannot be released")
        self._holders[page] = holders
        if holders == 0:
            self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return self._holders[page]

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Compares the pool with the page lists of all its holders: no page lost, none both free and held, every count
        exact. Without lists every page must be free. O(total). Raises PageError."""
        counts = Counter(page for pages in held for page in pages)
        free = set(self._free)
        if len(free) != len(self._free):
            twice = sorted(page for page, times in Counter(self._free).items() if times > 1)
            raise PageError(f"pages {twice} are free more than once, {self._state()}")
        for page, holders in enumerate(self._holders):
            if holders != counts[page]:
                raise PageError(f"page {page} counts {holders} holders and has {counts[page]}, {self._state()}")
            if (holders == 0) != (page in free):
                seen = "free" if page in free else "not free"
                raise PageError(f"page {page} has {holders} holders and is {seen}, {self._state()}")

    def _state(self) -> str:
        held = {page: holders for page, holders in enumerate(self._holders) if holders}
        return f"in a pool of {self.total}: free {self._free}, holders {held}"
