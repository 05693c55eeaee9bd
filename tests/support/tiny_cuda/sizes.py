"""Sizes of the tiny cuda core, and its kernels' parameters."""

from __future__ import annotations

V, CONTEXT, SLOTS, PT, TOKENS, ROWS = 64, 64, 4, 16, 16, 4
STRIDE = CONTEXT // PT
PAGE_BYTES = 128
PAGE_STRIDE = PAGE_BYTES // 4

SIGNATURES = {
    "write": {
        **{name: "*i32" for name in ("tokens", "positions", "slots", "table")},
        **{"weights": "*fp32", "pool": "*fp32", "STRIDE": "i32"},
    },
    "gather": {
        **{name: "*i32" for name in ("positions", "slots", "table")},
        **{"pool": "*fp32", "out": "*fp32", "scale": "fp32", "STRIDE": "i32"},
    },
    "project": {"values": "*fp32", "rows": "*i32", "weights": "*fp32", "logits": "*fp32"},
    "pick": {"logits": "*fp32"}
    | {name: "*i32" for name in ("params", "history", "masks", "ids", "sampled", "logprobs")},
    "grade": {"logits": "*fp32"} | {name: "*i32" for name in ("first", "targets", "wanted", "logprobs")},
}
CONSTANTS = {
    "write": {"PT": PT, "PAGE_STRIDE": PAGE_STRIDE},
    "gather": {"PT": PT, "PAGE_STRIDE": PAGE_STRIDE, "CONTEXT": CONTEXT},
    "project": {"V": V},
    "pick": {"CONTEXT": CONTEXT, "V": V},
    "grade": {"V": V, "ROWS": ROWS},
}
