"""What may be in the server at once: choices (waiting, running, or finished and not yet read), and bytes of bodies."""

from __future__ import annotations

from flare.errors import RequestError


class Quota:
    """An amount, counted in `unit`, that all requests share. Used on the event loop only."""

    def __init__(self, capacity: int, unit: str) -> None:
        self.capacity = capacity
        self.unit = unit
        self.used = 0

    def share(self) -> Share:
        return Share(self)


class Share:
    """What one request holds of a quota, given back at the end of its `with` block."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.held = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.quota.used -= self.held
        self.held = 0

    def take(self, amount: int) -> None:
        """Takes so much beside what it holds already.

        Raises RequestError: 400 when that is more than there is at all, 429 when others hold too much of it now.
        """
        quota = self.quota
        asked = self.held + amount
        if asked > quota.capacity:
            text = f"the request asks for {asked} {quota.unit}, this server holds {quota.capacity} at a time"
            raise RequestError(f"{text}; ask for less")
        if quota.used + amount > quota.capacity:
            raise RequestError(
                f"the server holds {quota.used} {quota.unit} and at most {quota.capacity}; try again later",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )
        quota.used += amount
        self.held = asked


def too_large(limit: int) -> RequestError:
    """Returns the refusal of one body over its own limit."""
    return RequestError(
        f"the body is larger than this server's limit of {limit} bytes", status=413, type="request_too_large"
    )
