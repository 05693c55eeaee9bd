"""Host parts of cuda targets: every planted defect of their cuts, their graph and their manifest is refused, in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flare.core.cuda_checks import check_cuda_graphs
from flare.core.cuda_graph import CudaGraphs, HostCut, HostRows, Pointer, decode_cuda_graphs, pieces
from flare.core.graph import Argument, Graph, Node, Op, Tensor, decode_graph, elements
from flare.core.host_checks import check_host_graph
from flare.core.manifest import (
    MANIFEST_FILE,
    CpuSegments,
    CpuTarget,
    File,
    HostPart,
    KernelLibrary,
    Manifest,
    Weights,
)
from flare.core.manifest_checks import decode_manifest
from flare.errors import CoreError
from tests.support.cuda_graphs import LIMITS, VOCABULARY, file_of, make_graphs, make_manifest
from tests.support.mutations import at, mutations, places, put

ARCHITECTURE = "sm_90a"
WHERE = file_of(ARCHITECTURE)
FILE = "graphs/host.msgpack"
Change = Callable[[dict[str, Any]], object]


def rows(segment: Any, offset: int, row_bytes: int, count: Any, many: int) -> HostRows:
    return HostRows(
        buffer=Pointer(segment=segment, offset=offset, bytes=many * row_bytes), row_bytes=row_bytes, count=count
    )


def with_cuts(graphs: CudaGraphs) -> CudaGraphs:
    """The graphs with a cut before the product, and one before the scaling, which takes logits as well."""
    step = []
    for bucket in graphs.step:
        tokens = bucket.tokens
        nodes = list(bucket.nodes)
        nodes[5], nodes[6] = replace(nodes[5], after=[]), replace(nodes[6], after=[])
        logits = rows("io", graphs.io["logits"].offset, 4 * VOCABULARY, "R", bucket.rows)
        cuts = [
            HostCut(at=5, gives=[], takes=[rows("arena", 64, 128, "T", tokens)]),
            HostCut(
                at=6, gives=[rows("arena", 1024, 256, "T", tokens)], takes=[rows("arena", 0, 8, "T", tokens), logits]
            ),
        ]
        step.append(replace(bucket, nodes=nodes, host=cuts))
    return replace(graphs, step=step)


def piece(number: int, inputs: list[Tensor], outputs: list[Tensor], args: list[tuple[int, int]]) -> Node:
    return Node(
        kernel="device",
        phase=2 * number,
        label=f"piece {number}",
        args=[Argument(segment="arena", offset=offset, bytes=size) for offset, size in args],
        op=Op(name="device", attrs={"piece": number}, inputs=list(inputs), outputs=outputs),
    )


def host_graph() -> Graph:
    """What fits `with_cuts`."""
    some = Tensor(shape=["T", 4, 8])
    logits = Tensor(shape=["R", VOCABULARY])
    return Graph(
        name="step",
        nodes=[
            piece(0, [], [], []),
            Node(kernel="Embed<F32, 40, 32>", phase=1, label="table", args=[]),
            piece(1, [some], [Tensor(shape=["T", 64])], [(0, 512), (512, 1024)]),
            Node(kernel="SiluMul<64>", phase=3, label="silu_mul", args=[]),
            piece(2, [Tensor(shape=["T", 2]), logits], [], [(0, 64), (1536, 320)]),
        ],
    )


def manifest() -> Manifest:
    plain = make_manifest(ARCHITECTURE)
    (target,) = plain.targets
    program = CpuTarget(
        abi=4,
        libraries=[KernelLibrary(file="kernels/host-generic.so", isa="generic", machine="x", compiler="c", flags=[])],
        graphs={"step": FILE},
        segments=CpuSegments(
            weights_bytes=0,
            weights_offset=4096,
            arena_bytes=4096,
            io_bytes=LIMITS.max_rows * VOCABULARY * 4,
            kv_page_bytes=64,
        ),
        weights=Weights(
            file="weights-host.safetensors",
            option="auto",
            formats={},
            kv_format="f32",
            decode_weight_bytes=0,
            header_sha256="0" * 64,
        ),
    )
    host = HostPart(ops={"silu_mul": 1, "embed": 1}, program=program)
    weights = {"weights-host.safetensors", target.weights.file}
    names = [*plain.files, "kernels/host-generic.so", FILE, "weights-host.safetensors"]
    files = {name: File(bytes=0, hash="0" * 64, chunked=name in weights) for name in names}
    return replace(plain, targets=[replace(target, host=host)], files=files)


def test_good_cuts_pass_and_survive_their_file(cubins: Path) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    cut = with_cuts(graphs)
    check_cuda_graphs(cut, manifest(), files, WHERE)
    check_host_graph(host_graph(), cut, manifest(), WHERE)
    assert decode_cuda_graphs(cut.encode(), "g") == cut
    assert b"host" not in graphs.encode().replace(b"host.", b"").replace(b"segment\xa4host", b"")
    assert decode_manifest(manifest().encode()) == manifest()
    assert '"host": null' not in make_manifest(ARCHITECTURE).encode().decode()


def test_pieces_have_their_own_nodes_and_edges(cubins: Path) -> None:
    bucket = with_cuts(make_graphs(cubins, ARCHITECTURE)[0]).step[1]
    nodes = [*bucket.nodes, replace(bucket.nodes[6], after=[replace(bucket.nodes[1].after[0], node=6)])]
    found = pieces(replace(bucket, nodes=nodes))
    assert [len(piece.nodes) for piece in found] == [5, 1, 2]
    assert all((piece.tokens, piece.rows, piece.host) == (bucket.tokens, bucket.rows, []) for piece in found)
    assert found[0].nodes == bucket.nodes[:5] and [edge.node for edge in found[2].nodes[1].after] == [0]


def node(graphs: dict[str, Any], index: int) -> dict[str, Any]:
    return graphs["step"][1]["nodes"][index]


def cut(graphs: dict[str, Any], number: int, bucket: int = 1) -> dict[str, Any]:
    return graphs["step"][bucket]["host"][number]


def twice(values: list[dict[str, Any]], by: int = 0) -> None:
    """Adds the last value again, so many bytes behind."""
    last = deepcopy(values[-1])
    last["buffer"]["offset"] += by
    values.append(last)


DEFECTS: list[tuple[Change, str]] = [
    (lambda g: cut(g, 0).update(at=0), "step[1]: its cuts are at [0, 6], wanted ascending ones from 1 to 7"),
    (lambda g: cut(g, 1).update(at=5), "step[1]: its cuts are at [5, 5], wanted ascending ones"),
    (lambda g: cut(g, 0).update(at=7), "step[1]: its cuts are at [7, 6], wanted ascending ones"),
    (lambda g: cut(g, 1).update(at=8), "step[1]: its cuts are at [5, 8], wanted ascending ones from 1 to 7"),
    (lambda g: g["step"][1]["host"].pop(), "step[1]: it has 1 cuts, step[0] has 2"),
    (lambda g: g["step"][1].update(host=[]), "step[1]: it has 0 cuts for the host, wanted cuts: the manifest has a host part"),
    (lambda g: cut(g, 1)["takes"].pop(), "step[1]: cut 1 takes 1 values, that of step[0] 2"),
    (lambda g: cut(g, 1)["gives"].clear(), "step[1]: cut 1 gives 0 values, that of step[0] 1"),
    (
        lambda g: cut(g, 1)["takes"].reverse(),
        "step[1]: cut 1 takes[0] is 160 bytes for each of R at byte 320 of io, that of step[0] 8 bytes for each of T at byte 0",
    ),
    (
        lambda g: cut(g, 0)["takes"][0]["buffer"].update(offset=128),
        "cut 0 takes[0] is 128 bytes for each of T at byte 128 of arena, that of step[0] 128 bytes for each of T at byte 64 of",
    ),
    (lambda g: twice(cut(g, 0)["takes"]), "step[1] cut 0: takes: bytes 64..576 and 64..576 of arena overlap, wanted each"),
    (lambda g: twice(cut(g, 1)["gives"]), "step[1] cut 1: gives: bytes 1024..2048 and 1024..2048 of arena overlap"),
    (lambda g: twice(cut(g, 1)["takes"]), "step[1] cut 1: takes: bytes 320..640 and 320..640 of io overlap"),
    (lambda g: twice(cut(g, 0)["takes"], by=256), "step[1] cut 0: takes: bytes 64..576 and 320..832 of arena overlap"),
    (lambda g: cut(g, 0)["takes"][0].update(row_bytes=130), "step[1] cut 0: takes[0]: rows of 130 bytes, wanted a"),
    (lambda g: cut(g, 0)["takes"][0].update(row_bytes=0), "takes[0]: rows of 0 bytes"),
    (lambda g: cut(g, 0)["takes"][0].update(row_bytes=64), "takes[0]: a buffer of 512 bytes, wanted 4 rows of 64"),
    (lambda g: cut(g, 0)["takes"][0].update(count="R"), "takes[0]: a buffer of 512 bytes, wanted 2 rows of 128"),
    (lambda g: cut(g, 1)["gives"][0]["buffer"].update(offset=32768 - 512), "gives[0]: bytes 32256..33280 of segment arena"),
    (lambda g: cut(g, 1)["gives"][0]["buffer"].update(offset=8), "gives[0]: byte 8 of segment arena, wanted a multiple of 64"),
    (lambda g: cut(g, 1)["gives"][0]["buffer"].update(segment="kv"), "gives[0]: byte 1024 of segment kv, wanted the arena or"),
    (lambda g: cut(g, 1)["takes"][1]["buffer"].update(offset=0), "takes[1]: byte 0 of segment io, wanted the arena or"),
    (lambda g: node(g, 6).update(after=[{"node": 5}]), "node 6 ('scale'): it waits for node 5, which is before the cut at 6"),
    (lambda g: node(g, 5).update(after=[{"node": 3}]), "node 5 ('dot'): it waits for node 3, which is before the cut at 5"),
    (lambda g: cut(g, 0).update(at=3), "step[1] node 3 ('rows'): it waits for node 2, which is before the cut at 3"),
    (lambda g: g["sample"][0].update(host=[{"at": 1, "gives": [], "takes": []}]), "sample[0]: it has 1 cuts for the host"),
    (lambda g: g["score"][0].update(host=[{"at": 1, "gives": [], "takes": []}]), "score[0]: it has 1 cuts for the host"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), DEFECTS)
def test_planted_defects_of_cuts(cubins: Path, change: Change, says: str) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    plain = msgspec.to_builtins(with_cuts(graphs))
    change(plain)
    with pytest.raises(CoreError) as caught:
        check_cuda_graphs(msgspec.convert(plain, CudaGraphs), manifest(), files, WHERE)
    assert says in str(caught.value) and str(caught.value).startswith(f"{WHERE}: ") and "\n" not in str(caught.value)


def test_inputs_that_are_copied_behind_a_cut_come_too_late(cubins: Path) -> None:
    """What a kernel of the first piece reads must be there; those of later pieces have all that came before."""
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    step = []
    for bucket in with_cuts(graphs).step:
        *copies, rows_copy, fill, dot, scale = bucket.nodes
        nodes = [*copies, fill, dot, replace(rows_copy, after=[]), scale]
        nodes[4] = replace(dot, after=[replace(copies[1].after[0], node=2)])
        step.append(replace(bucket, nodes=nodes, host=[replace(bucket.host[0], at=5), bucket.host[1]]))
    with pytest.raises(CoreError, match=r"step\[0\] node 4 \('dot'\): it waits for no copy of rows from the host"):
        check_cuda_graphs(replace(graphs, step=step), manifest(), files, WHERE)


def test_cuts_without_a_host_part(cubins: Path) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    with pytest.raises(
        CoreError, match=r"step\[0\]: it has 2 cuts for the host, wanted none: the manifest has no host"
    ):
        check_cuda_graphs(with_cuts(graphs), make_manifest(ARCHITECTURE), files, WHERE)


def arg(graph: dict[str, Any], index: int, number: int) -> dict[str, Any]:
    return graph["nodes"][index]["args"][number]


def beside(graph: dict[str, Any], index: int, phase: int, *arena: tuple[int, int]) -> None:
    """Puts a node into a phase, with arguments in the arena where some are given."""
    nodes = graph["nodes"]
    nodes[index]["phase"] = phase
    if arena:
        nodes[index]["args"] = [{"segment": "arena", "offset": offset, "bytes": size} for offset, size in arena]


LIES: list[tuple[Change, str]] = [
    (lambda g: g["nodes"].pop(), "it has 2 pieces for a device, graphs/cuda-sm_90a.msgpack has 3"),
    (lambda g: g["nodes"][2]["op"]["attrs"].update(piece=2), "node 2 ('piece 1'): it is piece {'piece': 2}, wanted 1"),
    (lambda g: g["nodes"][2]["op"]["attrs"].clear(), "it is piece {}, wanted 1"),
    (lambda g: g["nodes"][2]["op"]["outputs"].clear(), "it has 1 inputs and 0 outputs, wanted 1 and 1"),
    (lambda g: g["nodes"][2]["args"].pop(), "it has 1 arguments, wanted 2"),
    (lambda g: g["nodes"][4]["op"]["inputs"].reverse(), "argument 0: a tensor of ['R', 40], wanted 8 bytes for each of T"),
    (lambda g: g["nodes"][4]["op"]["inputs"].__setitem__(0, None), "argument 0: a tensor of [], wanted 8 bytes"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(input="tokens"), "argument 0: a tensor of [], wanted 8 bytes"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T", "T"]), "argument 0: a tensor of ['T', 'T'], wanted"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T", -2, -1]), "argument 0: a tensor of ['T', -2, -1]"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T", 3]), "argument 0: a tensor of ['T', 3], wanted 8 bytes"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T"] * 9), "a tensor of 9 dimensions, wanted at most 8"),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T", *[1 << 62] * 7]), "a tensor of ['T', 4611686018427387904, "),
    (lambda g: g["nodes"][4]["op"]["inputs"][0].update(shape=["T", "x" * 999]), "argument 0: a tensor of ['T', 'xxx"),
    (lambda g: g["nodes"][2]["op"]["attrs"].update({"x" * 999: 1}), "node 2 ('piece 1'): it is piece {'piece': 1, 'xxx"),
    (lambda g: beside(g, 2, 0), "node 2 ('piece 1'): it is in phase 0, wanted one behind 0, that of the piece before"),
    (lambda g: beside(g, 4, 2), "node 4 ('piece 2'): it is in phase 2, wanted one behind 2, that of the piece before"),
    (lambda g: beside(g, 3, 2, (1024, 64)), "node 3 ('silu_mul'): argument 0: bytes 1024..1088 of arena, which the piece"),
    (lambda g: beside(g, 1, 2, (0, 576)), "node 1 ('table'): argument 0: bytes 0..576 of arena, which the piece gives in"),
    (lambda g: g["nodes"].pop(3), "node 3 ('piece 2'): it is in phase 4, wanted 2 or 3, by the node before"),
    (lambda g: beside(g, 3, -1), "node 3 ('silu_mul'): it is in phase -1, wanted 2 or 3, by the node before"),
    (lambda g: beside(g, 0, 1), "node 0 ('piece 0'): it is in phase 1, wanted 0, as the first node"),
    (lambda g: beside(g, 0, -1), "node 0 ('piece 0'): it is in phase -1, wanted"),
    (lambda g: arg(g, 4, 0).update(bytes=28), "argument 0: 28 bytes of segment arena, wanted 32 of arena"),
    (lambda g: arg(g, 4, 1).update(segment="weights"), "argument 1: 320 bytes of segment weights, wanted 320 of arena"),
    (lambda g: arg(g, 2, 1).update(segment="io"), "argument 1: 1024 bytes of segment io, wanted 1024 of arena"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), LIES)
def test_a_host_graph_that_does_not_fit_the_cuts(cubins: Path, change: Change, says: str) -> None:
    cut_graphs = with_cuts(make_graphs(cubins, ARCHITECTURE)[0])
    plain = msgspec.to_builtins(host_graph())
    change(plain)
    with pytest.raises(CoreError) as caught:
        check_host_graph(msgspec.convert(plain, Graph), cut_graphs, manifest(), WHERE)
    message = str(caught.value)
    assert says in message and message.startswith(f"{FILE}: ") and message.endswith("; export the core again")
    assert len(message) < 260


def test_nodes_run_beside_a_piece_that_use_nothing_of_what_it_gives(cubins: Path) -> None:
    """They may read what it takes, and what lies before and behind its results."""
    plain = msgspec.to_builtins(host_graph())
    beside(plain, 3, 2, (0, 512), (448, 64), (1536, 64))
    beside(plain, 4, 3)
    plain["nodes"][3]["args"].append({"segment": "io", "offset": 512, "bytes": 1024})
    check_host_graph(msgspec.convert(plain, Graph), with_cuts(make_graphs(cubins, ARCHITECTURE)[0]), manifest(), WHERE)


def test_elements_are_counted_without_large_numbers() -> None:
    """As exact mathematics has it, where that is at most what is asked for."""
    for sizes in product((0, -1, 1, 2, 3, 7, 1 << 62), repeat=3):
        count = math.prod(sizes)
        assert elements(sizes, 21) == (count if min(sizes) > 0 and count <= 21 else 0)
    assert elements([], 1) == 1 and elements([], 0) == elements([1], 0) == 0


def program(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["targets"][0]["host"]["program"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["targets"][0]["host"]["ops"].clear(), "targets[0].host.ops is {}, wanted a number of nodes for each"),
        (lambda m: m["targets"][0]["host"]["ops"].update(embed=0), "targets[0].host.ops is "),
        (lambda m: program(m)["graphs"].update(other=FILE), "targets[0].host.program.graphs is ['other', 'step'], wanted one"),
        (lambda m: program(m)["libraries"].clear(), "targets[0].host.program.libraries is [], wanted at least one"),
        (lambda m: program(m)["segments"].update(io_bytes=8), "targets[0].host.program.segments.io_bytes is 8, wanted room"),
        (lambda m: program(m)["weights"].update(kv_format="bf16"), "targets[0].host.program.weights.kv_format is 'bf16'"),
        (lambda m: program(m)["weights"].update(file="weights-cuda.safetensors"), "weights.file is "),
        (lambda m: m["files"].pop(FILE), f"files is '{FILE}', wanted an entry for every file"),
        (lambda m: m["files"].pop("weights-host.safetensors"), "files is 'weights-host.safetensors', wanted an entry"),
        (lambda m: program(m).update(more=1), "unknown field `more`"),
    ],
)  # fmt: skip
def test_manifests_that_lie_about_a_host_part(change: Change, says: str) -> None:
    plain = msgspec.json.decode(manifest().encode())
    change(plain)
    with pytest.raises(CoreError) as caught:
        decode_manifest(msgspec.json.encode(plain))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=250)
@given(data=st.data())
def test_any_one_mutation_is_refused_by_name_or_passes(cubins: Path, data: st.DataObject) -> None:
    """Of a file of graphs with cuts, of the host part's graph, or of the manifest."""
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    plain = {
        WHERE: msgspec.to_builtins(with_cuts(graphs)),
        FILE: msgspec.to_builtins(host_graph()),
        MANIFEST_FILE: msgspec.to_builtins(manifest()),
    }
    name = data.draw(st.sampled_from(sorted(plain)))
    place = data.draw(st.sampled_from(list(places(plain[name]))))
    within, value = data.draw(st.sampled_from(list(mutations(at(plain[name], place)))))
    plain[name] = put(plain[name], place, value)
    try:
        told = decode_manifest(msgspec.json.encode(plain[MANIFEST_FILE]))
        found = decode_cuda_graphs(msgspec.msgpack.encode(plain[WHERE]), WHERE)
        host = decode_graph(msgspec.msgpack.encode(plain[FILE]), FILE)
        assert told.cuda is not None
        check_cuda_graphs(found, told, files, told.cuda.architectures.get(ARCHITECTURE, WHERE))
        if told.cuda.host is not None:
            check_host_graph(host, found, told, WHERE)
    except CoreError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1000, message
        assert message.startswith((f"{name}: ", f"{FILE}: ", f"{WHERE}: ")), message
    else:
        untold = place[-1:] == ("at",) or within == ("kind",)
        assert name != WHERE or "host" not in place or untold, (place, within)
