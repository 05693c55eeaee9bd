"""Cores with ops that have no kernel: lowered, compiled and served, their answers are those of a core that has them all."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flare
import recipes
from flare.core.directory import open_core
from flare.core.graph import INTERPRETED, check_graph
from flare.core.manifest import Limits
from flare.errors import CoreError, InputError, RequestError
from flare.fallbacks import Fallbacks
from flare.replay.cpu import CpuArg, CpuNode, CpuProgram, CpuReplay
from flare.replay.program import open_replay, runnable_isas
from ignition.capture import capture
from ignition.checkpoint import open_checkpoint
from ignition.export import export_core
from ignition.lowered import Buffer
from ignition.options import ISAS, Options
from ignition.packed_weights import place_weights
from ignition.patterns import matrix_names
from ignition.plan import plan
from ignition.targets.cpu import lower as lowering
from ignition.targets.cpu import packing
from ignition.targets.cpu.compile import compile_libraries
from ignition.targets.cpu.lower import KERNELS, lower
from ignition.targets.cpu.source import generate, headers
from ignition.validate import validate_core
from ignition.weights import choose_storage
from tests.support.checkpoints import VOCABULARY, make_checkpoint
from tests.support.fake_library import aligned
from tests.support.forged_cores import forge, graph
from tests.support.replaying import Sequences, scattered_pages
from tests.test_plan import dense_graph

BEST = runnable_isas(ISAS)[0]
MISSING = [*({name} for name in sorted(KERNELS)), {"silu_mul", "rms_norm"}, {"linear", "kv_write"}, set(KERNELS)]
LIMITS = Limits(max_context=256, slots=4, page_tokens=16, max_step_tokens=32, max_rows=4)
CHUNKS = [7, 1, 16, 1, 5, 1, 1]
ASKED = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "logprobs": 2}


def test_what_is_interpreted_stays_out_of_kernels_and_of_quantised_storage() -> None:
    """Its neighbours are not fused with it, its own buffers are plain, and layers of q8 quantise what it made by a call."""
    dense = dense_graph()
    formats = {name: "q8" for name in matrix_names(dense)}

    def calls(missing: str) -> list[str]:
        lowered = lower(dense, formats, "f16", LIMITS, KERNELS - {missing})
        for call in lowered.calls:
            if call.op is not None:
                assert all(o.storage == "float" for o in call.operands if isinstance(o, Buffer))
        return [call.op.name if call.op is not None else call.kernel.partition("<")[0] for call in lowered.calls]

    assert calls("silu_mul").count("Quantize") == calls("").count("Quantize") + 2  # of both layers
    assert "GateUp" not in calls("silu_mul") and "GateUp" in calls("")
    assert "Heads" not in calls("rope") and calls("rope").count("KvWrite") == 2
    assert calls("take_rows")[-4:] == ["take_rows", "rms_norm", "Quantize", "Linear"]
    assert calls("attention").count("attention") == 2 and "Heads" in calls("attention")


def test_matrices_of_interpreted_ops_are_plain_for_all() -> None:
    tied = dense_graph(tie_word_embeddings=True)
    assert list(matrix_names(tied, KERNELS - {"linear"})) == []
    names = matrix_names(tied, KERNELS - {"embed"})
    assert "model.embed_tokens.weight" not in names and len(names) == 14
    lowered = lower(tied, dict.fromkeys(names, "f32"), "f32", LIMITS, KERNELS - {"embed"})
    assert lowered.interpreted == {"embed": 1, "linear": 1}  # the output layer reads the table too


@dataclass(frozen=True)
class Lowered:
    """The tiny model's step without some kernels: its nodes and packed weights."""

    kernels: list[str]
    nodes: list[CpuNode]
    weights: Any
    sizes: dict[str, int]


