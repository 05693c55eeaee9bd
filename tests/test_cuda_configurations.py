"""Every configuration of dense models on a device: exported, accepted, and served with the reference's answers.

The reference is the oracle's, in f32 over the stored weights; the cpu target's answers are held to the same one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ignition.targets.cuda.export as cuda_export
from flare.core.directory import open_core
from flare.core.oracle import read_oracle
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
    assert validate_core(core).exit_code == 0
    prompt = read_oracle(open_core(core)).prompts[1]
    tokens, given, reference = prompt.tokens, prompt.prompt_tokens, prompt.reference
    assert given == 24
    body = {"prompt": tokens[:given], "echo": True, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    with FakeDeviceServer(core, fake_libcuda) as server:
        answer = server.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
    found = answer["choices"][0]["logprobs"]
    ids = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
    scores = found["token_logprobs"]
    assert "flare_warnings" not in answer and len(ids) == given + 3 and ids[:given] == tokens[:given]
    for place in range(1, len(ids)):
        top = reference.logprobs[place - 1]
        if ids[place] != tokens[place]:
            assert place >= given and top[0] - top[1] < 2 * ERROR and ids[place] in reference.ids[place - 1]
            break
        assert scores[place] == pytest.approx(reference.scores[place - 1], abs=ERROR), place
