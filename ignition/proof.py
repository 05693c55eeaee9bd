"""The proof of an export: the oracle's prompts through the torch reference and through the compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flare.core.graph import Graph
from flare.core.manifest import Manifest
from flare.core.oracle import Deviation, Oracle, Positions, Prompt, excess, tolerance, wrong_score
from flare.errors import InputError
from flare.replay.cpu import CpuReplay
from flare.replay.oracle import pages_needed, score_prompt
from flare.replay.program import cpu_target, make_program, runnable_isas
from flare.text.tokenizer import Tokenizer
from ignition.oracle import GREEDY_TOKENS, PROMPT_TOKENS, TEXTS, deviation, summarise
from ignition.reference import ReferenceModel
from ignition.weights import Stored
from recipes import Recipe


def run_oracle(
    *,
    recipe: Recipe,
    model: Any,
    storage: Mapping[str, Stored],
    manifest: Manifest,
    graph: Graph | None,
    folder: Path,
    advance: Callable[[int, int, str], None],
) -> tuple[Oracle, Deviation | None, list[str]]:
    """Returns the oracle, the worst deviation of a compiled library from the reference, and the levels that were run: none of
    both without a `graph` for the processor.

    Raises InputError when a library is out of tolerance, or when this machine can run none of them.
    """
    prompts = oracle_prompts(folder, manifest)
    levels = [library.isa for library in manifest.cpu.libraries] if manifest.cpu else []
    runnable = runnable_isas(levels)
    if levels and not runnable:
        raise InputError(f"this machine can run none of the levels {', '.join(levels)}; add one that it has to --isa")
    steps = 1 + len(runnable)
    advance(0, steps, "reference")
    continued, reference = reference_logits(recipe, model, storage, prompts, manifest.limits.max_context)
    answers = [summarise(logits, tokens) for logits, tokens in zip(reference, continued, strict=True)]
    compiled: dict[str, list[Positions]] = {}
    worst: Deviation | None = None
    for number, isa in enumerate(runnable, 1):
        advance(number, steps, isa)
        allowed = tolerance(cpu_target(manifest).formats)
        program = make_program(manifest, graph, folder, isa)
        rows: list[np.ndarray] = []

        def look(logits: memoryview[float], _: Any, rows: list[np.ndarray] = rows) -> None:
            rows.append(np.array(logits, dtype=np.float32))

        with CpuReplay(program, threads=1, kv_pages=pages_needed(continued, manifest.limits.page_tokens)) as replay:
            compiled[isa] = [score_prompt(replay, tokens, look) for tokens in continued]
        found = deviation(np.concatenate(reference), np.stack(rows))
        problem = excess(found, allowed)
        for wanted, got in zip(answers, compiled[isa], strict=True):
            problem = problem or wrong_score(wanted, got, allowed)
        if problem is not None:
            raise InputError(
                f"the compiled graphs ({isa}) disagree with the reference: {problem}; no core was written, please report this"
            )
        if worst is None or found.mean_kl > worst.mean_kl:
            worst = found
    oracle = Oracle(
        prompts=[
            Prompt(
                tokens=tokens,
                prompt_tokens=len(prompt),
                reference=answers[i],
                compiled={isa: found[i] for isa, found in compiled.items()},
            )
            for i, (prompt, tokens) in enumerate(zip(prompts, continued, strict=True))
        ]
    )
    return oracle, worst, runnable


def oracle_prompts(folder: Path, manifest: Manifest) -> list[list[int]]:
    """The fixed texts in the model's tokens, each at most PROMPT_TOKENS and half the context long."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    longest = max(1, min(PROMPT_TOKENS, manifest.limits.max_context // 2))
    prompts = [tokenizer.encode(text, special=False)[:longest] for text in TEXTS]
    return [prompt for prompt in prompts if prompt] or [[0]]


def reference_logits(
    recipe: Recipe, model: Any, storage: Mapping[str, Stored], prompts: list[list[int]], max_context: int
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Continues each prompt greedily with the reference over the stored weights; returns tokens and logits at each position."""
    tensors: dict[str, np.ndarray] = {}
    for stored in storage.values():
        if stored.spec.value is None:
            begin = 0
            values = stored.values()
            for tensor in stored.tensors:
                tensors[tensor.name] = values[begin : begin + tensor.rows]
                begin += tensor.rows
    longest = max(map(len, prompts)) + GREEDY_TOKENS
    reference = ReferenceModel(recipe, model, tensors, pages=-(-longest // 16), page_tokens=16)
    continued, logits = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # how torch splits a sum over threads changes its last bits, and so the oracle's bytes
    try:
        for prompt in prompts:
            count = min(GREEDY_TOKENS, max_context - len(prompt))
            tokens = prompt + (reference.greedy(prompt, count)[0] if count > 0 else [])
            continued.append(tokens)
            logits.append(reference.logits(tokens).numpy())
    finally:
        torch.set_num_threads(threads)
    return continued, logits
