"""lm-evaluation-harness through Completions, against what it finds with transformers on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flare.replay.program import runnable_isas
from ignition.export import export_core
from ignition.options import ISAS, Options
from tests.server.opt_in import opt_in
from tests.support.checkpoints import make_checkpoint
from tests.test_real_serving import CoreServer

pytestmark = opt_in("lm_eval on the PATH, with torch, transformers and its extra api")

QUESTIONS = (
    ("The capital of France is", ["Paris", "London", "a cheese"]),
    ("Two plus two equals", ["four", "five", "blue"]),
    ("The sun rises in the", ["east", "west", "north"]),
    ("Über den Wolken muss die Freiheit wohl", ["grenzenlos sein", "日本語", "🙂 sein"]),
)
FIELDS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: 0\n",
    "last": "output_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{choices[0]}}'\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}{{choices[0]}}.'\n",
}
METRICS = {"choices": "acc", "last": "acc", "rolling": "word_perplexity"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local data, three tasks over it, and a checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("harness")
    lines = [json.dumps({"q": q, "choices": [f" {c}" for c in choices]}) for q, choices in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    for name, fields in FIELDS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ntest_split: test\ntarget_delimiter: ''\n{fields}"
            f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\nmetric_list: [{{metric: {METRICS[name]}}}]\n"
        )
    make_checkpoint(folder / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[CoreServer]:
    options = Options(weights="f32", isas=(runnable_isas(ISAS)[0],), prompt_logprobs=True)
    export_core(str(folder / "checkpoint"), folder / "core", options)
    with CoreServer(folder / "core") as running:
        yield running


def run(folder: Path, out: str, model: str, arguments: str) -> dict[tuple[str, int], Any]:
    """Runs the three tasks; returns what the model answered, by task and document."""
    command = [
        "lm_eval",
        "--model",
        model,
        "--model_args",
        arguments,
        "--tasks",
        "local_choices,local_last,local_rolling",
    ]
    command += [
        "--include_path",
        str(folder),
        "--log_samples",
        "--output_path",
        str(folder / out),
        "--batch_size",
        "4",
        "--device",
        "cpu",
    ]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=offline)
    assert result.returncode == 0, result.stderr[-2000:]
    found = {}
    for file in (folder / out).rglob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            found[file.name.split("_")[2], sample["doc_id"]] = sample["resps"]
    return found


def flat(value: Any) -> Iterator[Any]:
    """The numbers and flags of an answer; they come as text."""
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield str(value) == "True" if str(value) in ("True", "False") else float(value)


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[tuple[str, int], Any]:
    return run(folder, "hf", "hf", f"pretrained={folder / 'checkpoint'},dtype=float32")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ids", [True, False])
def test_log_likelihoods_are_those_of_transformers(
    folder: Path, server: CoreServer, right: dict[tuple[str, int], Any], ids: bool
) -> None:
    """Prompts as token ids and as text, in batches: values within 1e-3, and every flag of a greedy answer."""
    place = f"base_url={server.url}/v1/completions,model=m,num_concurrent=2,max_length=256"
    tokenizer = f"tokenizer_backend=huggingface,tokenizer={folder / 'checkpoint'},tokenized_requests={ids}"
    found = run(folder, f"ids-{ids}", "local-completions", f"{place},{tokenizer}")
    assert found.keys() == right.keys() and len(found) == 3 * len(QUESTIONS)
    for key, wanted in right.items():
        for one, other in zip(flat(found[key]), flat(wanted), strict=True):
            assert one == other if isinstance(other, bool) else one == pytest.approx(other, abs=1e-3), key
