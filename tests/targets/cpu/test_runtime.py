"""The C border of a kernel library: what it refuses, what it accepts, and that nothing leaks through it."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable
from ctypes import byref, c_char, c_void_p, sizeof
from pathlib import Path
from typing import Any

import pytest

import flare.replay.cpu_interface as native
from flare.core.directory import open_core
from flare.errors import CoreError
from flare.replay.cpu import CpuArg, CpuReplay
from flare.replay.program import open_replay
from tests.support.fake_library import aligned, fake_library, fill, node, program
from tests.test_validate import forge, forge_manifest, graph

OUT = CpuArg("io", 1024, 256)
PAGE = CpuArg("kv", 64, 64)


def raw_open(
    change: Callable[[Any, Any, Any], None] = lambda args, nodes, arg: None, error_bytes: int = 400
) -> tuple[int, str]:
    """Opens (and closes) a good two-node core after `change`, without the checks of the Python side."""
    library = native.load_library(fake_library())
    first = (native.ArgStruct * 2)(native.ArgStruct(4, 0, 64, 64), native.ArgStruct(3, 0, 1024, 256))
    second = (native.ArgStruct * 1)(native.ArgStruct(3, 0, 1024, 256))
    nodes = (native.NodeStruct * 2)(
        native.NodeStruct(b"Recall<16>", first, 2, 0), native.NodeStruct(b"Tokens", second, 1, 1)
    )
    weights = aligned((c_char * 4096)())
    args = native.OpenArgs(
        sizeof(native.OpenArgs), 64, 160, 4, 64, 4, 16, 40, 2, 0, 2, 0, 128, 8192, 4096, 0, 4096,
        ctypes.addressof(c_char.from_buffer(weights)), nodes,
    )  # fmt: skip
    change(args, nodes, first[0])
    handle, error = c_void_p(123), ctypes.create_string_buffer(b"#" * 500)
    code = library.flare_open(byref(args), byref(handle), error, error_bytes)
    assert error.raw[error_bytes:] == b"#" * (500 - error_bytes) + b"\0", "it wrote behind the error's end"
    if code == 0:
        assert handle
        library.flare_close(handle)
    else:
        assert not handle
    return code, error.value.decode()


def put(name: str, value: Any) -> Callable[[Any, Any, Any], None]:
    return lambda args, nodes, arg: setattr(args, name, value)


def put_node(number: int, name: str, value: Any) -> Callable[[Any, Any, Any], None]:
    return lambda args, nodes, arg: setattr(nodes[number], name, value)


def put_arg(**fields: int) -> Callable[[Any, Any, Any], None]:
    return lambda args, nodes, arg: [setattr(arg, name, value) for name, value in fields.items()] and None


def put_out(**fields: int) -> Callable[[Any, Any, Any], None]:
    """Changes the argument that the first node writes to."""
    return lambda args, nodes, arg: [setattr(nodes[0].args[1], name, value) for name, value in fields.items()] and None


def put_optional(**fields: int) -> Callable[[Any, Any, Any], None]:
    """Changes the first node's first argument, and its kernel to one that does not need it."""

    def change(args: Any, nodes: Any, arg: Any) -> None:
        nodes[0].kernel = b"Present"
        put_arg(**fields)(args, nodes, arg)

    return change


HUGE = 2**64 - 64


def interpreted(name: str, value: Any) -> Callable[[Any, Any, Any], None]:
    """Makes the first node one that is interpreted, and changes it."""

    def change(a: Any, nodes: Any, args: Any) -> None:
        a.interpret = native.Interpret(lambda node, arguments, kv: None)
        nodes[0].kernel = b"interpret"
        setattr(nodes[0], name, value)

    return change


