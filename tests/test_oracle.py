"""The oracle against outside truth, and `flare serve --check`, which replays it before anything is served."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flare
from flare.config import MemorySize, RuntimeSettings
from flare.core.directory import open_core
from flare.core.oracle import (
    Deviation,
    Positions,
    Tolerance,
    excess,
    read_oracle,
    tolerance,
    top_deviation,
    wrong_score,
)
from flare.errors import CoreError, SettingError
from flare.replay.oracle import check_oracle, pages_needed, score_prompt
from flare.replay.program import open_replay, runnable_isas
from flare.report import Laps
from flare.runtime import Runtime
from ignition.options import ISAS
from ignition.oracle import summarise
from tests.support.forged_cores import changed, forge, forge_weights, without_levels

ROOT = Path(__file__).resolve().parent.parent
BEST = runnable_isas(ISAS)[0]


@pytest.fixture
def core(tiny_core: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_core, tmp_path / "core"))


def naive(logits: list[float]) -> list[float]:
    """f32(f64(x) - logsumexp), as the contract has it, in numpy's longest floats."""
    wide = np.asarray(logits, np.longdouble)
    return [float(np.float32(value)) for value in wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))]


def test_stored_answers_are_those_of_the_logits(tiny_core: Path) -> None:
    """Every score, rank and likeliest token of the best level, from its rows of logits alone."""
    core = open_core(tiny_core)
    oracle = read_oracle(core)
    rows: list[list[float]] = []
    with open_replay(core, threads=1, kv_pages=pages_needed([p.tokens for p in oracle.prompts], 16)) as replay:
        assert replay.info["isa"] == BEST
        for prompt in oracle.prompts:
            found, stored = (
                score_prompt(replay, prompt.tokens, lambda logits, _: rows.append(list(logits))),
                prompt.compiled,
            )
            assert found == stored[BEST]
            for position, logits in enumerate(rows):
                reported = naive(logits)
                ids, values = found.ids[position], found.logprobs[position]
                np.testing.assert_allclose(values, [reported[token] for token in ids], rtol=3e-7)
                assert ids == [token for _, token in sorted(zip([-v for v in values], ids, strict=True))]
                others = [value for token, value in enumerate(reported) if token not in ids]
                assert len(set(ids)) == 20 and max(others) <= values[-1] + 1e-6
                if position + 1 < len(prompt.tokens):
                    score = reported[prompt.tokens[position + 1]]
                    assert found.scores[position] == pytest.approx(score, rel=3e-7)
                    assert found.ranks[position] == 1 + sum(value > score for value in reported)
            assert len(rows) == len(prompt.tokens)
            rows.clear()


def test_chunks_and_threads_change_no_answer(tiny_core: Path) -> None:
    core = open_core(tiny_core)
    oracle = read_oracle(core)
    for threads, rows in ((1, 1), (2, 7), (2, 32)):
        with open_replay(core, threads=threads, kv_pages=8) as replay:
            replay.max_rows = rows
            assert "equal to the bit" in check_oracle(replay, oracle, BEST, tolerance(core.manifest.cpu.formats))


def test_the_reference_s_answers_are_transformers_(tiny_core: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.checkpoints import make_checkpoint

    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")  # the one that the tiny core was made of
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt in read_oracle(open_core(tiny_core)).prompts:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt.tokens])).logits[0].double().log_softmax(-1)
        following = torch.tensor(prompt.tokens[1:])
        scores = logprobs[:-1].gather(1, following[:, None])[:, 0]
        np.testing.assert_allclose(prompt.reference.scores, scores.numpy(), atol=1e-4)
        for position, score in enumerate(scores):
            near = int(
                ((logprobs[position] - score).abs() < 1e-4).sum()
            )  # itself, and whatever may change places with it
            above = int((logprobs[position] > score + 1e-4).sum())
            assert above < prompt.reference.ranks[position] <= above + near
        top = logprobs.gather(1, torch.tensor(prompt.reference.ids))
        np.testing.assert_allclose(prompt.reference.logprobs, top.numpy(), atol=1e-4)
        np.testing.assert_allclose(top[:, 0].numpy(), logprobs.max(-1).values.numpy(), atol=1e-4)


