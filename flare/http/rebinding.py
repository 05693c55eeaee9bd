"""Web pages whose name was made to stand for this machine: a browser takes such a page and this server for one site."""

from __future__ import annotations

from ipaddress import ip_address

from aiohttp import web

from flare.errors import RequestError
from flare.http.startup import open_to_others
from flare.protocols.refusals import shown

HTTP_PORT = 80


def check_host(request: web.BaseRequest, own: str) -> None:
    """Raises RequestError (403) for a page's POST that came to a loopback address under a name that is none of this machine's.

    `own` is the host that the server was told to listen on. A browser sends `Origin` with every POST, and in `Host` the port
    that it connected to: where that is not the connection's, a proxy in between has kept the name of its own site. An address
    stands for itself, whatever any name server says.
    """
    if request.method != "POST" or "Origin" not in request.headers:
        return
    address, port = request.get_extra_info("sockname")[:2]
    host = request.headers.get("Host", "")
    name, asked = host_and_port(host)
    if open_to_others(address) or asked != port or is_local(name) or name == own.lower():
        return
    text = (
        f"Host: {shown(host)} is not this machine; ask localhost or {address}, or listen on an address of the network"
    )
    raise RequestError(text, status=403, type="permission_error", code="foreign_host")


def host_and_port(host: str) -> tuple[str, int]:
    """Returns the two of a Host header, in small letters; -1 for a port that is none."""
    name, colon, port = host.lower().rpartition(":")
    if not colon or port.endswith("]"):
        return host.lower(), HTTP_PORT
    return name, int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else -1


def is_local(name: str) -> bool:
    """Whether a name cannot be made to stand for another machine: localhost, those below it, and addresses."""
    plain = name.removesuffix(".")
    if plain == "localhost" or plain.endswith(".localhost"):
        return True
    try:
        ip_address(plain.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
