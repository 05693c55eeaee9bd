"""Compiled cores against transformers, for every configuration of the dense decoder: the truth is outside this project.

f32 cores must give transformers' logits within 1e-4, in prefill chunks and decode alike, mixed with other sequences; bf16
cores within what bf16 rounding and f16 keys and values allow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flare.core.directory import open_core
from flare.replay.program import open_replay, runnable_isas
from ignition.export import export_core
from ignition.options import ISAS, Options
from tests.support.checkpoints import CONFIGURATIONS, VOCABULARY, make_checkpoint
from tests.support.replaying import Sequences, scattered_pages

BEST = runnable_isas(ISAS)[0]
pytestmark = pytest.mark.usefixtures("kept_compiles")
TOKENS = 150  # beyond the tiny models' sliding window (24) and original rope lengths (64)


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint, f32 core) of one configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(folder / "checkpoint", request.param, shards=request.param == "llama")
    export_core(str(checkpoint), folder / "core", Options(weights="f32", isas=(BEST,)))
    return checkpoint, folder / "core"


def transformers_logits(checkpoint: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def sequence(seed: int, count: int = TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCABULARY, count).tolist()


def test_logits_and_greedy_tokens_are_those_of_transformers(exported: tuple[Path, Path]) -> None:
    checkpoint, path = exported
    tokens, others = sequence(1), sequence(2)
    wanted = transformers_logits(checkpoint, tokens)
    with open_replay(open_core(path), threads=2, kv_pages=40) as replay:
        running = Sequences(replay, scattered_pages(replay, 2, 20))
        got, at = [], 0
        for chunk in [7, 1, 16, 1, 1, 20, 3, 25, 1, 30, 1, 1]:  # prefill chunks and single decode steps of both, mixed
            first, _ = running.step([(0, tokens[at : at + chunk]), (1, others[at : at + min(chunk, 2)])])
            got.append(first)
            at += chunk
        while at < TOKENS:
            got += running.step([(0, tokens[at : at + 1])])
            at += 1
    found = np.concatenate(got)
    assert np.abs(found - wanted).max() < 1e-4
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bf16_cores_stay_within_bf16_error(kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", kind, dtype="bfloat16")
    export_core(str(checkpoint), tmp_path / "core", Options(isas=(BEST,)))
    core = open_core(tmp_path / "core")
    assert set(core.manifest.cpu.weights.formats) == {"bf16", "f32"}  # auto keeps the checkpoint's precision
    tokens = sequence(3, 64)
    exact = transformers_logits(checkpoint, tokens, torch.float32)
    rounded = transformers_logits(checkpoint, tokens, torch.bfloat16)
    with open_replay(core, threads=1, kv_pages=8) as replay:
        running = Sequences(replay, [list(range(8))])
        found = np.concatenate([running.step([(0, tokens[at : at + 32])])[0] for at in (0, 32)])
    # f32 arithmetic over bf16 weights is closer to the exact result than transformers' own bf16 arithmetic is
    assert np.abs(found - exact).max() < np.abs(rounded - exact).max()


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_quantised_cores_compute_with_the_stored_values(weights: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama_tied")
    report = export_core(str(checkpoint), tmp_path / "core", Options(weights=weights, isas=(BEST,)))
    assert report.deviation.mean_kl < 0.01
    core = open_core(tmp_path / "core")
    assert weights in core.manifest.cpu.weights.formats
    assert core.manifest.cpu.weights.formats.get("q8", 0) > 0  # embeddings stay q8


def test_every_level_gives_the_same_bits(tmp_path: Path) -> None:
    """x86-64-v3 and v4 share one order of operations; generic may differ in the last bits only."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3")
    export_core(str(checkpoint), tmp_path / "core", Options(weights="q8"))
    core = open_core(tmp_path / "core")
    tokens, results = sequence(5, 40), {}
    for isa in runnable_isas(ISAS):
        with open_replay(core, threads=1, kv_pages=8, isa=isa) as replay:
            running = Sequences(replay, [list(range(8))])
            results[isa] = np.concatenate([running.step([(0, tokens[at : at + 20])])[0] for at in (0, 20)])
    if {"x86-64-v3", "x86-64-v4"} <= results.keys():
        assert (results["x86-64-v3"] == results["x86-64-v4"]).all()
    best = results[BEST]
    assert np.abs(results["generic"] - best).max() < 1e-2 * np.abs(best).max()
