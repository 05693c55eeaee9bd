"""SmolLM2's quantised cores against transformers in float32 on the dequantised weights: divergence and top-1, no exact text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flare.core.directory import open_core
from flare.core.oracle import Deviation
from flare.replay.program import open_replay, runnable_isas
from flare.text.tokenizer import Tokenizer
from ignition.checkpoint import open_checkpoint
from ignition.export import export_core
from ignition.options import ISAS, Options
from ignition.oracle import deviation
from tests.support.replaying import Sequences

PROMPTS = (
    "Explain in a few sentences why the sky is blue, and why sunsets are red.",
    "Write a short story about a robot who learns to paint.",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "What are the main causes of the First World War?",
)
POSITIONS = 152

Truth = list[tuple[list[int], np.ndarray]]


@pytest.fixture(scope="module")
def truth(smollm2_core: Path, smollm2_gguf: Path) -> Truth:
    """For each prompt, tokens (rendered prompt and the q4 core's greedy answer) and transformers' float32 logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(smollm2_gguf)
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return [(tokens, model(torch.tensor([tokens])).logits[0].numpy()) for tokens in answered(smollm2_core)]


def answered(core: Path) -> list[list[int]]:
    """Each rendered prompt and its greedy answer, POSITIONS tokens in all. Any text of a model's kind would do; transformers
    takes ten times as long to write one."""
    tokenizer = Tokenizer.load(core / "tokenizer.json")
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in PROMPTS]
    with open_replay(open_core(core), threads=2, kv_pages=16) as replay:
        for tokens in prompts:
            running = Sequences(replay, [list(range(16))])
            while len(tokens) < POSITIONS:
                (rows,) = running.step([(0, tokens[running.computed[0] :])])
                tokens.append(int(rows[-1].argmax()))
    return prompts


def quality(core: Path, truth: Truth) -> Deviation:
    """The core's deviation from the truth over all prompts together, prompts in chunks of 32 tokens."""
    results = []
    with open_replay(open_core(core), threads=2, kv_pages=16) as replay:
        for tokens, _ in truth:
            running = Sequences(replay, [list(range(16))])
            results += [running.step([(0, tokens[at : at + 32])])[0] for at in range(0, len(tokens), 32)]
    return deviation(np.concatenate([logits for _, logits in truth]), np.concatenate(results))


def test_q4_as_shipped(smollm2_core: Path, truth: Truth) -> None:
    """No worse than what llama.cpp's int8 activations cost on the same weights."""
    found = quality(smollm2_core, truth)
    assert found.mean_kl < 0.0031 and found.top1_agreement > 0.954 and found.worst_margin < 0.5, found


def test_q8(truth: Truth, tmp_path: Path) -> None:
    export_core("smollm2", tmp_path / "core", Options(weights="q8", isas=(runnable_isas(ISAS)[0],)))
    found = quality(tmp_path / "core", truth)
    assert found.mean_kl < 0.0044 and found.top1_agreement > 0.948 and found.worst_margin < 1.0, found