def lowered_without(folder: Path, captured: Any, missing: Collection[str]) -> Lowered:
    checkpoint = open_checkpoint(str(folder))
    recipe = recipes.find("dense").recipe
    kernels = KERNELS - set(missing)
    specs = recipe.weights(recipe.configure(checkpoint.config))
    storage, _ = choose_storage(specs, matrix_names(captured, kernels), checkpoint, "f32")
    formats = {name: stored.format for name, stored in storage.items()}
    made = lower(captured, formats, "f32", LIMITS, kernels)
    spans = place_weights(storage, packing).spans
    placed = plan(made, spans, LIMITS)
    data = bytearray(max(span.offset + span.bytes for span in spans.values()) + 63)
    for name, stored in storage.items():
        data[spans[name].offset : spans[name].offset + spans[name].bytes] = stored.pack(packing)
    nodes = [
        CpuNode(n.kernel, n.phase, tuple(CpuArg(a.segment, a.offset, a.bytes) for a in n.args), n.op)
        for n in placed.graph.nodes
    ]
    sizes = {"arena_bytes": placed.arena_bytes, "io_bytes": placed.io_bytes, "kv_page_bytes": placed.kv_page_bytes}
    return Lowered(made.kernels, nodes, aligned(data), sizes)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Lowered]]:
    """One library with the kernels of every step here, and the steps without MISSING[number] (-1: with all of them)."""
    folder = tmp_path_factory.mktemp("interpreted")
    checkpoint = make_checkpoint(folder / "checkpoint", "llama_tied")
    recipe = recipes.find("dense").recipe
    captured = capture(recipe, recipe.configure(open_checkpoint(str(checkpoint)).config))
    made = {
        number: lowered_without(checkpoint, captured, missing) for number, missing in enumerate([set(), *MISSING], -1)
    }
    kernels = dict.fromkeys(itertools.chain.from_iterable(step.kernels for step in made.values()))
    library = folder / "library.so"
    library.write_bytes(compile_libraries({BEST: generate(kernels, BEST)}, headers())[BEST].data)
    return library, made


def program(library: Path, step: Lowered) -> CpuProgram:
    return CpuProgram(
        library=library,
        nodes=step.nodes,
        weights=step.weights,
        weights_offset=0,
        weights_bytes=len(step.weights),
        logits_offset=0,
        vocabulary=VOCABULARY,
        limits=LIMITS,
        kv_format="f32",
        **step.sizes,
    )


def logits(replay: CpuReplay, seed: int = 1) -> np.ndarray:
    """Those of a sequence behind each chunk, beside another sequence, on pages in any order."""
    rng = np.random.default_rng(seed)
    tokens, others = rng.integers(4, VOCABULARY, (2, 64)).tolist()
    running = Sequences(replay, scattered_pages(replay, 2, 4))
    rows, at = [], 0
    for chunk in CHUNKS:
        wanted = [[chunk - 1], []]
        first, _ = running.step([(0, tokens[at : at + chunk]), (1, others[at : at + 1])], wanted)
        rows.append(first)
        at += chunk
    return np.concatenate(rows)


@pytest.mark.parametrize("number", range(len(MISSING)))
def test_a_step_without_kernels_gives_the_same_logits(steps: tuple[Path, dict[int, Lowered]], number: int) -> None:
    library, made = steps
    with CpuReplay(program(library, made[-1]), threads=2, kv_pages=8) as replay:
        wanted = logits(replay)
    fallbacks = Fallbacks(told=False)
    step = made[number]
    interpreted = [node.op.name for node in step.nodes if node.op is not None]
    # Where a tied matrix is plain for one op, the other one that reads it is interpreted with it.
    tied = {"embed", "linear"} if MISSING[number] & {"embed", "linear"} else set()
    selected = {"rms_norm"} if "take_rows" in MISSING[number] else set()
    assert MISSING[number] <= set(interpreted) <= MISSING[number] | tied | selected
    assert all(node.kernel == INTERPRETED for node in step.nodes if node.op is not None)
    with CpuReplay(program(library, step), threads=2, kv_pages=8, fallbacks=fallbacks) as replay:
        found = logits(replay)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    assert sum(fallback.count for fallback in fallbacks.events) == len(CHUNKS) * len(interpreted)


def test_answers_depend_neither_on_chunks_nor_threads(steps: tuple[Path, dict[int, Lowered]]) -> None:
    """Bit by bit, as with kernels, where every op is interpreted."""
    library, made = steps
    tokens = np.random.default_rng(3).integers(4, VOCABULARY, 30).tolist()
    found = []
    for threads, chunks, seed in ((1, [30], 1), (2, [1, 20, 9], 2), (2, [11, 1, 1, 17], 3)):
        step = program(library, made[len(MISSING) - 1])
        with CpuReplay(step, threads=threads, kv_pages=8) as replay:
            running, at = Sequences(replay, scattered_pages(replay, 2, 4, seed)), 0
            for chunk in chunks:
                (rows,) = running.step([(0, tokens[at : at + chunk])], [[chunk - 1]])
                at += chunk
            found.append(rows.tobytes())
    assert len(set(found)) == 1


