"""A reading with a different number in every place, so that no two can be mixed up."""

from __future__ import annotations

from typing import Any

from flare.engine import EngineStats
from flare.fallbacks import Fallback
from flare.metrics import FirstResponse, Load, Reading
from tests.support.live_server import make_model


def make_reading(**changes: Any) -> Reading:
    values: dict[str, Any] = {
        "model": make_model(decode_weight_bytes=101),
        "engine": EngineStats(
            healthy=True,
            slots=4,
            active=2,
            waiting=3,
            free_pages=50,
            total_pages=60,
            page_tokens=16,
            steps=31,
            samples=30,
            decode_rounds=29,
            prefill_tokens=1001,
            recomputed_tokens=17,
            generated_tokens=2002,
            preemptions=5,
            forced=28,
            scored_tokens=1501,
            masked_tokens=401,
            mask_seconds=0.125,
            completed=71,
            cancelled=72,
            failed=73,
        ),
        "load": Load(
            admission_used=6,
            admission_capacity=1024,
            body_bytes=7,
            body_bytes_capacity=2048,
            connections=8,
            connections_capacity=4096,
        ),
        "uptime_seconds": 12.5,
        "submitted": 36,
        "completed": 20,
        "cancelled": 9,
        "failed": 1,
        "first_responses": 19,
        "first_response_seconds": 4.75,
        "first_response": FirstResponse(0.25, 18, 60, 4096, False),
        "fallbacks": (Fallback("the first cause", 41), Fallback("another", 2)),
        "http": {("/v1/chat/completions", 200): 20, ("/v1/chat/completions", 429): 1, ("other", 404): 11},
    }
    return Reading(**(values | changes))
