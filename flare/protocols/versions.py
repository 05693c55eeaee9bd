"""The version of the Messages API, which its requests name in a header."""

from __future__ import annotations

from collections.abc import Sequence

from flare.errors import RequestError
from flare.protocols.refusals import shown

HEADER = "anthropic-version"
MESSAGES_PATH = "/v1/messages"
API_VERSIONS = ("2023-06-01", "2026-10-21")


def is_messages(path: str) -> bool:
    """Whether a path is of the Messages API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def check_version(path: str, values: Sequence[str]) -> None:
    """Raises RequestError (400) unless a request to the Messages API names one version of it that is served. `values` are
    those of all headers of the name."""
    if not is_messages(path) or (len(values) == 1 and values[0] in API_VERSIONS):
        return
    seen = f"{shown(', '.join(values))}: not served here" if values else "the header is missing"
    raise RequestError(f"{HEADER}: {seen}; send {' or '.join(API_VERSIONS)}", param=HEADER)
