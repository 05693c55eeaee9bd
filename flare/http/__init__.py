"""The HTTP server: aiohttp carries bytes, the endpoints in `flare/protocols` say what they mean.

A generation request passes `auth.py` (the key), `bodies.py` (the body, bounded while it is read and while it is
decompressed), `admission.py` (how many may be here at once), `generate.py` (decode and tokenize in the worker pool,
hand to the engine, answer in one piece or as a stream), and `sse.py` (frames out, keep-alives, slow readers).
`errors.py` is the one place where failures become responses, `app.py` lists the routes, `server.py` is all of it on one
event loop, and `startup.py` is what `flare serve` does before and after.
"""
