"""How many generation choices may be in the server at once: waiting, running, or finished and not yet read."""

from __future__ import annotations

from flare.errors import RequestError


class Admission:
    """A count of places. Used on the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, places: int, *, held: int = 0) -> None:
        """Takes places for a request that already holds `held` of them.

        Raises RequestError: 400 when it asks for more than there are at all, 429 when they are not free now.
        """
        asked = held + places
        if asked > self.capacity:
            raise RequestError(f"the request asks for {asked} choices, this server holds {self.capacity} at a time")
        if self.used + places > self.capacity:
            raise RequestError(
                f"the server is busy with {self.used} choices of at most {self.capacity}; try again later",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self.used += places

    def give_back(self, places: int) -> None:
        self.used -= places
