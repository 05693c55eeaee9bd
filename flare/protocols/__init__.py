"""The endpoints: each decodes its JSON straight into the neutral request and encodes its JSON from the neutral events.

`endpoint.py` is what they have in common, `fields.py` the request fields that several share, `decoding.py` turns bytes
into structs and a decoder's complaint into one line, `thinking.py` reads the thinking controls, `encoding.py` builds
answers. Then one file an endpoint: `chat.py`, `completions.py`, `models.py`. Nothing here knows HTTP, sockets or the
engine.
"""
