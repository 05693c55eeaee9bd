"""What may be in the server at once: choices (waiting, running, or finished and not yet read), and bytes of bodies."""

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


class BodyMemory:
    """Bytes of all bodies that are being read or decoded, and how many there may be. Used on the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def share(self) -> BodyShare:
        return BodyShare(self)


class BodyShare:
    """What one body holds of a `BodyMemory`, given back at the end of its `with` block."""

    def __init__(self, memory: BodyMemory) -> None:
        self.memory = memory
        self.held = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.used -= self.held
        self.held = 0

    def take(self, size: int) -> None:
        """Raises RequestError (429) when the other bodies leave no room for `size` bytes more."""
        memory = self.memory
        if memory.used + size > memory.capacity:
            raise RequestError(
                f"the bodies of all requests together reach this server's limit of {memory.capacity} bytes; "
                "try again later",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )
        memory.used += size
        self.held += size


def too_large(limit: int) -> RequestError:
    """Returns the refusal of one body over its own limit."""
    return RequestError(
        f"the body is larger than this server's limit of {limit} bytes", status=413, type="request_too_large"
    )
