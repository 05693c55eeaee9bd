"""Every planted defect of cuda graphs is refused by name, in one line."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from flare.core.architectures import ABILITIES
from flare.core.checksums import sha256_bytes
from flare.core.cuda_checks import check_cuda_graphs
from flare.core.cuda_graph import (
    ROW_LOGPROBS_BYTES,
    SAMPLE_PARAMS_BYTES,
    CudaGraphs,
    Edge,
    decode_cuda_graphs,
    io_arrays,
)
from flare.errors import CoreError
from flare.replay.cpu_interface import RowLogprobs, SampleParams
from tests.support.cuda_cubins import ARCHITECTURES, assemble
from tests.support.cuda_graphs import LIMITS, VOCABULARY, file_of, make_graphs, make_manifest
from tests.support.graph_defects import (
    ARCHITECTURE,
    DOT,
    FILL,
    SCALE,
    WHERE,
    Change,
    changed,
    node,
    pointer,
    put,
    refused,
    scalar,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_good_graphs_pass_and_survive_their_file(cubins: Path, architecture: Any) -> None:
    graphs, files = make_graphs(cubins, architecture)
    check_cuda_graphs(graphs, make_manifest(architecture), files, file_of(architecture))
    assert msgspec.to_builtins(decode_cuda_graphs(graphs.encode(), "g")) == msgspec.to_builtins(graphs)
    assert decode_cuda_graphs(graphs.encode(), "g").encode() == graphs.encode()


def swap(g: dict[str, Any], kind: str) -> None:
    g[kind][0], g[kind][1] = g[kind][1], g[kind][0]


DEFECTS: list[tuple[Change, str]] = [
    # arguments
    (lambda g: node(g, 6)["args"].pop(), f"{SCALE}: it has 5 arguments, its kernel takes 6"),
    (lambda g: node(g, 6)["args"].append(pointer("none", 0, 0)), f"{SCALE}: it has 7 arguments"),
    (put(0, pointer("arena", 32768 - 64, 128)), f"{SCALE}: argument 0: bytes 32704..32832 of segment arena, which has 32768"),
    (put(0, pointer("arena", -64, 128)), "argument 0: bytes -64..64 of segment arena"),
    (put(0, pointer("arena", 0, 0)), "argument 0: bytes 0..0 of segment arena"),
    (put(0, pointer("arena", 2**62, 2**62)), "of segment arena, which has 32768"),
    (put(0, pointer("arena", 32, 64)), "argument 0: byte 32 of segment arena, wanted a multiple of 64"),
    (put(0, pointer("weights", 16, 64), 5), "argument 0: byte 16 of segment weights, wanted a multiple of 64"),
    (put(1, pointer("kv", 8192, 64), 5), "argument 1: bytes 8192..8256 of segment kv, which has 8192"),
    (put(1, pointer("kv", 8, 64), 5), "argument 1: byte 8 of segment kv, wanted a multiple of 64"),
    (put(1, pointer("io", 8, 64)), "argument 1: byte 8 of segment io"),
    (put(1, pointer("host", 0, 64)), "argument 1: a pointer to segment host, which kernels do not reach"),
    (put(1, pointer("none", 0, 0)), "argument 1: a null pointer"),
    (put(1, scalar("i64", 0)), "argument 1: a scalar of type i64, wanted a pointer"),
    (put(2, pointer("arena", 0, 64)), "argument 2: a pointer, wanted a scalar of type i32"),
    (put(2, scalar("f32", 1.0)), "argument 2: a scalar of type f32, wanted i32"),
    (put(2, scalar("i32", 2**31)), "argument 2: 2147483648, which is no i32"),
    (put(2, scalar("i32", 1.5)), "argument 2: 1.5, which is no i32"),
    (put(3, scalar("i32", 1)), "argument 3: a scalar of type i32, wanted f32"),
    (put(3, scalar("f32", 3.5e38)), "argument 3: 3.5e+38, which is no f32"),
    (put(3, scalar("f32", float("nan"))), "argument 3: nan, which is no f32"),
    (put(4, pointer("arena", 0, 64)), "argument 4: a pointer to segment arena, wanted a null pointer"),
    (put(5, scalar("i32", 0)), "argument 5: a scalar of type i32"),
    # launches
    (lambda g: node(g, 6).update(kernel=2), f"{SCALE}: it launches kernel 2, there are 2"),
    (lambda g: node(g, 6).update(kernel=-1), f"{SCALE}: it launches kernel -1"),
    (lambda g: node(g, 6).update(kernel=1), f"{SCALE}: it has 6 arguments, its kernel takes 5"),
    (lambda g: node(g, 6).update(grid=[0, 1, 1]), f"{SCALE}: its grid has 0 blocks in x, wanted 1 to 2147483647"),
    (lambda g: node(g, 6).update(grid=[2**31, 1, 1]), "its grid has 2147483648 blocks in x"),
    (lambda g: node(g, 6).update(grid=[1, 65536, 1]), "its grid has 65536 blocks in y, wanted 1 to 65535"),
    (lambda g: node(g, 6).update(grid=[1, 1, 0]), "its grid has 0 blocks in z"),
    # kernels
    (lambda g: g["kernels"][0].update(threads=128), "kernel 0 ('cuda_kernels.scale'): it has blocks of 128 threads"),
    (lambda g: g["kernels"][0].update(threads=2048), "it has 2048 threads, wanted a multiple of 32 up to 1024"),
    (lambda g: g["kernels"][0].update(threads=0), "it has 0 threads"),
    (lambda g: g["kernels"][1].update(shared=240_000), "it has 240000 bytes of dynamic and 0 of static shared memory"),
    (lambda g: g["kernels"][1].update(shared=-1), "it has -1 bytes of dynamic"),
    (lambda g: g["kernels"][0].update(name="nope"), "has no kernel 'nope', it has 'scale'"),
    (lambda g: g["kernels"][0].update(cubin="kernels/gone.cubin"), "its cubin 'kernels/gone.cubin' is no file of the core"),
    (lambda g: g["kernels"][0].update(cubin=g["kernels"][1]["cubin"]), "has no kernel 'scale', it has 'dot'"),
    (lambda g: g["kernels"][0]["signature"].pop("n"), "it has 5 parameters by its signature, scratch included"),
    (lambda g: g["kernels"][0]["signature"].update(n="i64"), "parameter 2 has 8 bytes by its signature and 4 by its cubin"),
    (lambda g: g["kernels"][0]["signature"].update(n="u16"), "parameter 'n' is of type 'u16', wanted i32, i64"),
    (lambda g: g["kernels"][0]["signature"].update(x="*fp64"), "parameter 'x' is of type '*fp64'"),
    (lambda g: g["kernels"][0]["signature"].update(x=""), "parameter 'x' is of type ''"),
    (lambda g: g["kernels"][0]["constants"].update(n=1), "'n' is in its signature and among its constants"),
    (lambda g: g["kernels"][0]["signature"].update({f"p{i}": "i32" for i in range(9999)}), "it has 10005 parameters by"),
    (lambda g: g["kernels"][0].update(source="a\nb" * 99, threads=1), "kernel 0 ('a\\nba\\nb"),
    (lambda g: node(g, 6).update(label="a\nb" * 99, kernel=9), "step[1] node 6 ('a\\nba\\nb"),
    # edges
    (lambda g: node(g, 6).update(after=[{"node": 6}]), f"{SCALE}: it waits for node 6, wanted an earlier one"),
    (lambda g: node(g, 5).update(after=[{"node": 6}]), f"{DOT}: it waits for node 6"),
    (lambda g: node(g, 6).update(after=[{"node": -1}]), f"{SCALE}: it waits for node -1"),
    (lambda g: node(g, 6).update(after=[{"node": 5}, {"node": 5}]), f"{SCALE}: it waits for node 5 twice"),
    (lambda g: node(g, 6).update(after=[]), f"{SCALE}: it waits for no copy of positions from the host"),
    (lambda g: node(g, 6).update(after=[{"node": 2}]), f"{SCALE}: it waits for no copy of rows from the host"),
    (lambda g: node(g, 5).update(after=[{"node": 4}]), f"{DOT}: it waits for no copy of positions from the host"),
    (lambda g: node(g, 1).update(after=[]), f"{DOT}: it waits for no copy of tokens from the host"),
    (lambda g: node(g, 1, "sample").update(after=[]), "sample[1] node 0 ('draw'): the copy of logprobs to the host does not"),
    (lambda g: node(g, 2, "sample").update(after=[]), "sample[1] node 0 ('draw'): the copy of logprobs to the host does not"),
    (lambda g: node(g, 1, "sample", 0).update(after=[]) or node(g, 2, "sample", 0).update(after=[{"node": 0}]),
     "sample[0] node 0 ('draw'): the copy of sampled to the host does not wait for it"),
    (lambda g: g["sample"][1]["nodes"].insert(1, node(g, 4) | {"after": []}) or [
        node(g, n, "sample").update(after=[{"node": e}]) for n, e in ((2, 0), (3, 2))],
     "sample[1] node 1 ('clear'): the copy of logprobs to the host does not wait for it"),
    (lambda g: node(g, 5)["after"][0].update(programmatic=True), f"{DOT}: its edge from node 3 is programmatic"),
    # copies and fills
    (lambda g: node(g, 1)["source"].update(bytes=8), "step[1] node 1 ('positions'): it copies 8 bytes to 16"),
    (lambda g: node(g, 1)["source"].update(segment="kv"), "it copies from kv to io, wanted host to io"),
    (lambda g: node(g, 1)["target"].update(segment="arena"), "it copies from host to arena"),
    (lambda g: node(g, 1)["source"].update(segment="none"), "source: a null pointer"),
    (lambda g: node(g, 1)["target"].update(offset=2**40), "target: bytes 1099511627776..1099511627792 of segment io"),
    (lambda g: node(g, 1)["source"].update(offset=8), "source: byte 8 of segment host, wanted a multiple of 16"),
    (lambda g: node(g, 1)["source"].update(segment="io"), "it copies bytes 64.. to 64.., which overlap"),
    (lambda g: node(g, 4)["target"].update(bytes=2**20), f"{FILL}: target: bytes 0..1048576 of segment arena"),
    (lambda g: node(g, 4)["target"].update(segment="weights", offset=0), f"{FILL}: it fills segment weights, wanted"),
    (lambda g: node(g, 4).update(value=256), f"{FILL}: its value is 256, wanted 0 to 255"),
    (lambda g: node(g, 4).update(value=-1), f"{FILL}: its value is -1"),
    # what goes in and comes out
    (lambda g: node(g, 2).update(source=node(g, 1)["source"]), "step[1]: no node copies the 16 bytes of host.slots to slots"),
    (lambda g: g["sample"][1]["nodes"].append(g["sample"][1]["nodes"][2]), "sample[1]: 2 nodes copy the 1376 bytes"),
    (lambda g: [node(g, 0)[end].update(bytes=8) for end in ("source", "target")], "no node copies the 16 bytes of host.tokens"),
    (lambda g: g["sample"][1]["nodes"].pop(), "sample[1]: no node copies the 1376 bytes of logprobs to host.logprobs"),
    (lambda g: g["sample"][1]["nodes"].append(g["sample"][1]["nodes"][0]), "sample[1]: it does not end with a copy"),
    # buckets
    (lambda g: swap(g, "step"), "step: its buckets hold [4, 1] tokens, wanted ascending ones up to 4"),
    (lambda g: g["step"].pop(), "step: its buckets hold [1] tokens, wanted ascending ones up to 4"),
    (lambda g: g["step"].clear(), "step: its buckets hold [] tokens"),
    (lambda g: g["step"][0].update(tokens=0), "step: its buckets hold [0, 4] tokens"),
    (lambda g: g["step"][0].update(tokens=4), "step: its buckets hold [4, 4] tokens"),
    (lambda g: g["step"][1].update(rows=1), "step: its last bucket holds 1 rows, wanted 2"),
    (lambda g: g["step"][0].update(rows=0), "step[0]: it holds 0 rows, wanted 1 to 2"),
    (lambda g: g["step"][1].update(rows=3), "step[1]: it holds 3 rows, wanted 1 to 2"),
    (lambda g: swap(g, "sample"), "sample: its buckets hold [2, 1] rows, wanted ascending ones up to 2"),
    (lambda g: g["sample"].pop(), "sample: its buckets hold [1] rows, wanted ascending ones up to 2"),
    (lambda g: g["sample"][0].update(tokens=1), "sample[0]: it holds 1 tokens, wanted none"),
    (lambda g: g["score"].clear(), "score: its buckets hold [] rows, wanted ascending ones up to 2"),
    # io
    (lambda g: g["io"].pop("first"), "io: 'first' is missing"),
    (lambda g: g["io"].pop("host.masks"), "io: 'host.masks' is missing"),
    (lambda g: g["io"].update({"host.logits": pointer("host", 0, 320)}), "io: 'host.logits' is none that graphs know"),
    (lambda g: g["io"]["history"].update(bytes=508), "io: history has 508 bytes of io, wanted 512 of io"),
    (lambda g: g["io"]["history"].update(segment="host"), "io: history has 512 bytes of host, wanted 512 of io"),
    (lambda g: g["io"]["wanted"].update(offset=2**40), "io: wanted: bytes 1099511627776..1099511627784 of segment io"),
    (lambda g: g["io"]["host.slots"].update(offset=8), "io: host.slots: byte 8 of segment host, wanted a multiple of 16"),
    (lambda g: g["io"]["rows"].update(g["io"]["slots"] | {"bytes": 8}), "begins at byte 128, another array ends at 1"),
    (lambda g: g.update(arch="sm_80"), "its arch is 'sm_80', the manifest says sm_90a for the file"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), DEFECTS)
def test_planted_defects(cubins: Path, change: Change, says: str) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    assert says in refused(changed(graphs, change), files)


@pytest.mark.parametrize(("segment", "end"), [("io", 4040), ("host", 3720)])
def test_segments_end_behind_their_arrays(cubins: Path, segment: str, end: int) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    manifest = make_manifest(ARCHITECTURE)
    (target,) = manifest.targets
    for size in (end, 1 << 40):
        segments = replace(target.segments, **{f"{segment}_bytes": size})
        larger = replace(manifest, targets=[replace(target, segments=segments)])
        says = f"io: arrays of {segment} end at byte {end}, the manifest has {size} bytes of it, wanted the next multiple of 64"
        assert says in refused(graphs, files, larger)


def test_cubins_that_are_not_what_their_names_say(cubins: Path) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    other, _ = make_graphs(cubins, "sm_80")
    name = graphs.kernels[0].cubin
    assert "by its bytes it would be kernels/sm_90a/" in refused(graphs, files | {name: files[name] + b"\0"})

    def move(g: dict[str, Any]) -> None:
        g["kernels"][0]["cubin"] = other.kernels[0].cubin.replace("sm_80", ARCHITECTURE)

    moved = changed(graphs, move)
    file = moved.kernels[0].cubin
    data = make_graphs(cubins, "sm_80")[1][other.kernels[0].cubin]
    assert f"its cubin {file} is for sm_80, wanted sm_90a" in refused(moved, files | {file: data})


def with_plain(graphs: CudaGraphs, data: bytes, shared: int, threads: int) -> tuple[CudaGraphs, str]:
    """The graphs with one more kernel, that of an assembled cubin, and its file."""
    file = f"kernels/{ARCHITECTURE}/{sha256_bytes(data)[:16]}.cubin"
    kernel = replace(
        graphs.kernels[0],
        cubin=file,
        name="plain",
        threads=threads,
        shared=shared,
        signature={"p": "*fp32", "n": "i32"},
        constants={},
    )
    return replace(graphs, kernels=[*graphs.kernels, kernel]), file


def test_clusters_and_static_shared_memory(cubins: Path, tmp_path: Path) -> None:
    """227 KiB are a block's on sm_90a; the static buffer has 100 bytes."""
    good, files = make_graphs(cubins, ARCHITECTURE)
    data = assemble(tmp_path, "ptxas", ARCHITECTURE)
    graphs, file = with_plain(good, data, 227 * 1024 - 100, 64)
    check_cuda_graphs(graphs, make_manifest(ARCHITECTURE), files | {file: data}, WHERE)
    graphs, file = with_plain(good, data, 227 * 1024 - 99, 64)
    says = "it has 232349 bytes of dynamic and 100 of static shared memory, sm_90a gives a block 232448"
    assert says in refused(graphs, files | {file: data})
    data = assemble(tmp_path, "ptxas", ARCHITECTURE, ".explicitcluster .reqnctapercluster 2, 1, 1")
    graphs, file = with_plain(good, data, 0, 64)
    assert "its cubin needs clusters of (2, 1, 1) blocks" in refused(graphs, files | {file: data})


