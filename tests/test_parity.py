"""Compiled cores against transformers, for every configuration of the dense decoder: the truth is outside this project.

f32 cores must give transformers' logits within 1e-4, in prefill chunks and decode alike, mixed with other sequences; bf16
cores within what bf16 rounding and f16 keys and values allow.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flare.core.directory import open_core
from flare.replay.program import open_replay, runnable_isas
from ignition.export import capture_step, choose_weights, configure, export_core, lower_cpu, open_source
from ignition.options import ISAS, Options
from ignition.report import Report
from ignition.targets.cpu import export as cpu_export
from ignition.targets.cpu.source import generate
from tests.support.checkpoints import CONFIGURATIONS, VOCABULARY, make_checkpoint
from tests.support.replaying import Sequences, scattered_pages

BEST = runnable_isas(ISAS)[0]
TOKENS = 150  # beyond the tiny models' sliding window (24) and original rope lengths (64)
F32 = Options(weights="f32", isas=(BEST,))
BF16 = Options(isas=(BEST,))
QUANTISED = ("q8", "q4")


class Exporter:
    """Exports checkpoints whose cores have one library, with the kernels of all: what every library has beside its kernels
    takes most of the time to compile."""

    def __init__(self, checkpoints: list[tuple[Path, Options]]) -> None:
        self.kernels = [kernel for checkpoint, options in checkpoints for kernel in kernels_of(checkpoint, options)]

    def export(self, checkpoint: Path, core: Path, options: Options) -> Report:
        def generate_all(kernels: list[str], isa: str) -> str:
            assert kernels and set(kernels) <= set(self.kernels)
            return generate(self.kernels, isa)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_export, "generate", generate_all)
            return export_core(str(checkpoint), core, options)


def kernels_of(checkpoint: Path, options: Options) -> list[str]:
    """The kernels of a checkpoint's core."""
    configured = configure(*open_source(str(checkpoint), None), options)
    graph = capture_step(configured)
    storage, _ = choose_weights(configured, graph, options)
    return lower_cpu(configured, graph, storage, options).kernels


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """By configuration and format of the weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    wanted = [*((kind, "float32") for kind in sorted(CONFIGURATIONS)), ("llama", "bfloat16"), ("qwen3", "bfloat16")]
    return {
        (kind, dtype): make_checkpoint(folder / f"{kind}-{dtype}", kind, dtype=dtype, shards=kind == "llama")
        for kind, dtype in wanted
    }


@pytest.fixture(scope="module")
def exporter(checkpoints: dict[tuple[str, str], Path], kept_compiles: None) -> Exporter:
    """Of all f32 and bf16 cores."""
    return Exporter([(path, BF16 if dtype == "bfloat16" else F32) for (_, dtype), path in checkpoints.items()])


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def exported(
    request: pytest.FixtureRequest,
    checkpoints: dict[tuple[str, str], Path],
    exporter: Exporter,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """(checkpoint, f32 core) of one configuration."""
    checkpoint, core = checkpoints[request.param, "float32"], tmp_path_factory.mktemp(request.param) / "core"
    exporter.export(checkpoint, core, F32)
    return checkpoint, core


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
def test_bf16_cores_stay_within_bf16_error(
    kind: str, checkpoints: dict[tuple[str, str], Path], exporter: Exporter, tmp_path: Path
) -> None:
    checkpoint = checkpoints[kind, "bfloat16"]
    exporter.export(checkpoint, tmp_path / "core", BF16)
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


@pytest.fixture(scope="module", params=QUANTISED)
def quantised(
    request: pytest.FixtureRequest, checkpoints: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Report]:
    """(format, report of a core) with libraries of every level."""
    checkpoint, options = checkpoints["qwen3", "float32"], Options(weights=request.param)
    exporter = Exporter([(checkpoint, replace(options, weights=weights)) for weights in QUANTISED])
    return request.param, exporter.export(checkpoint, tmp_path_factory.mktemp(request.param) / "core", options)


def test_quantised_cores_compute_with_the_stored_values(quantised: tuple[str, Report]) -> None:
    weights, report = quantised
    assert report.deviation.mean_kl < 0.01
    core = open_core(report.output)
    assert weights in core.manifest.cpu.weights.formats
    assert core.manifest.cpu.weights.formats.get("q8", 0) > 0  # embeddings stay q8


def test_every_level_gives_the_same_bits(quantised: tuple[str, Report]) -> None:
    """x86-64-v3 and v4 share one order of operations; generic may differ in the last bits only."""
    core = open_core(quantised[1].output)
    tokens, results = sequence(5, 40), {}
    for isa in runnable_isas(ISAS):
        with open_replay(core, threads=1, kv_pages=8, isa=isa) as replay:
            running = Sequences(replay, [list(range(8))])
            results[isa] = np.concatenate([running.step([(0, tokens[at : at + 20])])[0] for at in (0, 20)])
    if {"x86-64-v3", "x86-64-v4"} <= results.keys():
        assert (results["x86-64-v3"] == results["x86-64-v4"]).all()
    best = results[BEST]
    assert np.abs(results["generic"] - best).max() < 1e-2 * np.abs(best).max()
