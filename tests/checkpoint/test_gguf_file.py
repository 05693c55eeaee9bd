"""The GGUF container against the gguf package, and against files that lie about their counts, lengths and offsets."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flare.errors import InputError
from ignition.checkpoint.gguf_file import read_gguf
from tests.support.memory import peak_below

STRING, ARRAY, U32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor table; `shape` in the file's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(
    pairs: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    **counts: int,
) -> bytes:
    """A whole file; `counts` may lie about n_tensors and n_pairs."""
    head = magic + struct.pack(
        "<IQQ", version, counts.get("n_tensors", len(tensors)), counts.get("n_pairs", len(pairs))
    )
    body = head + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + data


def parse(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_and_tensors_equal_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    scalars = {
        "u8": (writer.add_uint8, 200),
        "i8": (writer.add_int8, -3),
        "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, 1 << 31),
        "i32": (writer.add_int32, -(1 << 31)),
        "f32": (writer.add_float32, 0.5),
        "u64": (writer.add_uint64, 1 << 63),
        "i64": (writer.add_int64, -(1 << 62)),
        "f64": (writer.add_float64, 0.1),
        "bool": (writer.add_bool, True),
        "text": (writer.add_string, "größe\n"),
    }
    for key, (add, value) in scalars.items():
        add(key, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("flags", [True, False])
    writer.add_array("texts", ["a", "", "日本"])
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    second = np.arange(64, dtype=np.float16).reshape(2, 32)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    for key, (_, value) in scalars.items():
        assert file.metadata[key] == value and type(file.metadata[key]) is type(value), key
    assert file.metadata["numbers"].tolist() == [1, 2, 3]
    assert file.metadata["floats"].tolist() == [0.5, 0.25]
    assert file.metadata["flags"].tolist() == [True, False]
    assert file.metadata["texts"] == ["a", "", "日本"]
    assert file.tensors["first"].shape == (3, 4) and bytes(file.tensors["first"].data) == first.tobytes()
    assert file.tensors["second"].encoding == "f16" and bytes(file.tensors["second"].data) == second.tobytes()


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    content = build([pair("general.alignment", U32, struct.pack("<I", 64))], [tensor()], version=2)
    content += bytes(-len(content) % 64) + b"0123456789abcdef"
    assert bytes(parse(tmp_path / "x.gguf", content).tensors["w"].data) == b"0123456789abcdef"


def test_a_file_without_tensors_may_end_before_the_alignment(tmp_path: Path) -> None:
    content = build([pair("a", 0, b"\1")])
    assert parse(tmp_path / "x.gguf", content[:40]).metadata["a"] == 1


HUGE = (1 << 64) - 1
F16 = bytes(16)
LIES = {
    "empty": (b"", "the file is empty"),
    "other magic": (build(magic=b"GGML"), r"starts with b'GGML', not with b'GGUF'"),
    "version 1": (build(version=1), "GGUF version 1, readable are 2 and 3"),
    "big-endian": (build(version=3 << 24), "written on a big-endian machine"),
    "many tensors": (build(n_tensors=HUGE), f"tensor count {HUGE} does not fit into the"),
    "many pairs": (build(n_pairs=1 << 40), "metadata count 1099511627776 does not fit"),
    "one pair too many": (build([pair("a", 0, b"\1")], n_pairs=2), "metadata key 1: 0 bytes long"),
    "key length": (
        build([struct.pack("<Q", HUGE) + bytes(64)]),
        f"metadata key 0: {HUGE} bytes long, the limits are 1 and 1024",
    ),
    "key not UTF-8": (build([pair(b"\xff\xfe", 0, bytes(32))]), "metadata key 0 is not UTF-8"),
    "key with a line break": (build([pair("a\nb", 0, bytes(32))]), "cannot be printed"),
    "key twice": (build([pair("a", 0, b"\1"), pair("a", 0, b"\1")]), "metadata key a occurs twice"),
    "value type": (build([pair("a", 13, bytes(32))]), "a: value type 13 is unknown"),
    "text length": (
        build([pair("a", STRING, struct.pack("<Q", 1 << 50) + b"x" * 32)]),
        "a takes 1125899906842624 bytes",
    ),
    "text not UTF-8": (build([pair("a", STRING, text(b"\xc3\x28"))]), "a is not UTF-8"),
    "array length": (
        build([pair("a", ARRAY, struct.pack("<IQ", U32, HUGE) + bytes(32))]),
        f"a: length {HUGE} does not fit",
    ),
    "array of texts": (
        build([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 40) + bytes(32))]),
        "a: length 1099511627776",
    ),
    "array text length": (
        build([pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 40) + bytes(32))]),
        r"a\[0\] leaves the file",
    ),
    "array text not UTF-8": (
        build([pair("a", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]),
        r"a\[0\] is not UTF-8",
    ),
    "array of arrays": (build([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]), "an array of arrays"),
    "array type": (build([pair("a", ARRAY, struct.pack("<IQ", 99, 1) + bytes(64))]), "value type 99 is unknown"),
    "alignment zero": (build([pair("general.alignment", U32, bytes(4))]), "general.alignment 0 is not a power of two"),
    "alignment odd": (build([pair("general.alignment", U32, struct.pack("<I", 33))]), "general.alignment 33"),
    "alignment text": (build([pair("general.alignment", STRING, text("32"))]), "general.alignment 32 is not"),
    "alignment huge": (
        build([pair("general.alignment", U32, struct.pack("<I", 1 << 30))]),
        "general.alignment 1073741824",
    ),
    "tensor name length": (build([], [struct.pack("<Q", 1 << 20) + bytes(64)]), "name of tensor 0: 1048576 bytes long"),
    "tensor twice": (build([], [tensor(), tensor()], F16), "tensor w occurs twice"),
    "no dimensions": (build([], [tensor(shape=()) + bytes(32)], F16), "tensor w: 0 dimensions, the limit is 4"),
    "five dimensions": (build([], [tensor(shape=(1,) * 5)], F16), "tensor w: 5 dimensions"),
    "dimensions": (build([], [text("w") + struct.pack("<I", 1 << 31) + bytes(64)]), "tensor w: 2147483648 dimensions"),
    "no values": (build([], [tensor(shape=(4, 0))], F16), r"tensor w: shape \[0, 4\] holds no values"),
    "shape overflows": (build([], [tensor(shape=(1 << 62, 1 << 62))], F16), "leave the file"),
    "type number": (build([], [tensor(kind=77)], F16), "tensor w: stored as type 77, readable are f32"),
    "type not read": (build([], [tensor(shape=(256,), kind=16)], F16), "tensor w: stored as iq2_xxs"),
    "part of a block": (
        build([], [tensor(shape=(33,), kind=8)], bytes(99)),
        "rows of 33 are not whole q8_0 blocks of 32",
    ),
    "offset": (build([], [tensor(offset=1 << 62)], F16), "tensor w: bytes 4611686018427387904 to"),
    "offset not aligned": (build([], [tensor(offset=4)], bytes(64)), "offset 4 is not a multiple of the alignment 32"),
    "overlap": (build([], [tensor(), tensor("v")], bytes(64)), "tensor [vw]: offset 0 overlaps [vw], which ends at 16"),
    "data truncated": (build([], [tensor()], bytes(15)), "bytes 0 to 16 leave the file, which has 15 bytes of data"),
    "no data at all": (build([], [tensor("name")])[:-4], "data would start at"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lie_is_one_line_that_names_it(tmp_path: Path, lie: str) -> None:
    content, words = LIES[lie]
    with peak_below(1_000_000), pytest.raises(InputError, match=words) as caught:
        parse(tmp_path / "x.gguf", content)
    assert "\n" not in str(caught.value) and str(tmp_path / "x.gguf") in str(caught.value)


GOOD = build(
    [
        pair("general.architecture", STRING, text("llama")),
        pair("n", U32, struct.pack("<I", 7)),
        pair("names", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("")),
        pair("numbers", ARRAY, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        pair("flag", 7, b"\1"),
    ],
    [tensor("v", (8,)), tensor("w", (32, 2), 8, 32)],
    bytes(range(100)),
)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    assert set(parse(tmp_path / "x.gguf", GOOD).tensors) == {"v", "w"}
    for length in range(len(GOOD)):
        with pytest.raises(InputError):
            parse(tmp_path / "x.gguf", GOOD[:length])


LENGTHS = [0, 1, 7, 8, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.lists(st.tuples(st.integers(0, len(GOOD) - 8), st.sampled_from(LENGTHS)), max_size=2),
)
def test_a_mutated_file_opens_or_is_refused(
    tmp_path: Path, changes: list[tuple[int, int]], lengths: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    for at, length in lengths:
        content[at : at + 8] = struct.pack("<Q", length)
    try:
        file = parse(tmp_path / "x.gguf", bytes(content))
    except InputError as error:
        assert "\n" not in str(error)
        return
    for stored in file.tensors.values():
        assert len(bytes(stored.data)) > 0