def test_registers_of_a_block(cubins: Path, tmp_path: Path) -> None:
    """1024 threads may have 64 each; 65 take as many as 72, since a warp's come in pieces of 256."""
    good, files = make_graphs(cubins, ARCHITECTURE)
    data = assemble(tmp_path, "ptxas", ARCHITECTURE, threads=1024)
    place = data.index(b"\x04\x2f\x08\x00") + 8  # EIATTR_REGCOUNT of the only function
    for count, problem in ((64, None), (65, "1024 threads take 73728 registers, a block has 65536")):
        patched = data[:place] + struct.pack("<I", count) + data[place + 4 :]
        graphs, file = with_plain(good, patched, 0, 1024)
        if problem is None:
            check_cuda_graphs(graphs, make_manifest(ARCHITECTURE), files | {file: patched}, WHERE)
        else:
            assert problem in refused(graphs, files | {file: patched})


def programmatic(g: dict[str, Any], *kernels: int) -> None:
    """Has node 6, and further nodes of these kernels behind it, wait for the one before by a programmatic edge."""
    template = {kernel: node(g, number) for number, kernel in ((5, 1), (6, 0))}
    for number, kernel in enumerate(kernels, 6):
        g["step"][1]["nodes"][number:] = [template[kernel] | {"after": [{"node": number - 1, "programmatic": True}]}]


