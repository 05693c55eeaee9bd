"""The runtime: loads a core and replays it; it compiles nothing and imports no exporter.

`cli.py` starts it, `settings.py` and `config.py` hold the settings, `runtime.py` wires the parts together. A request comes
in through a transport, `http/` or `api.py`, and is answered by `service/`: decoded by the endpoint's file in `protocols/` into
the neutral request of `conversation.py`, resolved against the model that is served (`served.py`, `thinking.py`), turned into
tokens by `prompting.py` and `text/`, scheduled by `engine/`, computed by `replay/` on a core opened by `core/`; it comes back
through `generation.py` as neutral events, which the endpoint encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from flare.api import InProcess

__version__ = "0.1.0"


def open(core: str | os.PathLike[str], **settings: Any) -> InProcess:
    """Loads a core for use within this process; nothing listens on any port.

        with flare.open("cores/smollm2", max_tokens=512) as model:
            reply = model.request("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
            print(reply.json()["choices"][0]["message"]["content"])

    `settings` are those of a configuration file that concern the model and the bounds of requests, by their names there.
    Neither a file nor the environment is read. What is returned must be closed, or used in a `with` block as above: until
    then its threads and the core's memory stay, also when nothing refers to it.

    Raises CoreError for a bad core, InputError for a bad setting and for what this machine cannot do.
    """
    from flare.api import open_core

    return open_core(core, settings)
