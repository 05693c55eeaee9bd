"""Every configuration of dense models on a device, and one whose heads it does not take: exported, accepted, and served with
the reference's answers.

The reference is the oracle's, in f32 over the stored weights; the cpu target's answers are held to the same one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ignition.targets.cuda.export as cuda_export
from flare.core.directory import open_core
from flare.core.oracle import read_oracle
from flare.errors import InputError
from ignition.export import export_core
from ignition.options import Options
from ignition.validate import validate_core
from tests.support.checkpoints import CONFIGURATIONS, make_checkpoint
from tests.support.fake_cuda.server import FakeDeviceServer
from tests.support.stub_cubins import compile_stubs

OPTIONS = Options(targets=("cuda:sm_90a",), slots=2, max_step_tokens=16, max_context=48, prompt_logprobs=True)
ERROR = 0.08
"""Of a log probability, where all but sums is rounded to bf16; the largest seen is below 0.06 (yarn scales logits up)."""


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_device_answers_as_the_reference_does(
    kind: str, fake_libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two steps and two pages (and mistral's window), scored, and greedy tokens behind it. Tokens whose margin is
    within the error may differ; what follows another token is another text."""
    monkeypatch.setattr(cuda_export, "compile_launches", compile_stubs)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", kind, dtype="bfloat16")
    core = export_core(str(checkpoint), tmp_path / "core", OPTIONS).output
    answer = checked_answer(core, fake_libcuda)
    assert "flare_warnings" not in answer


ONLY = "has kernels on the cuda target only where head_dim is a multiple of 8 from 16 to 512, not 20"
BETWEEN = "has a kernel on the cuda target only between a projection and attention that the device runs"
NARROW = [
    f"op rms_norm (2 nodes, the first at model.layers.0.self_attn.q_norm.weight) {BETWEEN}",
    f"op rope (2 nodes, the first behind model.layers.0.self_attn.k_norm.weight) {BETWEEN}",
    f"op kv_write (1 node, at kv.0) {ONLY}",
    f"op attention (1 node, at kv.0) {ONLY}",
]


def test_heads_that_kernels_do_not_take_are_left_to_the_processor(
    fake_libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all architectures of the core, with a notice at export and a warning in the answer; or the export is refused."""
    monkeypatch.setattr(cuda_export, "compile_launches", compile_stubs)
    checkpoint = make_checkpoint(tmp_path / "made", "qwen3", dtype="bfloat16", num_hidden_layers=1, head_dim=20)
    options = replace(OPTIONS, targets=("cuda:sm_80,sm_90a",), isas=("generic",))
    report = export_core(str(checkpoint), tmp_path / "core", options)
    assert report.notices == [f"{line}: the processor runs it, slowly" for line in NARROW]
    answer = checked_answer(report.output, fake_libcuda)
    assert [warning["type"] for warning in answer["flare_warnings"]] == ["cpu_fallback"] * len(NARROW)
    with pytest.raises(InputError) as caught:
        export_core(str(checkpoint), tmp_path / "none", replace(options, cpu_fallback=False))
    refused = f"--no-cpu-fallback: {'; '.join(NARROW)}; leave the option out to have the processor run it, slowly"
    assert str(caught.value) == refused


def checked_answer(core: Path, library: Path) -> Any:
    """A served answer to one of the oracle's prompts, which is the reference's."""
    assert validate_core(core).exit_code == 0
    prompt = read_oracle(open_core(core)).prompts[1]
    tokens, given, reference = prompt.tokens, prompt.prompt_tokens, prompt.reference
    assert given == 24
    body = {"prompt": tokens[:given], "echo": True, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    with FakeDeviceServer(core, library) as server:
        answer = server.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
    found = answer["choices"][0]["logprobs"]
    ids = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
    scores = found["token_logprobs"]
    assert len(ids) == given + 3 and ids[:given] == tokens[:given]
    for place in range(1, len(ids)):
        top = reference.logprobs[place - 1]
        if ids[place] != tokens[place]:
            assert place >= given and top[0] - top[1] < 2 * ERROR and ids[place] in reference.ids[place - 1]
            break
        assert scores[place] == pytest.approx(reference.scores[place - 1], abs=ERROR), place
    return answer
