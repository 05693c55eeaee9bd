"""What the server does, without a transport: the routes, and the life of a request between its head and its last byte.

`exchange.py` says what a transport brings (`Incoming`) and what it gets (a `Reply`, or the frames of an `EventStream` in
`stream.py`). `routes.py` finds the route, `errors.py` is the one place where failures become replies. `generate.py` takes a
place from the quota (`admission.py`), has the body decoded and put into tokens by a thread (`workers.py`), hands it to the
runtime, and answers in one piece or as a stream. There are two transports: `flare/http`, and `flare/api.py` within a process.
"""