REFUSED = [
    (put("struct_size", 96), "arguments of 96 bytes, the library takes 112"),
    (put("vocabulary", 0), "vocabulary 0"),
    (put("max_context", -1), "max_context -1"),
    (put("slots", 0), "slots 0"),
    (put("max_step_tokens", 0), "max_step_tokens 0"),
    (put("max_rows", 65), "max_rows 65"),
    (put("page_tokens", 24), "page_tokens 24"),
    (put("page_tokens", 0), "page_tokens 0"),
    (put("kv_pages", 0), "kv_pages 0"),
    (put("threads", 0), "threads 0"),
    (put("threads", 1025), "threads 1025"),
    (put("huge_pages", 2), "huge_pages 2"),
    (put("reserved", 1), "reserved 1"),
    (put("node_count", 0), "node_count 0"),
    (put("nodes", None), "nodes is null"),
    (put("kv_page_bytes", 0), "kv_page_bytes 0"),
    (put("kv_page_bytes", 100), "kv_page_bytes 100"),
    (put("kv_page_bytes", 2**60), "kv_page_bytes 1152921504606846976"),
    (put("logits_offset", 32), "logits_offset 32"),
    (put("logits_offset", 3136), "logits_offset 3136"),
    (put("logits_offset", HUGE), "logits_offset 18446744073709551552"),
    (put("io_bytes", 1023), "io_bytes 1023"),
    (put("weights", None), "weights is null"),
    (put("weights", 65), "weights: their address"),
    (put_node(0, "kernel", b"Recall<17>"), "node 0: the library has no kernel Recall<17>"),
    (put_node(0, "kernel", b"K" * 100_000), "node 0: the library has no kernel K"),
    (put_node(1, "kernel", None), "node 1: its kernel's name is null"),
    (put_node(0, "kernel", b"interpret"), "node 0: the library has no kernel interpret"),
    (interpreted("nargs", -1), "node 0 (interpret): -1 arguments, the kernel takes 0"),
    (interpreted("args", None), "node 0 (interpret): 0 arguments, the kernel takes 2"),
    (put_node(0, "nargs", 1), "node 0 (Recall<16>): 1 arguments, the kernel takes 2"),
    (put_node(0, "nargs", -1), "node 0 (Recall<16>): -1 arguments"),
    (put_node(1, "args", None), "node 1 (Tokens): 0 arguments"),
    (put_node(0, "phase", -1), "node 0 (Recall<16>): phase -1"),
    (put_node(0, "phase", 2), "node 1 (Tokens): phase 1"),
    (put_arg(segment=5), "no such segment"),
    (put_arg(segment=-1), "no such segment"),
    (put_arg(segment=0), "an absent argument"),
    (put_arg(reserved=1), "reserved"),
    (
        put_arg(offset=32),
        "node 0 (Recall<16>): argument 0 (segment 4, offset 32, bytes 64): offset is no multiple of 64",
    ),
    (put_arg(bytes=0), "no bytes"),
    (put_arg(bytes=65), "beyond its segment"),
    (put_arg(offset=128), "beyond its segment"),
    (put_arg(offset=HUGE, bytes=128), "beyond its segment"),
    (put_arg(bytes=2**64 - 1), "beyond its segment"),
    (put_arg(segment=1, offset=4032, bytes=65), "beyond its segment"),
    (put_arg(segment=2, offset=8192, bytes=1), "beyond its segment"),
    (put_arg(segment=3, offset=4096, bytes=1), "beyond its segment"),
    (put_arg(segment=0, offset=0, bytes=0), "bytes 0): the kernel cannot do without it"),
    (put_arg(segment=1, offset=0, bytes=64), "the kernel wants it in kv pages"),
    (put_arg(segment=2, offset=0, bytes=64), "the kernel wants it in kv pages"),
    (put_arg(bytes=63), "argument 0 has 63 bytes, 64 are needed for 64 tokens and 4 rows a step"),
    (put_out(segment=4, offset=0, bytes=128), "the kernel cannot have it in kv pages"),
    (put_out(segment=1, offset=0, bytes=256), "the kernel writes to it, weights are read only"),
    (put_out(segment=0, offset=0, bytes=0), "argument 1 (segment 0, offset 0, bytes 0): the kernel cannot do"),
    (put_out(bytes=255), "node 0 (Recall<16>): argument 1 has 255 bytes, 256 are needed"),
    (put("max_step_tokens", 65), "argument 1 has 256 bytes, 260 are needed for 65 tokens"),
    (put("page_tokens", 32), "node 0 (Recall<16>): made for page_tokens 16, the core has 32"),
]

ACCEPTED = [
    put("max_rows", 1),
    put("io_bytes", 1280),
    put("logits_offset", 3072),
    put("huge_pages", 1),
    put("threads", 64),
    put_node(1, "phase", 0),
    put_node(1, "phase", 2**31 - 1),
    put_arg(offset=64, bytes=64),
    put_arg(offset=0, bytes=128),
    put_out(segment=2, offset=0, bytes=8192),
    put("max_step_tokens", 63),
    put_optional(segment=0, offset=0, bytes=0),
    put_optional(segment=1, offset=4032, bytes=64),
    put_optional(segment=2, offset=0, bytes=8192),
]


