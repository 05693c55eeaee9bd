"""The C border of a kernel library: what it refuses, what it accepts, and that nothing leaks through it."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import threading
from collections.abc import Callable
from ctypes import byref, c_char, c_int32, c_void_p, sizeof
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flare.replay.cpu_interface as native
from flare.core.directory import open_core
from flare.errors import CoreError
from flare.replay.cpu import ISA_FLAGS, CpuArg, CpuReplay, machine_flags
from flare.replay.program import open_replay
from tests.support.fake_library import aligned, fake_library, fill, io, node, program
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

REFUSED = [
    (put("struct_size", 96), "arguments of 96 bytes, the library takes 104"),
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
    assert info["abi"] == library.flare_abi_version() == 1
    assert info["isa"] == fake_library().stem
    assert {"Tokens", "Recall<16>", "Logits<49152>"} <= set(info["kernels"])


def test_calls_without_a_core_are_refused() -> None:
    library, error = native.load_library(fake_library()), ctypes.create_string_buffer(200)
    step, sample = (
        native.StepArgs(sizeof(native.StepArgs)),
        native.SampleArgs(sizeof(native.SampleArgs), sizeof(native.SampleParams)),
    )
    for call, args in ((library.flare_step, step), (library.flare_sample, sample)):
        assert call(None, byref(args), error, 200) == 1 and error.value == b"the core is not open"
    assert library.flare_logits(None) is None
    library.flare_close(None)


def test_arguments_of_another_version_are_refused() -> None:
    with CpuReplay(program([node("Tokens", 0, OUT)]), threads=1, kv_pages=40) as replay:
        fill(replay, [1])
        replay._step.struct_size -= 8
        with pytest.raises(ValueError, match="arguments of 48 bytes, the library takes 56"):
            replay.step(1, 1)
        replay._sample.params_size += 8
        with pytest.raises(ValueError, match="params of 72 bytes, the library takes 64"):
            replay.sample(0)


# Steps: a reference says what is in range, and what the core must have computed.


@st.composite
def good_steps(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """(slot, tokens) of each run, for the limits of `program`: 64 tokens a step, 160 positions."""
    slots = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    return [(slot, draw(st.lists(st.integers(0, 63), min_size=1, max_size=16))) for slot in slots]


class Session:
    """A core that remembers tokens in its pages, beside plain lists that do too."""

    def __init__(self, threads: int) -> None:
        nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
        self.replay = CpuReplay(program(nodes), threads=threads, kv_pages=40)
        self.history: list[list[int]] = [[] for _ in range(4)]
        stride = self.replay.limits.page_stride
        assert stride == 10
        self.replay.page_table[:] = [(i * 7) % 40 for i in range(40)]  # each page once

    def write(self, runs: list[tuple[int, list[int]]]) -> int:
        replay, n = self.replay, 0
        for slot, tokens in runs:
            if len(self.history[slot]) + len(tokens) > 160:
                self.history[slot] = []
            for i, token in enumerate(tokens):
                replay.tokens[n], replay.positions[n], replay.slots[n] = token, len(self.history[slot]) + i, slot
                n += 1
        return n

    def expected(self, runs: list[tuple[int, list[int]]]) -> list[int]:
        sums = []
        for slot, tokens in runs:
            for token in tokens:
                self.history[slot].append(token)
                sums.append(sum(self.history[slot]))
        return sums


@settings(max_examples=25)
@given(steps=st.lists(good_steps(), min_size=1, max_size=12), threads=st.sampled_from([1, 2]))
def test_steps_in_range_are_accepted_and_right(steps: list[list[tuple[int, list[int]]]], threads: int) -> None:
    session = Session(threads)
    with session.replay as replay:
        for runs in steps:
            n = session.write(runs)
            replay.rows[0] = n - 1
            replay.step(n, 1)
            assert list(io(replay, c_int32, n)) == session.expected(runs)


EDGE = st.sampled_from([-(2**31), -1, 2**31 - 1])

BREAKS: dict[str, tuple[Callable[[CpuReplay, int, int], None], str]] = {
    "token": (lambda r, i, v: r.tokens.__setitem__(i, v if v < 0 else 64), "token"),
    "position": (lambda r, i, v: r.positions.__setitem__(i, v if v < 0 else 160), "position"),
    "jump": (lambda r, i, v: r.positions.__setitem__(max(i, 1), r.positions[max(i, 1)] - 1), "position"),
    "slot": (lambda r, i, v: r.slots.__setitem__(i, v if v < 0 else 4), "slot"),
    "page": (lambda r, i, v: r.page_table.__setitem__(r.slots[i] * 10, v if v < 0 else 40), "page"),
    "row": (lambda r, i, v: r.rows.__setitem__(0, v if v < 0 else 64), "row"),
    "stride": (lambda r, i, v: setattr(r._step, "page_stride", min(v, 0)), "page_stride"),
    "null": (lambda r, i, v: setattr(r._step, "page_table", None), "null"),
}


@settings(max_examples=100)
@given(runs=good_steps(), data=st.data(), name=st.sampled_from(sorted(BREAKS)), value=EDGE)
def test_one_value_out_of_range_is_refused_before_anything_runs(
    runs: list[tuple[int, list[int]]], data: st.DataObject, name: str, value: int
) -> None:
    session = Session(1)
    runs[0] = (runs[0][0], [*runs[0][1], 5])  # a run of two tokens at least, so that a jump can be made
    with session.replay as replay:
        n = session.write(runs)
        replay.rows[0] = 0
        index = 1 if name == "jump" else data.draw(st.integers(0, n - 1))
        change, text = BREAKS[name]
        change(replay, index, value)
        out = io(replay, c_int32, 64)
        out[:] = [77] * 64
        with pytest.raises(ValueError, match=text):
            replay.step(n, 1)
        assert list(out) == [77] * 64


def test_counts_out_of_range_are_refused() -> None:
    session = Session(1)
    with session.replay as replay:
        n = session.write([(0, [1, 2, 3])])
        for tokens, rows in [(0, 0), (-1, 0), (65, 0), (2**31 - 1, 0), (n, -1), (n, n + 1), (n, 2**31 - 1)]:
            with pytest.raises(ValueError, match="tokens|rows"):
                replay.step(tokens, rows)
        replay.step(n, n)


def test_a_slot_in_two_runs_is_refused() -> None:
    session = Session(1)
    with session.replay as replay:
        for i, (slot, position) in enumerate([(0, 0), (1, 0), (0, 1)]):
            replay.tokens[i], replay.positions[i], replay.slots[i] = 1, position, slot
        with pytest.raises(ValueError, match=r"slot\[2\] 0: the slot's tokens are not contiguous"):
            replay.step(3, 0)
        replay.step(2, 0)  # and a refused step leaves no trace
        replay.step(2, 0)


def test_every_page_up_to_the_position_must_exist_and_none_behind_it() -> None:
    session = Session(1)
    with session.replay as replay:
        replay.tokens[0], replay.positions[0], replay.slots[0] = 1, 47, 2
        for page in (3, 9):
            replay.page_table[20 + page] = 40
        replay.step(1, 0)
        replay.page_table[22] = 40
        with pytest.raises(ValueError, match=r"page_table: slot 2 has page 40: must be in \[0, 40\)"):
            replay.step(1, 0)
        replay.positions[0] = 31
        replay.step(1, 0)
        replay._step.page_stride = 1
        with pytest.raises(ValueError, match="page_stride 1: slot 2 at position 31 needs 2 pages"):
            replay.step(1, 0)


def test_an_absent_argument_is_a_null_pointer() -> None:
    for there, arg in ((0, CpuArg("none")), (1, CpuArg("weights", 0, 64))):
        with CpuReplay(program([node("Present", 0, arg, OUT)]), threads=1, kv_pages=40) as replay:
            fill(replay, [0])
            replay.step(1, 0)
            assert io(replay, c_int32, 1)[0] == there


def test_weights_are_read_where_they_lie_or_from_their_copy_in_huge_pages() -> None:
    nodes = [node("Logits<64>", 0, CpuArg("weights", 256, 256), CpuArg("io", 0, 1024))]
    for huge_pages in (False, True):
        plan = program(nodes, weights_offset=64, weights_bytes=65536)
        with CpuReplay(plan, threads=2, kv_pages=40, huge_pages=huge_pages) as replay:
            fill(replay, [3])
            replay.step(1, 1)
            first = (64 + 256) // 4
            assert list(replay.logits(0)) == [first + i + 3 * (i == 3) for i in range(64)]


def test_a_second_call_on_a_core_is_refused_while_one_runs() -> None:
    with CpuReplay(program([node("Meet", 0, OUT, CpuArg("io", 2048, 64))]), threads=1, kv_pages=40) as replay:
        met = io(replay, c_int32, 16, 2048)
        fill(replay, [2])
        runner = threading.Thread(target=replay.step, args=(1, 0))
        runner.start()
        while met[0] == 0:
            pass
        with pytest.raises(ValueError, match="another call runs on this core"):
            replay.step(1, 0)
        with pytest.raises(ValueError, match="another call runs on this core"):
            replay.sample(0)
        met[0] = 2
        runner.join()
        assert met[1] == 0
        replay.step(1, 0)


def test_cores_of_one_and_of_several_libraries_live_side_by_side(runnable: list[str]) -> None:
    """Four cores, each with history of its own, stepped in turn and at the same time."""
    sessions = [Session(threads) for threads in (1, 2)]
    for isa in runnable:
        session = Session(1)
        session.replay.close()
        nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
        session.replay = CpuReplay(program(nodes, library=fake_library(isa)), threads=2, kv_pages=40)
        session.replay.page_table[:] = [(i * 7) % 40 for i in range(40)]
        sessions.append(session)
    failures: list[object] = []

    def run(number: int, session: Session, rounds: int) -> None:
        for i in range(rounds):
            runs = [(slot, [(number * 13 + i * 5 + slot) % 64] * (slot + 1)) for slot in range(4)]
            n = session.write(runs)
            session.replay.step(n, 0)
            expected = session.expected(runs)
            if list(io(session.replay, c_int32, n)) != expected:
                failures.append((number, i))

    for i, session in enumerate(sessions):
        run(i, session, 3)
    threads = [threading.Thread(target=run, args=(i, session, 30)) for i, session in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.replay.close()
    assert not failures


@pytest.fixture
def runnable() -> list[str]:
    return [isa for isa, flags in ISA_FLAGS.items() if flags <= machine_flags()]


def memory_bytes() -> tuple[int, int]:
    """Mapped and resident bytes of this process."""
    mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(mapped) * 4096, int(resident) * 4096


def test_opening_and_closing_leaks_nothing() -> None:
    """200 good opens and 200 failing ones: no memory, mapping, thread or file stays."""
    nodes = [node("Remember<16>", 0, PAGE), node("Recall<16>", 1, PAGE, OUT)]
    good = program(nodes, arena_bytes=1 << 20)
    bad = program([*nodes, node("Tokens", 1, OUT), node("Missing", 2, OUT)], arena_bytes=1 << 20)

    def round_trip() -> None:
        with CpuReplay(good, threads=3, kv_pages=4000, huge_pages=True) as replay:
            fill(replay, [1, 2, 3])
            replay.step(3, 0)
        with pytest.raises(CoreError, match="no kernel Missing"):
            CpuReplay(bad, threads=3, kv_pages=4000, huge_pages=True)

    def census() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("\n")
        return maps, len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(20):
        round_trip()
    before, memory = census(), memory_bytes()
    for _ in range(200):
        round_trip()
    after = census()
    assert after[1:] == before[1:]
    assert after[0] <= before[0] + 5
    for now, then in zip(memory_bytes(), memory, strict=True):
        assert now < then + (8 << 20)


def test_a_failed_step_keeps_the_logits_of_the_last() -> None:
    nodes = [node("Logits<64>", 0, CpuArg("weights", 0, 256), CpuArg("io", 0, 1024))]
    with CpuReplay(program(nodes), threads=1, kv_pages=40) as replay:
        with pytest.raises(ValueError, match="the last step left 0 rows"):
            replay.sample(1)
        fill(replay, [3])
        replay.step(1, 1)
        replay.tokens[0] = 64
        with pytest.raises(ValueError, match="token"):
            replay.step(1, 1)
        replay.sample(1)
        assert replay.sampled[0] == 63
        with pytest.raises(ValueError, match="the last step left 1 rows"):
            replay.sample(2)