def test_a_kernel_behind_a_programmatic_edge_waits(cubins: Path) -> None:
    """Of these kernels, 0 waits and 1 does not. Node 5 has kernel 1, behind full edges."""
    for kernels, wrong in (((0,), None), ((0, 0, 0), None), ((1,), 6), ((0, 1), 7), ((0, 1, 0), 7)):
        graphs, files = make_graphs(cubins, ARCHITECTURE)
        graphs = changed(graphs, lambda g, kernels=kernels: programmatic(g, *kernels))
        if wrong is None:
            check_cuda_graphs(graphs, make_manifest(ARCHITECTURE), files, WHERE)
        else:
            says = f"its edge from node {wrong - 1} is programmatic, but its kernel does not wait for that one's end"
            assert f"{WHERE}: step[1] node {wrong} ('dot'): {says}" in refused(graphs, files)


def test_copies_are_held_against_programmatic_edges_as_against_full_ones(cubins: Path) -> None:
    """Whether what comes in is there, and what goes out is complete, is asked along edges of both kinds."""
    good, files = make_graphs(cubins, ARCHITECTURE)
    early = changed(good, lambda g: (programmatic(g, 0), node(g, 5).update(after=[])))
    assert "node 5 ('dot'): it waits for no copy of positions from the host" in refused(early, files)

    def twice(g: dict[str, Any], *after: int) -> None:
        nodes = g["sample"][1]["nodes"]
        again = node(g, 0, "score", 0) | {"after": [{"node": 0, "programmatic": True}]}
        nodes[1:] = [again, *(nodes[1 + n] | {"after": [{"node": edge}]} for n, edge in enumerate(after))]

    check_cuda_graphs(changed(good, lambda g: twice(g, 1, 2)), make_manifest(ARCHITECTURE), files, WHERE)
    says = "sample[1] node 1 ('scale'): the copy of logprobs to the host does not wait for it"
    assert says in refused(changed(good, lambda g: twice(g, 0, 2)), files)


