"""Lowered steps compute what the torch reference does: graphs as an export writes them, run on ordinary memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

import recipes
from flare.core.architectures import Architecture
from flare.core.cuda_graph import CopyNode, CudaGraphs, KernelNode, Pointer, TensorMap
from flare.core.oracle import excess, tolerance
from flare.errors import InputError
from ignition import ops
from ignition.capture import capture
from ignition.options import ARCHITECTURES
from ignition.oracle import deviation
from ignition.patterns import matrix_names
from ignition.targets.cpu.export import CpuExport
from ignition.targets.cpu.lower import lower as lower_for_cpu
from ignition.targets.cuda.export import CudaExport
from ignition.targets.cuda.graphs import bucket_sizes
from ignition.targets.cuda.limits import require_elements
from ignition.targets.cuda.lower import compute_dtype, lower
from ignition.targets.cuda.places import KERNELS
from ignition.weights import VECTOR
from recipes import StepIO
from tests.support.checkpoints import CONFIGURATIONS, VOCABULARY, make_checkpoint
from tests.support.cuda_exports import LIMITS, Exported, export_cuda
from tests.support.cuda_segments import Segments
from tests.support.odd_graphs import odd_graph

ONE_LAYER = {"num_hidden_layers": 1}
SETTINGS = {"mistral": ONE_LAYER | {"sliding_window": 2}, "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}}
"""Over a configuration: as few layers as tell, and windows shorter than what is run."""

WIDE_HEADS = {"kind": "qwen3", "head_dim": 512, "num_attention_heads": 2, "num_key_value_heads": 1}

TABLES = [[3, 1], [9, 5], [0, 7]]


def exported(folder: Path, kind: str, *, dtype: str = "float32", weights: str = "auto", **settings: object) -> Exported:
    settings = SETTINGS.get(kind, ONE_LAYER) | settings
    return export_cuda(make_checkpoint(folder / kind, kind, dtype=dtype, **settings), weights)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def step(
    segments: Segments, bucket_tokens: int, tokens: list[int], positions: list[int], slots: list[int], rows: list[int]
) -> Tensor:
    """The logits of a step, in the bucket of so many tokens; behind what is live, padding as a replay has it."""
    (bucket,) = (bucket for bucket in segments.graphs.step if bucket.tokens == bucket_tokens)
    given = {"tokens": (tokens, 0), "positions": (positions, -1), "slots": (slots, 0), "rows": (rows, 0)}
    for name, (values, padding) in given.items():
        array = segments.array(f"host.{name}")
        array[: len(values)] = torch.tensor(values, dtype=torch.int32)
        array[len(values) :] = padding
    table = segments.array("page_table").view(LIMITS.slots, -1)
    table[:] = 2**30  # what a slot does not own must not be followed
    table[:, : len(TABLES[0])] = torch.tensor(TABLES, dtype=torch.int32)
    segments.run(bucket)
    return segments.array("logits", torch.float32).view(-1, VOCABULARY)[: len(rows)].clone()


FIRST = [5, 6, 7, 200, 9], [0, 1, 2, 0, 1], [0, 0, 0, 2, 2], [4, 2]
SECOND = [11, 12, 3], [3, 4, 2], [0, 0, 2], [1, 2, 0]


@pytest.mark.parametrize("kind", [*CONFIGURATIONS, "wide heads"])
def test_every_dense_configuration_computes_what_the_reference_does(kind: str, tmp_path: Path) -> None:
    export = exported(tmp_path, **WIDE_HEADS) if kind == "wide heads" else exported(tmp_path, kind)
    found, expected = step(export.segments(pages=12), 8, *FIRST), export.reference.step(*FIRST[:3], TABLES, FIRST[3])
    assert torch.allclose(found, expected, rtol=0, atol=2e-5 * expected.abs().max())


def test_a_step_reads_what_earlier_ones_left_in_the_pages(llama: Exported) -> None:
    segments = llama.segments(pages=12)
    for given in (FIRST, SECOND):
        found, expected = step(segments, 8, *given), llama.reference.step(*given[:3], TABLES, given[3])
        assert torch.allclose(found, expected, rtol=0, atol=2e-5 * expected.abs().max())


@pytest.mark.parametrize(
    ("weights", "dtype", "compute"),
    [
        ("q8", "bfloat16", "bf16"),
        ("q4", "float32", "bf16"),
        ("fp8", "float16", "bf16"),
        ("auto", "bfloat16", "bf16"),
        ("auto", "float16", "f16"),
    ],
)
def test_every_weight_format_is_as_close_as_a_compiled_core_must_be(
    weights: str, dtype: str, compute: str, tmp_path: Path
) -> None:
    export = exported(tmp_path, "qwen3", dtype=dtype, weights=weights)
    assert export.target.compute_dtype == export.target.weights.kv_format == compute
    found = step(export.segments(pages=12), 8, *FIRST[:3], [4, 3, 2])
    expected = export.reference.step(*FIRST[:3], TABLES, [4, 3, 2])
    problem = excess(deviation(expected.numpy(), found.numpy()), tolerance(export.target.weights.formats))
    assert problem is None
    assert not torch.equal(found, expected)


def test_a_row_has_the_same_bits_in_every_bucket(llama: Exported) -> None:
    alone, together = llama.segments(pages=12), llama.segments(pages=12)
    last = [step(alone, 1, [token], [place], [0], [0]) for place, token in enumerate(FIRST[0][:3])][-1]
    chunk = step(alone, 2, [200, 9], [0, 1], [2, 2], [1, 0])
    found = step(together, 16, *FIRST[:3], [2, 4, 3])
    assert torch.equal(found, torch.cat([last, chunk]))


@pytest.mark.parametrize(("kind", "rows"), [("llama", 1 - VOCABULARY), ("llama_tied", 1)])
def test_a_decode_step_reads_the_weights_that_it_reads_on_the_cpu(kind: str, rows: int, tmp_path: Path) -> None:
    """Of the table a row, and all of it as well where it is the output layer. Both targets pack f32 alike."""
    found = exported(tmp_path, kind)
    weights = found.target.weights
    assert weights.decode_weight_bytes == sum(weights.formats.values()) + rows * 64 * 4
    assert weights.decode_weight_bytes == CpuExport(found.graph, found.storage, LIMITS).decode_weight_bytes()


def test_each_side_reads_of_a_tied_table_what_its_nodes_read(tmp_path: Path) -> None:
    """A row where it is embedded, all of it where it is the output layer; a device without layers reads three norms and the
    rotary frequencies beside. Both sides read what one alone would."""
    checkpoint = make_checkpoint(tmp_path / "c", "llama_tied", dtype="float32", **ONE_LAYER)
    found = [export_cuda(checkpoint, kernels=KERNELS - missing) for missing in (set(), {"linear"}, {"embed"})]
    whole, embeds, multiplies = (each.target for each in found)
    total, row = whole.decode_weight_bytes, 64 * 4
    assert embeds.decode_weight_bytes == multiplies.decode_weight_bytes == total
    assert embeds.weights.decode_weight_bytes == row + 3 * 64 * 4 + 8 * 4
    assert multiplies.weights.decode_weight_bytes == total - row


def test_buckets_are_powers_of_two_and_the_limits() -> None:
    assert [bucket_sizes(most) for most in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def pointers(graphs: CudaGraphs, bucket: int) -> list[list[tuple[str, int]]]:
    """Where the pointers of each node lead that are not into the workspace of few tokens."""
    return [
        [(arg.segment, arg.offset) for arg in node.args if isinstance(arg, Pointer)]
        for node in graphs.step[bucket].nodes
        if isinstance(node, KernelNode)
    ]


def test_all_buckets_use_the_same_kernels_and_addresses(llama: Exported) -> None:
    graphs = llama.graphs()
    assert [(bucket.tokens, bucket.rows) for bucket in graphs.step] == [(1, 1), (2, 2), (4, 3), (8, 3), (16, 3)]
    assert [bucket.rows for bucket in graphs.sample] == [bucket.rows for bucket in graphs.score] == [1, 2, 3]
    kernels = [[node.kernel for node in bucket.nodes if isinstance(node, KernelNode)] for bucket in graphs.step]
    assert all(some == kernels[0] for some in kernels)
    assert all(pointers(graphs, number) == pointers(graphs, 0) for number in range(5))


def test_products_of_halves_copy_by_tensor_maps_where_the_architecture_has_them(tmp_path: Path) -> None:
    """Of each weight the same map in every bucket, of the activations one with as many rows; and a step has the same bits."""
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16", **ONE_LAYER)
    export = export_cuda(checkpoint, architectures=("sm_89", "sm_90a"))
    steps = [step(export.segments(12, architecture), 8, *FIRST) for architecture in ("sm_89", "sm_90a")]
    assert torch.equal(*steps)
    assert not any(maps_of(export.graphs("sm_89"), 0))
    found = [maps_of(export.graphs("sm_90a"), bucket) for bucket in range(5)]
    # Queries, keys and values, then attention's output layer, gate and up, their second half, and the output layer.
    rows = [(128, 64), (64, 64), (96, 64), (96, 64), (64, 96), (VOCABULARY, 64)]
    for tokens, wanted, maps in zip((1, 2, 4, 8, 16), (1, 2, 3, 3, 3), found, strict=True):
        weights = [each for each in maps if each.base.segment == "weights"]
        assert weights == [each for each in found[0] if each.base.segment == "weights"]
        assert [each.shape for each in weights] == rows and len({each.base.offset for each in weights}) == 6
        activations = [each for each in maps if each.base.segment == "arena"]
        assert [each.shape for each in activations] == [(tokens, k) for k in (64, 64, 64, 96)] + [(wanted, 64)]
        assert len(maps) == len(weights) + len(activations)
        assert all(each.strides == (2 * each.shape[1],) for each in maps)
        assert all(each.base.bytes == 2 * each.shape[0] * each.shape[1] for each in maps)


def maps_of(graphs: CudaGraphs, bucket: int) -> list[TensorMap]:
    nodes = graphs.step[bucket].nodes
    return [arg for node in nodes if isinstance(node, KernelNode) for arg in node.args if isinstance(arg, TensorMap)]


def test_draws_use_the_same_kernels_in_every_bucket(llama: Exported) -> None:
    graphs = llama.graphs()
    for kind in (graphs.sample, graphs.score):
        used = [[node.kernel for node in bucket.nodes if isinstance(node, KernelNode)] for bucket in kind]
        assert all(some == used[0] for some in used)


def labels(graphs: CudaGraphs) -> list[str]:
    return [graphs.kernels[node.kernel].source.split(".")[1] for node in graphs.step[0].nodes[1:]]


def test_a_dense_layer_becomes_nine_launches_that_wait_for_each_other(llama: Exported) -> None:
    layer = ["rms_norm", "linear", "heads", "attention_split", "attention_combine"]
    layer += ["linear", "rms_norm", "gate_up", "linear"]
    graphs = llama.graphs()
    assert labels(graphs) == ["embed", "rope_angles", *layer, *layer, "rms_norm", "linear"]
    nodes = graphs.step[0].nodes
    waits = [[edge.node for edge in node.after] for node in nodes]
    assert waits == [[], [0], [0], [1, 2], *([number] for number in range(3, len(nodes) - 1))]
    copy = nodes[0]
    assert isinstance(copy, CopyNode) and copy.source.bytes == copy.target.bytes
    sample = graphs.sample[-1].nodes
    assert [node.label for node in sample[-2:]] == ["sampled", "logprobs"]
    assert [[edge.node for edge in node.after] for node in sample[-2:]] == [[len(sample) - 3]] * 2


def test_projections_of_one_format_are_one_product(llama: Exported, tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv"]
    joined = "model.layers.0.self_attn.q_proj.weight+k_proj.weight+v_proj.weight"
    assert llama.export.any.weights[joined] == tuple(names)
    stored = llama.export.weights.storage[joined]
    assert stored.spec.shape == (64 + 32 + 32, 64) and stored.format == "f32"
    graph, limits, formats = dense_graph(), LIMITS, {name: "bf16" for name in matrix_names(dense_graph())}
    mixed = lower(graph, formats | {names[2]: "q8"}, "bf16", limits, "sm_80")
    assert joined not in mixed.weights and {(name,) for name in names} <= set(mixed.weights.values())
    first, second, third = (work for work in mixed.works if work.label in names)
    assert [work.launches(4, 3)[0].kernel for work in (first, second, third)] == [
        "linear.linear",
        "linear.linear",
        "quantised_linear.quantised_linear",
    ]


def dense_graph(**settings: object):
    config = dict(
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
        max_position_embeddings=256,
        hidden_act="silu",
    )
    recipe = recipes.find("dense").recipe
    return capture(recipe, recipe.configure(config | settings))


def test_the_compute_dtype_is_what_the_layers_weights_agree_on() -> None:
    graph = GRAPHS.setdefault("llama", dense_graph())
    names, table = list(matrix_names(graph)), "model.embed_tokens.weight"
    for format, expected in (("f16", "f16"), ("bf16", "bf16"), ("f32", "f32"), ("q4", "bf16"), ("fp8", "bf16")):
        formats = dict.fromkeys(names, format)
        assert compute_dtype(graph, formats) == compute_dtype(graph, formats | {table: "f32"}) == expected
    assert compute_dtype(graph, dict.fromkeys(names, "q8") | {"lm_head.weight": "f16"}) == "f16"
    assert compute_dtype(graph, dict.fromkeys(names, "bf16") | {"lm_head.weight": "f16"}) == "f32"


def test_layers_of_several_float_formats_are_widened_with_a_notice(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = make_checkpoint(tmp_path / "mixed", "llama", dtype="bfloat16", **ONE_LAYER)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    mixed = export_cuda(checkpoint)
    (notice,) = mixed.export.notices
    assert notice == "linear layers are stored in bf16, f16; cuda widens them and computes in f32"
    assert mixed.target.compute_dtype == "f32" and mixed.target.weights.formats.keys() == {"bf16", "f32"}
    found, expected = step(mixed.segments(12), 8, *FIRST), mixed.reference.step(*FIRST[:3], TABLES, FIRST[3])
    assert torch.allclose(found, expected, rtol=0, atol=2e-5 * expected.abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
def test_every_architecture_has_launches_of_every_format(architecture: Architecture, format: str) -> None:
    graph = GRAPHS.setdefault("llama", dense_graph())
    compute = "bf16" if format in ("q8", "q4") else format
    lowered = lower(graph, {name: format for name in matrix_names(graph)}, compute, LIMITS, architecture)
    few, many = (sum((work.launches(tokens, 3) for work in lowered.works), []) for tokens in (1, 16))
    assert [launch.constants for launch in few] == [launch.constants for launch in many]


GRAPHS: dict[str, object] = {}


def test_a_matrix_that_the_cpu_target_keeps_plain_is_f32(llama: Exported) -> None:
    """Where it has no kernel for an op that reads it, and both targets are exported."""
    table = "model.embed_tokens.weight"
    plain = llama.storage | {table: replace(llama.storage[table], format=VECTOR)}
    made = CudaExport(llama.graph, plain, LIMITS, VOCABULARY, ["sm_90a"])
    assert (made.compute, made.host, made.weights.storage[table].format) == ("f32", None, "f32")


def test_an_architecture_without_fp8_is_refused() -> None:
    graph = GRAPHS.setdefault("llama", dense_graph())
    with pytest.raises(InputError, match="weights in fp8 need sm_89 or newer, not sm_86"):
        lower(graph, {name: "fp8" for name in matrix_names(graph)}, "bf16", LIMITS, "sm_86")


def test_ops_that_nothing_takes_in_have_launches_of_their_own() -> None:
    def change(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
        y = ops.silu_mul(x, x)
        return ops.add(ops.add(y, x), y)

    graph = odd_graph(change, "")
    lowered = lower(graph, {name: "f32" for name in matrix_names(graph)}, "f32", LIMITS, "sm_80")
    kernels = [launch.kernel for work in lowered.works for launch in work.launches(4, 3)]
    assert kernels == [
        "embedding.embed",
        "elementwise.silu_mul",
        "elementwise.add",
        "elementwise.add",
        "norm.rms_norm",
        "linear.linear",
    ]


def test_a_layer_added_to_itself_is_no_residual() -> None:
    def change(x: Tensor, w: dict[str, Tensor], io: StepIO) -> Tensor:
        y = ops.linear(ops.rms_norm(x, w["norm"], 1e-5), w["square"])
        return ops.add(y, y)

    graph = odd_graph(change, "square")
    formats = {name: "f32" for name in matrix_names(graph)}
    launches = [
        launch for work in lower(graph, formats, "f32", LIMITS, "sm_80").works for launch in work.launches(4, 3)
    ]
    (product, doubled) = launches[2:4]
    assert product.kernel == "linear.linear" and product.args["residual"] is None
    assert doubled.kernel == "elementwise.add" and doubled.args["a"] == doubled.args["b"] == product.args["out"]
    layer, add = lower_for_cpu(graph, formats, "f32", LIMITS).calls[2:4]
    assert layer.kernel == "Linear<Tokens, F32, 64, 64, false, false>" and add.kernel == "Add<64>"
    assert add.operands[:2] == (layer.operands[-1],) * 2


@pytest.mark.parametrize(
    ("limits", "config", "said"),
    [
        (
            {"max_context": 2**30 + 1},
            {},
            "a context of 1073741825 tokens is more than the cuda target takes; give --max-context of 1073741824 or less",
        ),
        (
            {"page_tokens": 1024},
            {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 128, "num_hidden_layers": 2},
            "--page-tokens is 1024: a page of all layers' keys and values has 2147483648 elements, the cuda target takes "
            "2147483647 at most; choose fewer tokens",
        ),
        (
            {"max_step_tokens": 65_536},
            {"intermediate_size": 32_768},
            "--max-step-tokens is 65536: silu_mul of 65536 rows has 2147483648 elements, the cuda target takes 2147483647 "
            "at once; choose 65535 at most",
        ),
    ],
)
def test_limits_that_kernels_do_not_take_are_refused_by_their_options(
    limits: dict[str, int], config: dict[str, int], said: str
) -> None:
    graph = dense_graph(**config)
    formats = {name: "q8" if name.endswith("gate_proj.weight") else "bf16" for name in matrix_names(graph)}
    lower(graph, formats, "bf16", LIMITS, "sm_90a")
    with pytest.raises(InputError) as caught:
        lower(graph, formats, "bf16", structs.replace(LIMITS, **limits), "sm_90a")
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("slots", "max_rows", "width", "given", "choice"),
    [
        (1024, 1024, 2**21, "--slots is 1024", "1023 at most"),
        (1000, 1064, 2**21, "--slots is 1000, and --prompt-logprobs adds 64 rows",
         "959 at most, or 1023 at most without --prompt-logprobs"),
        (1, 65, 2**25, "--slots is 1, and --prompt-logprobs adds 64 rows",
         "63 at most without --prompt-logprobs"),
        (1000, 1030, 2**21, "--slots is 1000, and --prompt-logprobs adds 30 rows",
         "959 at most, or 1023 at most without --prompt-logprobs"),
    ],
)  # fmt: skip
def test_rows_that_kernels_do_not_take_are_refused_by_the_options_that_make_them(
    slots: int, max_rows: int, width: int, given: str, choice: str
) -> None:
    limits = structs.replace(LIMITS, slots=slots, max_rows=max_rows)
    require_elements(limits, "add", (2**31 - 1) // max_rows, "R")
    elements = f"add of {max_rows} rows has {max_rows * width} elements, the cuda target takes 2147483647 at once"
    with pytest.raises(InputError) as caught:
        require_elements(limits, "add", width, "R")
    assert str(caught.value) == f"{given}: {elements}; choose {choice}"
