"""Log probabilities, prompt scores and explicit ids of SmolLM2 over the API, against transformers' logits in float64.

The core holds the checkpoint's dequantised weights in f32, so that both compute the same function: what is left is rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flare.replay.program import runnable_isas
from ignition.checkpoint import open_checkpoint
from ignition.export import export_core
from ignition.options import ISAS, Options
from tests.test_real_serving import CoreServer

TEXT = "The capital of France is Paris. The capital of Italy is Rome, and that of Spain"
CLOSE = 1e-3
CLEAR = 2 * CLOSE
"""A gap between log probabilities that the error of neither can bridge."""
IDS = [7, 49151, 260, 0, 7042, 11]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoreServer]:
    core = tmp_path_factory.mktemp("cores") / "smollm2-f32"
    options = Options(weights="f32", isas=(runnable_isas(ISAS)[0],), prompt_logprobs=True, max_context=512)
    export_core("smollm2", core, options)
    with CoreServer(core) as running:
        yield running


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Any:
    """transformers in float32 on the dequantised weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(smollm2_gguf)
    config = AutoConfig.for_model(**checkpoint.config)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
    made.load_state_dict(weights, strict=False)
    made.tie_weights()
    return made


def truth(model: Any, tokens: list[int]) -> np.ndarray:
    """Log probabilities of every token behind each position, float64 [positions, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def ask(server: CoreServer, **fields: Any) -> dict[str, Any]:
    status, answer = server.post(PATH, fields)
    assert status == 200, answer
    return answer["choices"][0]


def ids_of(names: list[str]) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in names]


def check_top(found: dict[str, float], right: np.ndarray, chosen: int) -> None:
    """The values of 20 alternatives, and their order wherever the truth's gaps decide it."""
    ids = ids_of(list(found))
    values = np.array(list(found.values()))
    assert np.abs(values - right[ids]).max() < CLOSE
    natural = ids[:20]
    assert len(natural) == 20 and set(ids[20:]) <= {chosen}
    order = np.argsort(-right, kind="stable")
    for place, token in enumerate(natural):
        clear = right[order[place - 1]] - right[order[place]] > CLEAR if place else True
        if clear and right[order[place]] - right[order[place + 1]] > CLEAR:
            assert token == order[place]


def test_generated_and_prompt_log_probabilities_are_the_models(server: CoreServer, model: Any) -> None:
    """One request for both, greedy: values within 1e-3, ranks exact wherever gaps exceed the error."""
    common = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "return_tokens_as_token_ids": True}
    choice = ask(server, **common, echo=True, logprobs=20, return_token_ids=True)
    arrays, prompt = choice["logprobs"], choice["prompt_token_ids"]
    tokens = ids_of(arrays["tokens"])
    assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + 16
    right = truth(model, tokens)
    chosen = right[np.arange(len(tokens) - 1), tokens[1:]]
    assert arrays["token_logprobs"][0] is None and arrays["top_logprobs"][0] is None
    assert np.abs(np.array(arrays["token_logprobs"][1:]) - chosen).max() < CLOSE
    for place, top in enumerate(arrays["top_logprobs"][1:]):
        check_top(top, right[place], tokens[place + 1])
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(prompt)
    exact = 0
    for place, entries in enumerate(scores[1:]):
        row, token = right[place], prompt[place + 1]
        assert abs(entries[str(token)]["logprob"] - row[token]) < CLOSE
        for key, entry in entries.items():
            least = 1 + int((row > row[int(key)] + CLEAR).sum())
            most = 1 + int((row > row[int(key)] - CLEAR).sum()) - 1
            assert least <= entry["rank"] <= max(most, least)
            exact += least == entry["rank"] and most <= least
    assert exact > 100, "hardly any rank was decided by the truth"


def test_explicit_ids_are_of_the_same_table(server: CoreServer, model: Any) -> None:
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "return_tokens_as_token_ids": True, "logprobs": 0}
    choice = ask(server, **fields, logprob_token_ids=[*IDS, IDS[0]], return_token_ids=True)
    prompt, arrays = choice["prompt_token_ids"], choice["logprobs"]
    tokens = prompt + ids_of(arrays["tokens"])
    right = truth(model, tokens)
    for place, top in enumerate(arrays["top_logprobs"], len(prompt) - 1):
        ids = ids_of(list(top))
        assert ids[: len(IDS)] == IDS and set(ids[len(IDS) :]) <= {tokens[place + 1]}
        assert np.abs(np.array(list(top.values())) - right[place][ids]).max() < CLOSE


def test_streamed_entries_are_the_buffered_ones(server: CoreServer) -> None:
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0.8, "seed": 3, "echo": True, "logprobs": 5}
    buffered = ask(server, **fields)["logprobs"]
    _, _, data = server.request("POST", PATH, {**fields, "stream": True})
    chunks = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    joined: dict[str, list[Any]] = {name: [] for name in buffered}
    for chunk in chunks:
        for name, part in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += part
    assert joined == buffered