def test_programmatic_edges_between_kernels(cubins: Path) -> None:
    """From compute capability 9.0 on."""

    def change(g: dict[str, Any]) -> None:
        node(g, 6)["after"][0]["programmatic"] = True

    for architecture in ARCHITECTURES:
        graphs, files = make_graphs(cubins, architecture)
        graphs, manifest, where = changed(graphs, change), make_manifest(architecture), file_of(architecture)
        if int(architecture.strip("sm_a")) >= 90:
            check_cuda_graphs(graphs, manifest, files, where)
        else:
            says = f"its edge from node 5 is programmatic, {architecture} has no such edges"
            assert says in refused(graphs, files, manifest, where)


def test_shared_memory_by_architecture() -> None:
    """The guide's KiB a block: 163 on 8.0, 99 on 8.6, 8.9 and 12.0, 227 on 9.0 and 10.x."""
    kib = {name: limit.shared_bytes / 1024 for name, limit in ABILITIES.items()}
    assert kib == {
        "sm_80": 163,
        "sm_86": 99,
        "sm_89": 99,
        "sm_90a": 227,
        "sm_100a": 227,
        "sm_103a": 227,
        "sm_120a": 99,
    }


def test_one_copy_may_take_all_inputs(cubins: Path) -> None:
    """What counts is that each array's bytes arrive in its place, with those between them too."""
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    first, last = graphs.io["tokens"], graphs.io["rows"]
    size = last.offset + last.bytes - first.offset

    def change(g: dict[str, Any]) -> None:
        for bucket in g["step"]:
            for end in ("source", "target"):
                bucket["nodes"][3][end].update(offset=first.offset, bytes=size)

    whole = changed(graphs, change)
    step = [
        replace(
            bucket,
            nodes=[
                replace(bucket.nodes[3], after=[]),
                *(replace(n, after=[Edge(node=before)]) for before, n in enumerate(bucket.nodes[4:])),
            ],
        )
        for bucket in whole.step
    ]
    check_cuda_graphs(replace(whole, step=step), make_manifest(ARCHITECTURE), files, WHERE)


