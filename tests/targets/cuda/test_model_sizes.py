"""The graphs of models of real sizes pass the checks of their launches: whatever heads, context, steps and slots there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from flare.core.architectures import ABILITIES, Architecture
from flare.core.launch_checks import check_launches
from flare.core.manifest import Limits
from ignition.capture import capture
from ignition.patterns import matrix_names
from ignition.targets.cuda.export import CudaExport
from ignition.targets.cuda.graphs import make_graphs
from ignition.weights import VECTOR, Stored
from recipes import dense
from tests.support.cuda_exports import uncompiled

# hidden_size, intermediate_size, heads, KV heads, head_dim, vocabulary
MODELS = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 49_152),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, 151_936),
    "Phi-4": (5120, 17_920, 40, 10, 128, 100_352),
    "Llama-3.3-70B": (8192, 28_672, 64, 8, 128, 128_256),
}


def check(
    kind: str, sizes: tuple[int, int, int, int, int, int], limits: Limits, format: str, architecture: Architecture
) -> None:
    """Lowers one layer of a model without weights, and holds its graphs to the checks. Raises CoreError."""
    hidden, intermediate, heads, kv_heads, head_dim, vocabulary = sizes
    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        num_hidden_layers=1,
    )
    model = dense.configure(config.to_dict())
    graph = capture(dense.RECIPE, model)
    matrices = matrix_names(graph)
    storage = {
        name: Stored(name, spec, format if name in matrices else VECTOR, ())
        for name, spec in dense.weights(model).items()
    }
    export = CudaExport(graph, storage, limits, vocabulary, [architecture], cpu_fallback=False)
    placement, lowered = export.placements[architecture], export.lowered[architecture]
    arrays = {name: export._arrays(name) for name in export.weights.storage}
    graphs = make_graphs(architecture, lowered, placement, arrays, uncompiled(export), limits, vocabulary)
    for draw, buckets in (("step", graphs.step), ("sample", graphs.sample), ("score", graphs.score)):
        check_launches(draw, buckets, graphs, limits, "graphs")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_known_models_pass(name: str, architecture: Architecture) -> None:
    limits = Limits(max_context=131_072, slots=48, page_tokens=64, max_step_tokens=700, max_rows=112)
    for format in ("bf16", "q4"):
        check("llama", MODELS[name], limits, format, architecture)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["qwen2", "qwen3", "mistral"]),
    groups=st.integers(1, 8),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([32, 64, 96, 128, 256, 512]),
    wide=st.integers(1, 4),
    context=st.integers(1, 1 << 18),
    step=st.integers(1, 3000),
    slots=st.integers(1, 600),
    more=st.sampled_from([0, 64]),
    format=st.sampled_from(["bf16", "f32", "q8", "q4"]),
    architecture=st.sampled_from(sorted(ABILITIES)),
)
def test_graphs_of_any_sizes_pass(
    kind: str,
    groups: int,
    kv_heads: int,
    head_dim: int,
    wide: int,
    context: int,
    step: int,
    slots: int,
    more: int,
    format: str,
    architecture: Architecture,
) -> None:
    slots = min(slots, step)
    sizes = (32 * groups * kv_heads * wide, 64 * wide, groups * kv_heads, kv_heads, head_dim, 1000 + wide)
    limits = Limits(
        max_context=context, slots=slots, page_tokens=32, max_step_tokens=step, max_rows=min(slots + more, step)
    )
    check(kind, sizes, limits, format, architecture)
