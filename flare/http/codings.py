"""Content codings of request bodies: decompressed in small pieces, with a bound on the output, the memory and the work.

The libraries for br and zstd are imported with the first body that needs them.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any, Protocol

from flare.errors import RequestError
from flare.service.admission import too_large

CODINGS = ("br", "deflate", "gzip", "identity", "zstd")
CHUNK_BYTES = 1 << 16
MAX_MEMBERS = 64
"""The most gzip members or zstd frames of a body: an empty one has some 10 bytes and no output, so that the size bounds
do not count them."""
MAX_WINDOW_BYTES = 8 << 20
"""The largest window of a zstd frame, the most that RFC 9659 allows in HTTP. A br window is at most 16 MiB by its format."""

WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER_BYTES = 18


def decompress(body: bytes | bytearray, coding: str, limit: int) -> bytes | bytearray:
    """Returns the decoded body; gzip and zstd may have up to MAX_MEMBERS parts. For the worker pool.

    Raises RequestError: 413 once more than `limit` bytes come out or are announced, or a zstd frame asks for more than
    MAX_WINDOW_BYTES; 400 for data that is damaged, cut, has a tail, or needs a dictionary.
    """
    if coding == "identity":
        return body
    decoded = bytearray()
    with memoryview(body) as view:
        position = _decode_member(view, 0, coding, decoded, limit)
        members = 1
        while position < len(view):
            if coding not in ("gzip", "zstd"):
                raise RequestError(f"the body goes on after the end of its {coding} data")
            if members == MAX_MEMBERS:
                part = "members" if coding == "gzip" else "frames"
                raise RequestError(f"the body has more than {MAX_MEMBERS} {coding} {part}; send it as one")
            position = _decode_member(view, position, coding, decoded, limit)
            members += 1
    return decoded


def _decode_member(view: memoryview, position: int, coding: str, decoded: bytearray, limit: int) -> int:
    """Appends one compressed stream's data, from `position` on, to `decoded`; returns the position of its end.

    Slices go in, so that what a decoder keeps or gives back of its input is never more than one of them.
    """
    decoder = _start(view[position : position + ZSTD_HEADER_BYTES], coding, limit, limit - len(decoded))
    while not decoder.finished:
        given = view[position : position + CHUNK_BYTES] if decoder.hungry else view[:0]
        asked = decoder.hungry
        try:
            piece = decoder.decode(given, min(CHUNK_BYTES, limit + 1 - len(decoded)))
        except decoder.error:
            raise RequestError(f"the body is not valid {coding} data") from None
        position += len(given) - decoder.left
        decoded += piece
        if len(decoded) > limit:
            raise too_large(limit)
        if asked and not given and not piece and not decoder.finished:  # all input is in and all output is out
            raise RequestError(f"the body ends in the middle of its {coding} data")
    return position


class Decoder(Protocol):
    """One compressed stream. It takes input while it is `hungry`, else empty pieces until it has given its output."""

    error: type[Exception]
    hungry: bool
    finished: bool
    left: int
    """How many bytes of the last piece were not taken."""

    def decode(self, data: memoryview, room: int) -> bytes:
        """Returns about `room` bytes of output at most; `room` is positive."""
        ...


def _start(head: memoryview, coding: str, limit: int, room: int) -> Decoder:
    if coding == "zstd":
        _check_frame(bytes(head), limit, room)
        return _Zstd()
    return _Brotli() if coding == "br" else _Deflate(coding)


class _Deflate:
    error: type[Exception] = zlib.error
    hungry = True

    def __init__(self, coding: str) -> None:
        self._stream = zlib.decompressobj(WINDOW_BITS[coding])
        self.finished = False
        self.left = 0

    def decode(self, data: memoryview, room: int) -> bytes:
        stream = self._stream
        piece = stream.decompress(data, room)
        self.finished = stream.eof
        # At its end zlib says what it left in `unused_data` alone; `unconsumed_tail` may still hold an earlier rest.
        self.left = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        return piece


class _Brotli:
    left = 0  # a tail is an error of the library, or stays outside

    def __init__(self) -> None:
        import brotli  # type: ignore[import-untyped]

        self.error: type[Exception] = brotli.error
        self._stream: Any = brotli.Decompressor()
        self.hungry = True
        self.finished = False

    def decode(self, data: memoryview, room: int) -> bytes:
        piece: bytes = self._stream.process(data, output_buffer_limit=room)
        self.hungry = self._stream.can_accept_more_data()
        self.finished = self._stream.is_finished()
        return piece


class _Zstd:
    def __init__(self) -> None:
        zstd = zstd_module()
        self.error: type[Exception] = zstd.ZstdError
        options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_BYTES.bit_length() - 1}
        self._stream = zstd.ZstdDecompressor(options=options)
        self.hungry = True
        self.finished = False
        self.left = 0

    def decode(self, data: memoryview, room: int) -> bytes:
        stream = self._stream
        piece: bytes = stream.decompress(data, room)
        self.hungry = stream.needs_input
        self.finished = stream.eof
        self.left = len(stream.unused_data) if stream.eof else 0
        return piece


def zstd_module() -> Any:
    """Returns the zstd module, which is part of Python from 3.14 on."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _check_frame(head: bytes, limit: int, room: int) -> None:
    """Looks at a zstd frame's header (RFC 8878, 3.1.1.1). Raises RequestError (413) for a frame that announces more than
    `room` bytes or wants a larger window than the limit, 400 for one with a dictionary. What is no whole header of a
    frame passes: it is the decoder's to judge.
    """
    if len(head) < 6 or not head.startswith(ZSTD_MAGIC):
        return
    descriptor = head[4]
    position, single = 5, bool(descriptor & 0x20)
    window = 0
    if not single:
        exponent, mantissa = head[5] >> 3, head[5] & 7
        window = (1 << (10 + exponent)) // 8 * (8 + mantissa)
        position += 1
    size_of_dictionary = (0, 1, 2, 4)[descriptor & 3]
    if any(head[position : position + size_of_dictionary]):
        raise RequestError("the body's zstd data needs a dictionary, and there is none; compress without one")
    position += size_of_dictionary
    size_of_content = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    field = head[position : position + size_of_content]
    if size_of_content and len(field) == size_of_content:
        content = int.from_bytes(field, "little") + (256 if size_of_content == 2 else 0)
        if content > room:
            raise too_large(limit)
        window = content if single else window
    if window > MAX_WINDOW_BYTES:
        raise RequestError(
            f"the body's zstd data asks for a window of {window} bytes, over this server's limit of {MAX_WINDOW_BYTES}; "
            "compress it at level 19 or lower",
            status=413,
            type="request_too_large",
        )