def test_what_is_made_meanwhile_and_what_is_interpreted_share_the_interpreter(
    steps: tuple[Path, dict[int, Lowered]],
) -> None:
    """Python runs on the calling thread while another one's nodes need Python as well."""
    library, made = steps
    with CpuReplay(program(library, made[len(MISSING) - 1]), threads=2, kv_pages=8) as replay:
        replay.tokens[0] = 5
        for _ in range(5):
            replay.step(1, 1, lambda: sum(range(200_000)))
        assert np.isfinite(np.array(replay.logits(0))).all()


def test_a_node_that_fails_ends_its_step_alone(
    steps: tuple[Path, dict[int, Lowered]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flare.replay import interpreter

    library, made = steps
    number = MISSING.index({"silu_mul"})
    with CpuReplay(program(library, made[number]), threads=2, kv_pages=8) as replay:
        replay.tokens[0] = 5
        replay.step(1, 1)
        wanted = bytes(replay.logits(0))

        def broken(gate: Any, up: Any) -> Any:
            raise ValueError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "OPS", interpreter.OPS | {"silu_mul": broken})
            with pytest.raises(ValueError, match="broken"):
                replay.step(1, 1)
        replay.step(1, 1)
        assert bytes(replay.logits(0)) == wanted


def test_where_nothing_may_be_interpreted_no_step_runs(steps: tuple[Path, dict[int, Lowered]]) -> None:
    library, made = steps
    fallbacks = Fallbacks(allowed=False)
    number = MISSING.index({"silu_mul", "rms_norm"})
    with CpuReplay(program(library, made[number]), threads=1, kv_pages=8, fallbacks=fallbacks) as replay:
        with pytest.raises(RequestError) as caught:
            replay.step(1, 1)
    line = str(caught.value)
    assert line.startswith("CPU fallback disabled: op rms_norm (5 nodes) is not run by a kernel of the cpu target")
    assert "op silu_mul (2 nodes) is" in line and (caught.value.status, caught.value.type) == (500, "server_error")
    assert fallbacks.events == ()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny core as an exporter writes it that has kernels for neither silu_mul nor rms_norm."""
    folder = tmp_path_factory.mktemp("without")
    checkpoint = make_checkpoint(folder / "tiny", "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "KERNELS", KERNELS - {"silu_mul", "rms_norm"})
        report = export_core(str(checkpoint), folder / "core", Options(isas=(BEST,)))
        refused = folder / "refused"
        with pytest.raises(InputError) as caught:
            export_core(str(checkpoint), refused, Options(isas=(BEST,), cpu_fallback=False))
    told = [
        "op rms_norm (5 nodes) is not run by a kernel of the cpu target",
        "op silu_mul (2 nodes) is not run by a kernel of the cpu target",
    ]
    assert [line for line in report.notices if line.startswith("op ")] == [
        f"{line}: flare interprets it with numpy, slowly" for line in told
    ]
    assert (
        str(caught.value)
        == f"--no-cpu-fallback: {'; '.join(told)}; leave the option out to have it interpreted, slowly"
    )
    assert not refused.exists()
    return folder / "core"


def causes() -> list[str]:
    return [
        f"op {name} ({count} nodes) is not run by a kernel of the cpu target, numpy interprets it"
        for name, count in (("rms_norm", 5), ("silu_mul", 2))
    ]


def test_served_answers_are_those_of_a_core_with_every_kernel(
    core: Path, tiny_core: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with flare.open(tiny_core, threads=2, kv_memory="4MiB") as whole:
        wanted = whole.request("/v1/completions", ASKED).json()
    with flare.open(core, threads=2, kv_memory="4MiB", check=True) as model:
        assert status(model)["events"] == [], "the check's own steps are no request's"
        steps = model.runtime.stats().steps
        answer = model.request("/v1/completions", ASKED).json()
        steps = model.runtime.stats().steps - steps
        (choice,), (other,) = answer["choices"], wanted["choices"]
        assert choice["text"] == other["text"] and choice["finish_reason"] == other["finish_reason"]
        for ours, theirs in zip(choice["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        counts = {cause: steps * nodes for cause, nodes in zip(causes(), (5, 2), strict=True)}
        assert answer["flare_warnings"] == [
            {"type": "cpu_fallback", "cause": cause, "count": count} for cause, count in counts.items()
        ]
        assert {event["cause"]: event["count"] for event in status(model)["events"]} == counts
        text = bytes(model.request("/metrics").body).decode()
        assert f"\nflare_cpu_fallback_total {sum(counts.values())}\n" in text
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in logged if causes()[1] in line][:2] == [
        f"CPU FALLBACK ({count} so far for this cause): {causes()[1]}" for count in (1, 2)
    ]


def status(model: Any) -> Any:
    return model.request("/v1/flare/status").json()["cpu_fallback"]


@pytest.mark.parametrize("stream", [False, True])
def test_requests_are_refused_where_the_operator_wants_kernels(core: Path, stream: bool) -> None:
    with flare.open(core, threads=1, kv_memory="4MiB", cpu_fallback=False) as model:
        for _ in range(2):  # the first refusal leaves the model as it was
            reply = model.request("/v1/completions", ASKED | {"stream": stream})
            error = reply.json()["error"]
            assert reply.status == 500 and error["type"] == "server_error"
            assert error["message"] == f"CPU fallback disabled: {'; '.join(causes())}"
        assert status(model) == {"allowed": False, "total": 0, "events": []}
        assert model.request("/health").status == 200
    with pytest.raises(RequestError, match="^CPU fallback disabled: "):
        flare.open(core, threads=1, kv_memory="4MiB", cpu_fallback=False, check=True)


def test_the_core_is_valid_and_says_what_it_lacks(core: Path) -> None:
    result = validate_core(core)
    assert result.exit_code == 0, result.text()
    opened = open_core(core)
    nodes = opened.graph().nodes
    assert [node.op.name for node in nodes if node.op is not None].count("rms_norm") == 5
    target = opened.manifest.cpu
    kernels = {node.kernel for node in nodes if node.op is None}
    check_graph(opened.graph(), target.segments, kernels, "step")
    assert "Norm" not in {kernel.partition("<")[0] for kernel in kernels}


def first_op(content: dict[str, Any]) -> dict[str, Any]:
    return next(node for node in content["nodes"] if "op" in node)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda node: node["op"].update(name="mul"), "no such op"),
        (lambda node: node["op"]["outputs"][0].update(shape=["T", 1 << 40]), "does not fit its"),
        (lambda node: node["args"][0].update(segment="none", offset=0, bytes=0), "is in segment none"),
        (lambda node: node["op"].update(attrs={"eps": "x"}), "attrs"),
        (lambda node: node["op"].update(bogus=1), "bogus"),
        (lambda node: node["args"][0].update(offset=1 << 40), "reaches beyond its segment"),
    ],
)
def test_a_graph_that_lies_about_an_op_is_refused(core: Path, tmp_path: Path, change: Any, says: str) -> None:
    copy = Path(shutil.copytree(core, tmp_path / "core"))
    forge(copy, "graphs/step.msgpack", graph(lambda content: change(first_op(content))))
    with pytest.raises(CoreError, match=says):
        open_replay(open_core(copy), threads=1, kv_pages=20).close()


def test_a_node_is_interpreted_or_has_a_kernel_not_both(core: Path, tmp_path: Path) -> None:
    for name, change in (
        ("one", lambda node: node.update(kernel="Add<64>")),
        ("two", lambda node: node.pop("op")),
    ):
        copy = Path(shutil.copytree(core, tmp_path / name))
        forge(copy, "graphs/step.msgpack", graph(lambda content, change=change: change(first_op(content))))
        opened = open_core(copy)
        kernels = {node.kernel for node in opened.graph().nodes}
        with pytest.raises(CoreError, match="names kernel .* and (no )?op"):
            check_graph(opened.graph(), opened.manifest.cpu.segments, kernels, "graph step")
        with pytest.raises(CoreError):
            open_replay(opened, threads=1, kv_pages=20).close()


def test_a_piece_of_a_device_is_none_of_a_cpu_target(core: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(core, tmp_path / "core"))

    def piece(node: dict[str, Any]) -> None:
        node.update(kernel="device")
        node["op"].update(name="device", attrs={"piece": 0})

    forge(copy, "graphs/step.msgpack", graph(lambda content: piece(first_op(content))))
    with pytest.raises(
        CoreError, match=r"^node \d+: a piece for a device in a graph of the processor; export the core again$"
    ):
        open_replay(open_core(copy), threads=1, kv_pages=20).close()