@pytest.mark.parametrize("change, text", REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_open_refuses(change: Callable[[Any, Any, Any], None], text: str) -> None:
    code, error = raw_open(change)
    assert code == 1 and text in error and "\n" not in error


@pytest.mark.parametrize("change", ACCEPTED)
def test_open_accepts(change: Callable[[Any, Any, Any], None]) -> None:
    assert raw_open(change) == (0, "#" * 500)


@pytest.mark.parametrize("vocabulary", [63, 65])
def test_a_kernel_made_for_another_vocabulary_is_refused(vocabulary: int) -> None:
    """A table with fewer rows than there are tokens would be read beyond its end."""
    nodes = [node("Logits<64>", 0, CpuArg("weights", 0, 256), CpuArg("io", 0, 1280))]
    with pytest.raises(CoreError, match=rf"Logits<64>\): made for a vocabulary of 64, the core has {vocabulary}"):
        CpuReplay(program(nodes, vocabulary=vocabulary, io_bytes=1280), threads=1, kv_pages=40)


def argument(family: str, number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Changes an argument of the graph's first node whose kernel is of this family."""

    def change(content: dict[str, Any]) -> None:
        first = next(node for node in content["nodes"] if node["kernel"].startswith(family))
        first["args"][number].update(fields)

    return change


NOTHING = {"segment": "none", "offset": 0, "bytes": 0}
FORGED = [
    (argument("Linear<", 4, bytes=64), r"argument 4 has 64 bytes, \d+ are needed"),
    (argument("Linear<Rows", 4, bytes=64), "argument 4 has 64 bytes"),
    (argument("Embed<", 0, bytes=64), "argument 0 has 64 bytes"),
    (argument("Norm<", 1, bytes=64), "argument 1 has 64 bytes"),
    (argument("Attention<", 1, bytes=64), "argument 1 has 64 bytes"),
    (argument("Attention<", 3, bytes=64), "argument 3 has 64 bytes"),
    (argument("Attention<", 0, **NOTHING), "argument 0 .*cannot do without it"),
    (argument("Attention<", 1, segment="arena", offset=0), "argument 1 .*wants it in kv pages"),
    (argument("Norm<", 0, segment="kv", offset=0, bytes=64), "argument 0 .*cannot have it in kv pages"),
    (argument("Norm<", 2, segment="weights", offset=0), "argument 2 .*weights are read only"),
]


@pytest.mark.parametrize("change, text", FORGED, ids=[text for _, text in FORGED])
def test_a_graph_that_lies_about_its_memory_is_refused(
    tiny_core: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    """Right hashes over a graph that would make kernels write or read out of bounds."""
    core = Path(shutil.copytree(tiny_core, tmp_path / "core"))
    forge(core, "graphs/step.msgpack", graph(change))
    with pytest.raises(CoreError, match=text):
        open_replay(open_core(core), threads=1, kv_pages=20).close()


@pytest.mark.parametrize("page_tokens", [32, 128])
def test_a_manifest_with_other_pages_than_the_kernels_is_refused(
    tiny_core: Path, tmp_path: Path, page_tokens: int
) -> None:
    core = Path(shutil.copytree(tiny_core, tmp_path / "core"))
    forge_manifest(core, lambda m: m["limits"].update(page_tokens=page_tokens))
    with pytest.raises(CoreError, match=f"made for page_tokens 16, the core has {page_tokens}"):
        open_replay(open_core(core), threads=1, kv_pages=20).close()


def test_memory_that_the_system_lacks_is_its_own_result() -> None:
    code, error = raw_open(put("arena_bytes", 2**60))
    assert code == 3 and "1152921504606846976 bytes of memory for the arena" in error


def test_an_error_never_overflows_its_buffer() -> None:
    for size in (0, 1, 2, 60):
        code, _ = raw_open(put_node(0, "kernel", b"K" * 1000), error_bytes=size)
        assert code == 1


def test_library_info_is_one_line_of_json() -> None:
    library = native.load_library(fake_library())
    text = library.flare_library_info()
    assert b"\n" not in text
    info = json.loads(text)
    assert info["abi"] == library.flare_abi_version() == 4
    assert info["isa"] == fake_library().stem
    assert {"Tokens", "Recall<16>", "Logits<49152>"} <= set(info["kernels"])


def test_calls_without_a_core_are_refused() -> None:
    library, error = native.load_library(fake_library()), ctypes.create_string_buffer(200)
    calls = [
        (library.flare_begin, native.StepArgs),
        (library.flare_sample, native.SampleArgs),
        (library.flare_score, native.ScoreArgs),
    ]
    for call, kind in calls:
        assert call(None, byref(kind(sizeof(kind))), error, 200) == 1 and error.value == b"the core is not open"
    assert library.flare_finish(None, error, 200) == 1 and error.value == b"the core is not open"
    assert library.flare_logits(None) is None
    library.flare_close(None)


def test_arguments_of_another_version_are_refused() -> None:
    with CpuReplay(program([node("Tokens", 0, OUT)]), threads=1, kv_pages=40) as replay:
        fill(replay, [1])
        replay._step.struct_size -= 8
        with pytest.raises(ValueError, match="arguments of 48 bytes, the library takes 56"):
            replay.step(1, 1)
        replay._sample.params_size += 8
        with pytest.raises(ValueError, match="params of 96 bytes, the library takes 88"):
            replay.sample(0)
        replay._sample.params_size -= 8
        replay._sample.logprobs_size = replay._score.logprobs_size = 680
        for call in (lambda: replay.sample(0), lambda: replay.score(0, 0)):
            with pytest.raises(ValueError, match="logprobs of 680 bytes, the library takes 688"):
                call()
        replay._sample.struct_size = replay._score.struct_size = 32
        for call in (lambda: replay.sample(0), lambda: replay.score(0, 0)):
            with pytest.raises(ValueError, match="arguments of 32 bytes, the library takes 40"):
                call()