def test_equal_log_probabilities_share_a_rank_and_stand_by_id() -> None:
    logits = np.zeros((3, 30), np.float32)
    logits[0, [4, 9]] = 2.0
    found = summarise(logits, [1, 9, 0])
    assert found.ids[0][:4] == [4, 9, 0, 1] and found.ids[1] == list(range(20))
    assert found.ranks == [1, 1] and found.scores[0] == found.logprobs[0][0] > found.scores[1]


TOP = [-0.1, -3.0, -5.0]


@pytest.mark.parametrize(
    ("score", "rank", "found_score", "found_rank", "wrong"),
    [
        (-3.0, 2, -3.0, 2, None),
        (-3.0, 2, -3.2, 2, "position 0: score -3.2, the reference has -3"),
        (-3.0, 2, float("-inf"), 2, "position 0: score -inf"),
        (float("-inf"), 9, float("-inf"), 9, None),
        (float("-inf"), 9, -8.0, 9, "position 0: score -8"),
        (-3.0, 2, float("nan"), 2, "position 0: score nan"),
        (-3.0, 2, -3.0, 1, "position 0: rank 1, the reference has 2"),
        (-3.0, 2, -3.0, 3, "position 0: rank 3, the reference has 2"),
        (-5.05, 4, -5.0, 3, None),  # -5 is within the margin
        (-5.05, 4, -5.0, 50, None),
        (-5.05, 4, -5.0, 2, "position 0: rank 2, the reference has 4"),
        (-9.0, 70, -9.0, 90, None),
        (-9.0, 70, -9.0, 3, "position 0: rank 3, the reference has 70"),
    ],
)
def test_scores_and_ranks_within_tolerance(
    score: float, rank: int, found_score: float, found_rank: int, wrong: str | None
) -> None:
    def positions(score: float, rank: int) -> Positions:
        return Positions(ids=[[1, 2, 3]] * 2, logprobs=[TOP] * 2, scores=[score], ranks=[rank])

    allowed = Tolerance(mean_kl=1.0, max_logprob_error=0.1, worst_margin=1.0)
    said = wrong_score(positions(score, rank), positions(found_score, found_rank), allowed)
    assert said is None if wrong is None else said is not None and said.startswith(wrong)


def test_the_deviation_of_top_tokens() -> None:
    reference = Positions(ids=[[5, 6], [7, 8]], logprobs=[[-0.5, -1.0], [-0.5, -1.0]], scores=[-1.0], ranks=[2])
    found = Positions(ids=[[6, 5], [7, 8]], logprobs=[[-0.5, -1.0], [-0.5, -1.0]], scores=[-1.0], ranks=[2])
    same = top_deviation(reference, reference, reference.logprobs)
    assert (same.mean_kl, same.max_logprob_error, same.top1_agreement, same.worst_margin) == (0, 0, 1, 0)
    other = top_deviation(reference, found, [[-0.7, -0.6], [-0.5, -1.0]])
    assert other.max_logprob_error == pytest.approx(0.4) and other.top1_agreement == 0.5
    assert other.worst_margin == 0.5
    assert other.mean_kl == pytest.approx((np.exp(-0.5) * 0.2 - np.exp(-1.0) * 0.4) / 2)


def test_the_tolerance_follows_the_coarsest_format() -> None:
    tight, half, coarse = tolerance({"f32": 1}), tolerance({"f32": 1, "bf16": 1}), tolerance({"bf16": 1, "q8": 1})
    assert tolerance({"bf16": 1, "fp8": 1}) == tolerance({"q4": 1}) == coarse
    assert tight.max_logprob_error < half.max_logprob_error < coarse.max_logprob_error


def load(core: Path, **settings: Any) -> Laps:
    laps = Laps()
    settings = {"threads": 1, "check": True, "kv_memory": MemorySize(bytes=1 << 22)} | settings
    Runtime.load(RuntimeSettings(core=str(core), **settings), laps).close()
    return laps


