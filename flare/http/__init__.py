"""The HTTP server: aiohttp carries bytes, `flare/service` answers.

`connections.py` bounds the sockets. `app.py` is the transport that the service sees: it has the key checked (`auth.py`), the
body read within its bounds (`bodies.py`) and decompressed by the service's workers (`codings.py`); it writes replies, and the
frames of streams with comments in silences (`sse.py`). `server.py` is all of it on one event loop, and `startup.py` is what
`flare serve` does before and after.
"""
