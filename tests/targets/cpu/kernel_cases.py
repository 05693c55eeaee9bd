"""All cases: every kernel in the shapes where it takes another way."""

from __future__ import annotations

import numpy as np

from tests.targets.cpu.kernel_cases_dense import (
    angles,
    elementwise,
    embed,
    gate_up,
    head_norm,
    linear,
    norm,
    quantize,
    rope,
    take_rows,
)
from tests.targets.cpu.kernel_cases_pages import attention, heads, kv_write
from tests.targets.cpu.kernel_operands import Case, silu

LONG = [(1, 0, 1), (3, 7, 280), (0, 200, 19)]  # enough tokens for the largest tiles

CASES = [
    *(embed(fmt, d) for fmt, d in [("F32", 72), ("F16", 72), ("BF16", 72), ("Q8", 96), ("Q4", 96)]),
    *(angles(20, scale, output) for scale in (1.0, 1.25) for output in (1, 2)),
    norm("Tokens", 70, "ToFloat"),
    norm("Tokens", 160, "ToQuant"),
    norm("Rows", 70, "ToFloat"),
    norm("Rows", 96, "ToQuant"),
    quantize(96),
    linear("Tokens", "Q8", 96, 100, True, True),
    linear("Tokens", "Q4", 160, 64, False, False),
    linear("Tokens", "Q4", 96, 40, False, True),
    linear("Rows", "Q8", 160, 50, False, False),
    linear("Tokens", "F32", 70, 100, True, True),
    linear("Tokens", "F16", 70, 60, False, True),
    linear("Tokens", "BF16", 71, 50, True, False),
    linear("Rows", "BF16", 70, 64, False, False),
    gate_up("Q4", "Q4", 96, 96, "ToQuant"),
    gate_up("Q8", "Q4", 96, 64, "ToQuant"),
    gate_up("Q4", "Q4", 96, 40, "ToFloat"),
    gate_up("F32", "F32", 70, 100, "ToFloat"),
    gate_up("BF16", "F16", 70, 40, "ToFloat"),
    heads("Q4", 96, 3, 32, False, False, True, "Query", "F16", 32),
    heads("Q8", 96, 2, 64, True, True, True, "Key", "F16", 32),
    heads("Q4", 96, 2, 32, False, False, False, "Value", "F16", 16),
    heads("BF16", 70, 3, 24, True, True, True, "Query", "F32", 16),
    heads("F32", 70, 3, 24, False, True, True, "Key", "F32", 48),
    heads("F16", 70, 3, 24, True, False, False, "Value", "F16", 16),
    attention(6, 2, 32, "F16", 16, 0, "ToQuant"),
    attention(6, 2, 32, "F16", 16, 0, "ToQuant", LONG),
    attention(4, 2, 24, "F32", 48, 0, "ToFloat"),
    attention(4, 2, 24, "F16", 32, 20, "ToFloat"),
    attention(4, 2, 24, "F16", 32, 20, "ToFloat", LONG),
    attention(2, 2, 96, "F16", 64, 0, "ToFloat", LONG),
    elementwise("SiluMul<100>", 2, 100, lambda g, u: silu(g) * u, 12),
    elementwise("Add<100>", 2, 100, np.add, 1),
    rope(3, 24),
    rope(2, 64),
    head_norm(3, 24),
    kv_write(2, 24, "F16", 32),
    kv_write(2, 24, "F32", 16),
    take_rows(70),
]


def case_name(case: Case) -> str:
    suffix = f"-{case.output}" if case.kernel.startswith("RopeAngles") else ""
    return f"{case.kernel.replace(' ', '')}-{len(case.tokens.token)}{suffix}"
