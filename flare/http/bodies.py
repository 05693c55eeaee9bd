"""Request bodies: read with a bound each and a bound together, then decompressed with a bound."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from flare.errors import RequestError

ENCODINGS = ("identity", "gzip", "deflate")
CHUNK_BYTES = 1 << 16
MAX_MEMBERS = 64
"""The most members of a gzip body: an empty one has 20 bytes and no output, so the size bounds do not count them."""
WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


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
    return RequestError(
        f"the body is larger than this server's limit of {limit} bytes", status=413, type="request_too_large"
    )


def content_coding(request: web.BaseRequest) -> str:
    """Returns the body's coding. Raises RequestError (415) for one that is not known, or for several."""
    value = ",".join(request.headers.getall("Content-Encoding", [])).strip().lower()
    if value in ("", "identity"):
        return "identity"
    if value == "x-gzip":
        return "gzip"
    if value not in ENCODINGS:
        text = f"Content-Encoding must be one of {', '.join(ENCODINGS)}; send the body uncompressed"
        raise RequestError(text, status=415)
    return value


async def read_body(
    request: web.BaseRequest, share: BodyShare, limit: int, *, silence_s: float, total_s: float
) -> bytearray:
    """Returns the body as sent; its bytes are taken from `share` as they come.

    Raises RequestError: 413 as soon as more than `limit` bytes are announced or come, 429 when all bodies together are
    too large, 400 when nothing comes for `silence_s` seconds or the end has not come after `total_s` seconds.
    """
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    body = bytearray()
    total = asyncio.timeout(total_s)
    try:
        async with total:
            while not request.content.at_eof():
                async with asyncio.timeout(silence_s):
                    piece = await request.content.readany()
                if len(body) + len(piece) > limit:
                    raise too_large(limit)
                share.take(len(piece))
                body += piece
    except TimeoutError:
        if total.expired():
            raise RequestError(f"the body was not complete after {total_s:g} s") from None
        raise RequestError(f"the body did not go on for {silence_s:g} s") from None
    return body


def decompress(body: bytes | bytearray, coding: str, limit: int) -> bytes | bytearray:
    """Returns the decoded body; gzip may have up to MAX_MEMBERS members. For the worker pool.

    Raises RequestError: 413 once more than `limit` bytes come out, 400 for data that is damaged, cut or has a tail.
    """
    if coding == "identity":
        return body
    decoded = bytearray()
    with memoryview(body) as view:
        position = _inflate(view, 0, coding, decoded, limit)
        members = 1
        while position < len(view):
            if coding == "deflate":
                raise RequestError("the body goes on after the end of its deflate data")
            if members == MAX_MEMBERS:
                raise RequestError(f"the body has more than {MAX_MEMBERS} gzip members; send it as one")
            position = _inflate(view, position, coding, decoded, limit)
            members += 1
    return decoded


def _inflate(view: memoryview, position: int, coding: str, decoded: bytearray, limit: int) -> int:
    """Appends one compressed stream's data, from `position` on, to `decoded`; returns the position of its end.

    Slices go in, so that what zlib copies of the input that it leaves is never more than one of them.
    """
    stream = zlib.decompressobj(WINDOW_BITS[coding])
    while not stream.eof:
        given = view[position : position + CHUNK_BYTES]
        try:
            piece = stream.decompress(given, min(CHUNK_BYTES, limit + 1 - len(decoded)))
        except zlib.error:
            raise RequestError(f"the body is not valid {coding} data") from None
        # At its end zlib says what it left in `unused_data` alone; `unconsumed_tail` may still hold an earlier rest.
        position += len(given) - len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        decoded += piece
        if len(decoded) > limit:
            raise too_large(limit)
        if not given and not piece and not stream.eof:  # all input is in and all output is out
            raise RequestError(f"the body ends in the middle of its {coding} data")
    return position
