"""Request bodies: read with a bound, then decompressed with a bound."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from flare.errors import RequestError

ENCODINGS = ("identity", "gzip", "deflate")
CHUNK_BYTES = 1 << 16
WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


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


async def read_body(request: web.BaseRequest, limit: int, silence_s: float) -> bytearray:
    """Returns the body as sent.

    Raises RequestError: 413 as soon as more than `limit` bytes are announced or come, 400 when nothing comes for
    `silence_s` seconds.
    """
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    body = bytearray()
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(silence_s):
                body += await request.content.readany()
            if len(body) > limit:
                raise too_large(limit)
    except TimeoutError:
        raise RequestError(f"the body did not go on for {silence_s:g} s") from None
    return body


def decompress(body: bytes | bytearray, coding: str, limit: int) -> bytes | bytearray:
    """Returns the decoded body; gzip may have several members. For the worker pool.

    Raises RequestError: 413 once more than `limit` bytes come out, 400 for data that is damaged, cut or has a tail.
    """
    if coding == "identity":
        return body
    decoded = bytearray()
    rest: bytes = bytes(body)
    try:
        while True:
            stream = zlib.decompressobj(WINDOW_BITS[coding])
            while not stream.eof:
                piece = stream.decompress(rest, min(CHUNK_BYTES, limit + 1 - len(decoded)))
                rest = stream.unconsumed_tail
                decoded += piece
                if len(decoded) > limit:
                    raise too_large(limit)
                if not piece and not rest and not stream.eof:
                    raise RequestError(f"the body ends in the middle of its {coding} data")
            rest = stream.unused_data
            if not rest:
                return decoded
            if coding == "deflate":
                raise RequestError("the body goes on after the end of its deflate data")
    except zlib.error:
        raise RequestError(f"the body is not valid {coding} data") from None
