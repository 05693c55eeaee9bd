"""What an endpoint of decisions is: it decodes a body into an inquiry, and encodes the distributions of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flare.decisions.distribution import Distribution
from flare.decisions.questions import Inquiry, Usage
from flare.errors import RequestError
from flare.served import ServedModel


class DecisionEndpoint(Protocol):
    """One route. `decode` raises RequestError; `encode` gets a distribution for each question, in order; `error` makes the
    error envelope of the endpoint's protocol. `id_headers` are further names of the header with a response's id, by which the
    protocol's clients know it."""

    path: str
    id_prefix: str
    id_headers: Sequence[str]

    def decode(self, body: bytes | bytearray, model: ServedModel) -> Inquiry: ...

    def encode(
        self, inquiry: Inquiry, distributions: Sequence[Distribution], usage: Usage, model: ServedModel
    ) -> bytes: ...

    def error(self, error: RequestError) -> dict[str, Any]: ...
