"""Rotary position settings of a GGUF file, as config.json spells them: rope_theta and rope_scaling.

Linear and YaRN scaling are metadata. Llama 3's scaling is not: llama.cpp's converter evaluates it and stores one
divisor for each frequency as the tensor rope_freqs.weight. The formula's parameters are found again here and proved
against the tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flare.errors import InputError
from ignition.checkpoint.gguf_fields import Fields, shortest

_LLAMA3_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_TOLERANCE = 1e-5  # relative: the stored divisors are float32


def rope_settings(fields: Fields, name: str, head_dim: int) -> dict[str, Any]:
    """rope_theta and rope_scaling of an architecture. Raises InputError for what config.json cannot express."""
    theta = fields.number(f"{name}.rope.freq_base", 10000.0)
    scaling = _metadata_scaling(fields, name)
    divisors = fields.stored.get("rope_freqs.weight")
    if divisors is not None:
        if scaling is not None:
            raise InputError(
                f"{fields.path}: both rope_freqs.weight and {name}.rope.scaling.type are given; only one "
                "scaling is read"
            )
        if divisors.encoding != "f32" or divisors.shape != (head_dim // 2,):
            raise InputError(
                f"{fields.path}: tensor rope_freqs.weight is {divisors.encoding} {list(divisors.shape)}, f32 "
                f"[{head_dim // 2}] is needed"
            )
        scaling = _llama3_scaling(fields, np.frombuffer(divisors.data, "<f4").astype(np.float64), theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _metadata_scaling(fields: Fields, name: str) -> dict[str, Any] | None:
    key = f"{name}.rope.scaling.type"
    kind = fields.text(key, "linear" if f"{name}.rope.scale_linear" in fields.metadata else "none")
    if kind == "none":
        return None
    factor = fields.number(f"{name}.rope.scaling.factor", fields.number(f"{name}.rope.scale_linear", 1.0))
    if factor == 1:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.fail(key, "readable are none, linear and yarn")
    if fields.number(f"{name}.rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise fields.fail(f"{name}.rope.scaling.yarn_ext_factor", "only 1 is read")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.count(f"{name}.rope.scaling.original_context_length"),
        "beta_fast": fields.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
    }
    scale = fields.number(f"{name}.rope.scaling.attn_factor", 1.0)
    scale *= fields.number(f"{name}.rope.scaling.yarn_attn_factor", 1.0)
    if scale != 1:  # llama.cpp multiplies YaRN's own factor by it; config.json gives the product
        scaling["attention_factor"] = scale * (0.1 * math.log(factor) + 1)
    return scaling


def _llama3_scaling(fields: Fields, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters whose divisors are these; None when all are 1."""
    if not np.isfinite(divisors).all() or (divisors < 1).any():
        raise InputError(f"{fields.path}: tensor rope_freqs.weight holds divisors that are below 1 or not finite")
    factor = shortest(float(divisors.max()))
    if factor == 1:
        return None
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    for candidate in (_LLAMA3_USUAL, _fitted(divisors, frequencies, factor)):
        if candidate is not None:
            predicted = _llama3_divisors(frequencies, factor, **candidate)
            if np.allclose(predicted, divisors, rtol=_TOLERANCE, atol=0):
                return {"rope_type": "llama3", "factor": factor, **candidate}
    raise InputError(
        f"{fields.path}: tensor rope_freqs.weight does not follow the llama3 scaling; other scalings by "
        "tensor are not read"
    )


def _llama3_divisors(
    frequencies: np.ndarray,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray:
    """Llama 3's rule: long waves are slowed by `factor`, short ones kept, those between are blended."""
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - keep) / factor + keep)


def _fitted(divisors: np.ndarray, frequencies: np.ndarray, factor: float) -> dict[str, float] | None:
    """Parameters from the blended frequencies, where the share kept is a straight line over the frequency.

    The line fixes the original context and the high factor once the low factor is taken as 1, its usual value: the
    three are only defined up to a common scale.
    """
    blended = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    if blended.sum() < 2:
        return None
    keep = (1 / divisors[blended] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(frequencies[blended], keep, 1)
    if not slope > 0 or not offset < 0:
        return None
    high = float(1 - 1 / offset)
    context = round(float(slope) * 2 * math.pi * (high - 1))
    return {"low_freq_factor": 1.0, "high_freq_factor": round(high, 4), "original_max_position_embeddings": context}
