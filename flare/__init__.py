"""The runtime: loads a core and replays it; it compiles nothing and imports no exporter.

`cli.py` starts it, `config.py` holds the settings, `runtime.py` wires the parts together. A request comes in through
`http/`, is decoded by the endpoint's file in `protocols/` into the neutral request of `conversation.py`, resolved
against the model that is served (`served.py`, `thinking.py`), turned into tokens by `prompting.py` and `text/`,
scheduled by `engine/`, computed by `replay/` on a core opened by `core/`, and comes back through `generation.py` as
neutral events, which the endpoint encodes.
"""

__version__ = "0.1.0"
