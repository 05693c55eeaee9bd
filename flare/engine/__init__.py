"""Continuous batching: many requests at once over one replay.

A request's way through the package:

1. `request.py`    a `Request` is what the server submits: prompt, limits, sampling; it carries its own progress.
2. `engine.py`     `Engine.submit` checks it and hands it to the engine thread, which owns everything below.
3. `scheduler.py`  plans one ragged step at a time: the next token of every decoding slot, then chunks of prompts.
4. `pages.py`      gives slots the pages that hold their keys and values; pages are counted, so they can be shared.
5. `interface.py`  what a replay is to the engine: arrays to fill, `step` and `sample` to call.
6. `sampling.py`   writes each row's sampling parameters.
7. `request.py`    one `Delivery` a request and step goes back, all of a step's in one call.

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
    TokenStops,
)
from flare.engine.sampling import SamplingParams
from flare.errors import ReplayDead

__all__ = [
    "Delivery",
    "Engine",
    "EngineLimits",
    "EngineStats",
    "ForcedToken",
    "QueueFull",
    "ReplayDead",
    "Request",
    "SamplingParams",
    "StopCause",
    "TokenStops",
]
