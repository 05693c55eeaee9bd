"""The endpoints: each decodes its JSON straight into the neutral request and encodes its JSON from the neutral events.

`endpoint.py` is what they have in common, `fields.py` the request fields that several share, `decoding.py` turns bytes
into structs and a decoder's complaint into one line, `thinking.py` reads the thinking controls, `tools.py` checks tools
and calls, `encoding.py` and `chunks.py` build answers and streams. Then each endpoint: `chat.py`, `completions.py` and so
on, with what only it has in files of its name (`chat_messages.py`). Nothing here knows HTTP, sockets or the engine.
"""