def test_the_check_at_start_is_timed_and_off_by_default(core: Path) -> None:
    assert [name for name, _ in load(core).laps] == ["core", "tokenizer", "kernels", "check"]
    assert [name for name, _ in load(core, check=False).laps] == ["core", "tokenizer", "kernels"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("compiled", "ranks", lambda rank: rank), None),
        (changed("compiled", "scores", lambda score: score - 1e-3), f"oracle: on {BEST} "),
        (changed("compiled", "ranks", lambda rank: rank + 1), f"oracle: on {BEST} "),
        (
            changed("reference", "scores", lambda score: score - 0.002),
            f"oracle: answers to prompt 0 on {BEST} are out of",
        ),
        (lambda data: data[:-1], "oracle.msgpack: "),
    ],
)
def test_what_the_check_refuses(core: Path, change: Any, says: str | None) -> None:
    forge(core, "oracle.msgpack", change)
    if says is None:
        load(core)
        return
    load(core, check=False)
    with pytest.raises(CoreError) as caught:
        load(core)
    assert str(caught.value).startswith(says) and str(caught.value).endswith("export the core again")
    with pytest.raises(CoreError):
        flare.open(str(core), check=True, threads=1, kv_memory="4MiB")


def test_the_check_on_a_level_that_the_export_did_not_run(core: Path) -> None:
    without_levels(core)
    load(core)
    forge(core, "oracle.msgpack", changed("reference", "scores", lambda score: score - 0.002))
    with pytest.raises(CoreError, match=r"out of tolerance: position \d+: score"):
        load(core)


def test_a_pool_that_cannot_hold_the_prompts(core: Path) -> None:
    page = open_core(core).manifest.cpu.segments.kv_page_bytes
    with pytest.raises(
        SettingError, match=r"^2 pages are too few for the check of the core, which takes 4; "
    ) as caught:
        load(core, kv_memory=MemorySize(bytes=2 * page))
    assert caught.value.setting == "kv_memory" and f"{4 * page} bytes" in str(caught.value)
    load(core, kv_memory=MemorySize(bytes=4 * page))


@contextmanager
def serve(core: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A server as a process of its own, which does not outlive the test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLARE_")}
    command = [sys.executable, "-m", "flare.cli", "serve", str(core), "--port", "0", "--kv-memory", "4MiB", *options]
    with subprocess.Popen(command, cwd=ROOT, env=environment | variables, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_server_checks_itself_before_it_serves(core: Path) -> None:
    """From the variable too; the time is in the report. A wrong weight behind right checksums is one line and 1."""
    with serve(core, FLARE_CHECK="1") as process:
        assert process.stderr is not None
        report = [process.stderr.readline() for _ in range(5)]
        assert re.search(r"kernels \d+ ms, check \d+ ms$", report[1]) and report[4].startswith("serving "), report
        found = (
            rf"check: {BEST} \d+ positions equal to the bit, log probabilities [0-9.e-]+ at most from the reference's$"
        )
        assert re.match(found, report[3]), report
        assert re.match(rf"target: cpu on {BEST}, \d+ kv pages$", report[2]), report
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0

    def flip(data: bytearray) -> None:
        data[-40_000] ^= 0x40

    forge_weights(core, flip)
    with serve(core, "--verify", "--check") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("\n") == 1 and errors.startswith("flare: oracle: "), errors


def test_a_divergence_far_below_zero_is_no_small_one() -> None:
    """Over the likeliest tokens alone it may be negative: by what their share can grow within its bound, not more."""
    allowed = tolerance(["q8"])
    for value, problem in ((-0.15, None), (-0.16, "mean_kl -0.16 < -0.158"), (0.06, "mean_kl 0.06 > 0.05")):
        found = Deviation(mean_kl=value, max_logprob_error=0.0, top1_agreement=1.0, worst_margin=0.0)
        assert excess(found, allowed) == problem
