"""Continuous batching: many requests at once over one replay.

A request's way through the package:

1. `request.py`    a `Request` is what the server submits: prompt, limits, sampling; it carries its own progress.
2. `engine.py`     `Engine.submit` checks it and hands it to the engine thread, which owns everything below.
3. `checks.py`     what a request must be, so that no step fails that others share.
4. `scheduler.py`  plans one ragged step at a time: the next token of every decoding slot, then chunks of prompts.
5. `pages.py`      gives slots the pages that hold their keys and values; pages are counted, so they can be shared.
6. `interface.py`  what a replay is to the engine: arrays to fill, `step`, `sample` and `score` to call.
7. `arrays.py`     writes a planned step into them; `sampling.py` each row's sampling parameters, `logprobs.py` reads the rows.
8. `request.py`    one `Delivery` a request and step goes back, all of a step's in one call.

A request's tokens depend on the request alone, so any schedule, preemption or chunking gives the same reply.
"""

from flare.engine.engine import Engine
from flare.engine.request import (
    Delivery,
    EngineLimits,
    EngineStats,
    ForcedToken,
    QueueFull,
    Request,
    StopCause,
    TokenMask,
    TokenStops,
)
from flare.engine.sampling import SamplingParams
from flare.errors import ReplayDead
from flare.logprobs import LogprobsWanted, TokenLogprobs

__all__ = [
    "Delivery",
    "Engine",
    "EngineLimits",
    "EngineStats",
    "ForcedToken",
    "LogprobsWanted",
    "QueueFull",
    "ReplayDead",
    "Request",
    "SamplingParams",
    "StopCause",
    "TokenLogprobs",
    "TokenMask",
    "TokenStops",
]
