"""`flare serve`: the port first, then the core beside the imports, then listening; and where the time went."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from flare.config import RuntimeSettings, ServerSettings
from flare.errors import SettingError
from flare.report import Laps, start_report

if TYPE_CHECKING:
    from flare.http.server import Server
    from flare.runtime import Runtime

SWITCH_INTERVAL_S = 0.0005
"""The engine's thread and the event loop share the interpreter: one that waits for it gets it after this time. The
default of 5 ms would be added to a step whenever the loop is busy."""
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address of this machine for itself, by the one that stands for all of its addresses."""


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet. Raises SettingError naming the address when it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):  # the latter for what cannot be a name, such as a label of 64 letters
        raise SettingError("host", f"{host}: not a name or an address; choose another") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise taken(host, port, error) from None
    return sock


def taken(host: str, port: int, error: OSError) -> SettingError:
    """The complaint about an address that cannot be had, though it is one."""
    if error.errno == errno.EADDRNOTAVAIL:
        return SettingError("host", f"{host}: cannot listen there ({error.strerror}); choose another")
    return SettingError("port", f"{port}: cannot listen on it at {host} ({error.strerror}); choose another")


def reserve(sock: socket.socket, reserved: bool) -> None:
    """Keeps the address of a bound socket from other servers, or ends that, which must be before it listens.

    SO_REUSEADDR is there so that a server can start while connections of its predecessor linger. It also lets two sockets
    bind the same address as long as neither listens: two servers that start together would both load their core.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not reserved)


def addresses(host: str, port: int) -> list[str]:
    """Returns the URLs of the API on a bound socket: of one that takes every address of this machine the local one, and
    the one that other machines see, where there is a network."""
    hosts = [host]
    if host in LOOPBACKS:
        outside = outside_address(host)
        hosts = [LOOPBACKS[host], *([outside] if outside else [])]
    return [f"http://{bracketed(host)}:{port}/v1" for host in hosts]


def bracketed(host: str) -> str:
    """Returns an address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def outside_address(wildcard: str) -> str | None:
    """Returns the address from which this machine would reach others; nothing is sent."""
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in wildcard else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # of a range that is kept for documentation
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return address


def open_to_others(address: str) -> bool:
    """Whether other machines may reach a socket of this address."""
    return not address.removeprefix("::ffff:").startswith("127.") and address != "::1"


class Loading:
    """A runtime that is loaded on another thread: the tokenizer and the kernels are native code, so that this overlaps
    with the import of the HTTP library."""

    def __init__(self, load: Callable[[Laps], Runtime]) -> None:
        self.laps = Laps()
        self._load = load
        self._runtime: Runtime | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flare-load")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._runtime = self._load(self.laps)
        except BaseException as error:
            self._error = error

    def result(self) -> Runtime:
        """Waits for the runtime. Raises what loading raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._runtime is not None
        return self._runtime


def import_http_library() -> None:
    """Imports the server's side of the program, aiohttp with it.

    On import aiohttp reads all of the system's CA certificates, for its client: 50 ms. This program connects to nobody,
    so they are hidden from it for that moment.
    """
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        import flare.http.server  # noqa: F401
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(runtime_settings: RuntimeSettings, settings: ServerSettings, laps: Laps) -> None:
    """Serves until SIGINT or SIGTERM. `laps` began with the process. Raises FlareError when it cannot start."""
    laps.mark("options")
    gc.disable()  # imports make hundreds of thousands of objects that all stay
    sock = bind(settings.host, settings.port)
    reserve(sock, True)
    laps.mark("bind")

    def load(beside: Laps) -> Runtime:
        from flare.runtime import Runtime

        return Runtime.load(runtime_settings, beside)

    loading = Loading(load)
    try:
        import_http_library()
        laps.mark("imports")
    finally:
        runtime = loading.result()
    laps.mark("core")
    import asyncio

    from flare.http.server import Server

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.enable()
    try:
        asyncio.run(_run(Server(runtime, settings), sock, laps, loading.laps))
    finally:
        runtime.close()
        sock.close()


async def _run(server: Server, sock: socket.socket, laps: Laps, beside: Laps) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(130)  # the second time: leave at once
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    host, port = sock.getsockname()[:2]
    reserve(sock, False)
    try:
        await server.start(sock)
    except OSError as error:
        raise taken(host, port, error) from None
    laps.mark("listen")
    if open_to_others(host) and not server.settings.api_key:
        text = f"whoever reaches {bracketed(host)} port {port} may use the model: there is no key; give --api-key-file"
        print(f"flare: warning: {text}", file=sys.stderr)
    lines = [*start_report(laps, beside), f"serving {server.runtime.model.id} on {' and '.join(addresses(host, port))}"]
    print("\n".join(lines), file=sys.stderr, flush=True)
    await stop.wait()
    await server.stop()