def test_the_arrays_rows_are_those_of_the_replay() -> None:
    assert ctypes.sizeof(SampleParams) == SAMPLE_PARAMS_BYTES
    assert ctypes.sizeof(RowLogprobs) == ROW_LOGPROBS_BYTES
    sizes = io_arrays(LIMITS, VOCABULARY)
    assert sizes["page_table"] == 2 * 4 * 4 and sizes["logits"] == 2 * 40 * 4 and sizes["masks"] == 2 * 2 * 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "graphs/g: "),
        (b"\xc1", "graphs/g: "),
        (msgspec.msgpack.encode({"arch": "sm_80"}), "missing required field"),
        (b"\x91" * 100_000, "graphs/g: "),
    ],
)
def test_bytes_that_are_no_graphs(data: bytes, says: str) -> None:
    with pytest.raises(CoreError) as caught:
        decode_cuda_graphs(data, "graphs/g")
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: g["step"][1]["nodes"][0].update(kind="host"), "Invalid value 'host'"),
        (lambda g: g["step"][1]["nodes"][6]["args"][0].update(segment="state"), "Invalid enum value 'state'"),
        (lambda g: g["step"][1]["nodes"][6]["args"][2].update(type="i8"), "Invalid enum value 'i8'"),
        (lambda g: g["step"][1]["nodes"][6].update(grid=[1, 1]), "length 3"),
        (lambda g: g["step"][1]["nodes"][6].update(more=1), "unknown field `more`"),
        (lambda g: g["kernels"][0].pop("signature"), "missing required field `signature`"),
    ],
)
def test_files_of_other_fields(cubins: Path, change: Change, says: str) -> None:
    plain = msgspec.to_builtins(make_graphs(cubins, ARCHITECTURE)[0])
    change(plain)
    with pytest.raises(CoreError) as caught:
        decode_cuda_graphs(msgspec.msgpack.encode(plain), "graphs/g")
    assert says in str(caught.value) and str(caught.value).startswith("graphs/g: ")
