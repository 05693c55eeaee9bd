"""Request bodies: what may be sent, and reading it within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from flare.errors import RequestError
from flare.http.codings import CODINGS
from flare.protocols import systemone
from flare.protocols.refusals import shown
from flare.service.admission import Share, too_large
from flare.service.errors import Refusal

# What a web page's script may send without its user's browser asking this server first is none of these types.
JSON_TYPES = ("application/json", "text/json")


def check_media_type(request: web.BaseRequest) -> None:
    """Raises RequestError (415) for a body that cannot be, or may not pass for, JSON; 400 for System One's images.

    Command-line tools and HTTP libraries send JSON under whatever type is their default, or under none, so that other names
    than application/json are taken for it. Not so from a web page (a request with `Origin`): a form, plain text or data
    without a type would get here without the browser's asking whether the page may, and whoever looks at the page would
    work for it.
    """
    if request.method != "POST":
        return
    media = request.content_type if "Content-Type" in request.headers else ""
    from_page = "Origin" in request.headers
    if media == "multipart/form-data" and request.path == systemone.PATH and not from_page:
        # System One's images come so. The body is not read: with or without them there is no core that sees.
        content_coding(request, ("identity",))
        raise systemone.no_images("Content-Type")
    if media.startswith("multipart/") or (from_page and media not in JSON_TYPES and not media.endswith("+json")):
        what = f"{shown(media)} is not served here" if media else "missing in a request of a web page"
        raise RequestError(f"Content-Type: {what}; send JSON as application/json", status=415)


def content_coding(request: web.BaseRequest, codings: Sequence[str] = CODINGS) -> str:
    """Returns the body's coding. Raises RequestError (415) for one that is not among `codings`, or for several."""
    value = ",".join(request.headers.getall("Content-Encoding", [])).strip().lower()
    if value == "":
        return "identity"
    if value == "x-gzip":
        value = "gzip"
    if value not in codings:
        text = (
            f"Content-Encoding: {shown(value)} is not served here, this route takes one of {', '.join(codings)}; "
            "send the body uncompressed"
        )
        raise Refusal(RequestError(text, status=415), {"accept-encoding": ", ".join(codings)})
    return value


async def read_body(
    request: web.BaseRequest, share: Share, limit: int, *, silence_s: float, total_s: float
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
