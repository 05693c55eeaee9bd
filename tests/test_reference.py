"""The reference model: eager step and captured graph agree to the last bit, on weights of any stored type."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flare.errors import InputError
from ignition.capture import capture
from ignition.reference import ReferenceModel, run_graph
from recipes import dense
from tests.recipes.families import CONFIGURATIONS, VOCABULARY, make


def prompt_of(length: int, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_graph_and_step_agree_to_the_last_bit(name: str) -> None:
    tiny = make(name)
    model = dense.configure(tiny.config)
    graph = capture(dense.RECIPE, model)
    eager, replayed = (
        ReferenceModel(dense.RECIPE, model, tiny.model.state_dict(), page_tokens=4, graph=g) for g in (None, graph)
    )
    tables = [[3, 1, 9, 4], [0, 7, 2, 11]]
    first = prompt_of(9), [*range(5), *range(4)], [0] * 5 + [1] * 4, tables, [8, 4, 0]
    second = prompt_of(8, 4), [*range(4, 11), 5], [1] * 7 + [0], tables, range(8)
    for step in (first, second):
        found = replayed.step(*step)
        assert found.shape == (len(list(step[4])), VOCABULARY)
        assert torch.equal(found, eager.step(*step))
    assert replayed.greedy(prompt_of(5), 6)[0] == eager.greedy(prompt_of(5), 6)[0]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_width_weights_are_kept_and_widened_exactly(stored: torch.dtype) -> None:
    tiny = make("qwen3-biases")
    model = dense.configure(tiny.config)
    narrow = {name: tensor.to(stored) for name, tensor in tiny.model.state_dict().items()}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    tokens = prompt_of(12)
    found = ReferenceModel(dense.RECIPE, model, narrow).logits(tokens)
    assert torch.equal(found, ReferenceModel(dense.RECIPE, model, wide).logits(tokens))


def test_numpy_tensors_are_taken_without_a_copy() -> None:
    tiny = make("llama")
    model = dense.configure(tiny.config)
    arrays = {name: tensor.numpy() for name, tensor in tiny.model.state_dict().items()}
    reference = ReferenceModel(dense.RECIPE, model, arrays)
    assert torch.equal(
        reference.logits(prompt_of(6)),
        ReferenceModel(dense.RECIPE, model, tiny.model.state_dict()).logits(prompt_of(6)),
    )
    before = reference.logits(prompt_of(6))
    arrays["model.norm.weight"] *= np.float32(2)
    assert torch.allclose(reference.logits(prompt_of(6)), 2 * before)


def test_greedy_is_argmax_of_the_whole_sequence_each_time() -> None:
    tiny = make("mistral-window")
    model = dense.configure(tiny.config)
    reference = ReferenceModel(dense.RECIPE, model, tiny.model.state_dict())
    chosen, logits = reference.greedy(prompt_of(10), 8)
    whole = reference.logits(prompt_of(10) + chosen)
    assert whole[9:-1].argmax(-1).tolist() == chosen
    assert torch.allclose(logits, whole[9:-1], atol=1e-5)


def test_what_the_checkpoint_lacks_or_misshapes_is_named() -> None:
    tiny = make("llama")
    model = dense.configure(tiny.config)
    tensors = dict(tiny.model.state_dict())
    without = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(InputError, match="no tensor model.norm.weight"):
        ReferenceModel(dense.RECIPE, model, without)
    with pytest.raises(InputError, match=r"model.norm.weight is \[5\] in the checkpoint, config.json says \[64\]"):
        ReferenceModel(dense.RECIPE, model, {**tensors, "model.norm.weight": torch.ones(5)})


def test_a_sequence_longer_than_the_pool_is_refused() -> None:
    tiny = make("llama")
    model = dense.configure(tiny.config)
    reference = ReferenceModel(dense.RECIPE, model, tiny.model.state_dict(), pages=2, page_tokens=4)
    assert reference.logits(prompt_of(8)).shape == (8, VOCABULARY)
    with pytest.raises(InputError, match="9 tokens need 3 pages of 4, the pool has 2"):
        reference.logits(prompt_of(9))


def test_run_graph_checks_shapes_against_the_graph() -> None:
    tiny = make("llama")
    model = dense.configure(tiny.config)
    graph = capture(dense.RECIPE, model)
    count = torch.zeros(3, dtype=torch.int32)
    inputs = {name: count for name in ("tokens", "positions", "slots", "rows")}
    tensors = {
        **{name: torch.ones(spec.shape) for name, spec in dense.weights(model).items()},
        **{name: torch.zeros(2, 2, s.heads, 4, s.head_dim) for name, s in dense.states(model).items()},
        **inputs,
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
    }
    assert run_graph(graph, tensors)[0].shape == (3, VOCABULARY)
    with pytest.raises(
        InputError, match=r"positions is \[3\], the graph wants \['T'\]|is \[4\], the graph wants \['T'\]"
    ):
        run_graph(graph, {**tensors, "tokens": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(InputError, match=r"model.norm.weight is \[47\], the graph wants \[64\]"):
        run_graph(graph, {**tensors, "model.norm.weight": torch.ones(47)})
