"""What is read of a cubin against what its compilers and NVIDIA's own reader say of it; damaged ones are refused."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flare.core.cubin import MAX_INFO_BYTES, Cubin, read_cubin
from flare.errors import CoreError
from tests.support.cuda_cubins import ARCHITECTURES, KERNELS, assemble, before_the_wait, cubin, metadata, tool

SIZES = {"scale": [8, 8, 4, 4, 8, 8], "dot": [8, 8, 8, 8, 8]}
"""Bytes of the run-time parameters and of the two scratch pointers that Triton adds."""


def printed(file: Path, what: str) -> str:
    """What NVIDIA's cuobjdump prints."""
    return subprocess.run([tool("cuobjdump"), what, str(file)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_triton_s_kernels(cubins: Path, name: str, architecture: str) -> None:
    found = read_cubin(cubin(cubins, name, architecture), "x")
    facts = metadata(cubins, name, architecture)
    assert found.architecture == architecture and list(found.kernels) == [facts["name"]]
    kernel = found.kernels[facts["name"]]
    assert kernel.block == (32 * facts["num_warps"], 1, 1) and kernel.cluster is None and kernel.shared == 0
    assert [size for _, size in kernel.parameters] == SIZES[name]

    file = cubins / f"{name}-{architecture}.cubin"
    text = printed(file, "-elf")
    read = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", text)
    ordered = sorted(tuple(int(number, 16) for number in entry) for entry in read)
    assert {(i, *parameter) for i, parameter in enumerate(kernel.parameters)} == set(ordered)
    assert f"sm={architecture.removeprefix('sm_')}," in text
    assert kernel.waits == (name == "scale" and "8" not in architecture)
    assert int(re.search(r"REG:(\d+)", printed(file, "-res-usage"))[1]) == kernel.registers


@pytest.mark.parametrize("assembler", ["ptxas", "ptxas-blackwell"])
@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120a"]
)
def test_both_layouts_of_flags_and_static_shared_memory(tmp_path: Path, assembler: str, architecture: str) -> None:
    """The buffer has 100 bytes; from compute capability 9.0 on, cuobjdump counts the system's 1024 with it."""
    found = read_cubin(assemble(tmp_path, assembler, architecture), "x")
    kernel = found.kernels["plain"]
    assert found.architecture == architecture
    assert kernel.parameters == ((0, 8), (8, 4), (16, 8), (24, 8))
    assert (kernel.block, kernel.cluster) == ((64, 1, 1), None)
    assert kernel.shared == 100
    shared = int(re.search(r"SHARED:(\d+)", printed(tmp_path / "plain.cubin", "-res-usage"))[1])
    assert shared == 100 + 1024 * (int(architecture.strip("sm_a")) >= 90)


@pytest.mark.parametrize("assembler", ["ptxas", "ptxas-blackwell"])
def test_a_cluster(tmp_path: Path, assembler: str) -> None:
    data = assemble(tmp_path, assembler, "sm_90a", ".explicitcluster .reqnctapercluster 2, 1, 1")
    assert read_cubin(data, "x").kernels["plain"].cluster == (2, 1, 1)


@pytest.mark.parametrize("assembler", ["ptxas", "ptxas-blackwell"])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_103a"])
def test_a_kernel_that_waits(tmp_path: Path, assembler: str, architecture: str) -> None:
    """As NVIDIA's disassembler has it; to ask for the next kernel is no wait."""
    for action, waits in (("wait", True), ("launch_dependents", False)):
        data = assemble(tmp_path, assembler, architecture, first=f"griddepcontrol.{action};")
        assert (before_the_wait(tmp_path / "plain.cubin") is not None) is waits
        assert read_cubin(data, "x").kernels["plain"].waits is waits


def refused(data: bytes) -> str:
    with pytest.raises(CoreError) as caught:
        read_cubin(data, "kernels/k.cubin")
    message = str(caught.value)
    assert message.startswith("kernels/k.cubin: not a good cubin: ") and message.endswith("; export the core again")
    assert "\n" not in message and len(message) < 400
    return message


def section(data: bytes, name: str) -> tuple[int, list[int]]:
    """Where a section's entry lies, and its fields."""
    start, (count, names) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 60)
    strings = struct.unpack_from("<IIQQ", data, start + 64 * names + 8)[3]
    for index in range(count):
        at = start + 64 * index
        fields = list(struct.unpack_from("<IIQQQQIIQQ", data, at))
        begin = strings + fields[0]
        if data[begin : data.index(b"\0", begin)] == name.encode():
            return at, fields
    raise AssertionError(name)


def with_field(data: bytes, name: str, field: int, value: int) -> bytes:
    """Changes a field of a section: 4 is its offset, 5 its size, 6 its link."""
    at, fields = section(data, name)
    fields[field] = value
    return data[:at] + struct.pack("<IIQQQQIIQQ", *fields) + data[at + 64 :]


def patched(data: bytes, offset: int, form: str, *values: int) -> bytes:
    new = struct.pack(form, *values)
    return data[:offset] + new + data[offset + len(new) :]


@pytest.fixture
def good(cubins: Path) -> bytes:
    return cubin(cubins, "scale", "sm_90a")


def test_what_is_no_cubin(good: bytes) -> None:
    assert "the header would end at byte 64 of 0" in refused(b"")
    assert "no 64-bit ELF file" in refused(b"\x7fELF" + bytes(100))
    assert "no 64-bit ELF file" in refused(patched(good, 18, "<H", 62))  # x86-64
    assert "ABI version 9, this program reads 7, 8" in refused(patched(good, 8, "B", 9))


def test_every_number_is_held_against_the_file(good: bytes) -> None:
    assert "the table of sections would end at byte" in refused(patched(good, 40, "<Q", 2**64 - 1))
    assert "the table of segments would end at byte" in refused(patched(good, 32, "<Q", 2**64 - 1))
    assert "sections of 40 bytes" in refused(patched(good, 58, "<H", 40))
    assert "with names in section 500" in refused(patched(good, 62, "<H", 500))
    assert "65535 sections" in refused(patched(good, 60, "<H", 65535))
    assert "section '.nv.info.scale' would end at byte" in refused(with_field(good, ".nv.info.scale", 4, len(good)))
    assert "section '.nv.info.scale' would end at byte" in refused(with_field(good, ".nv.info.scale", 5, 2**63))
    assert ".symtab has its names in section 9999" in refused(with_field(good, ".symtab", 6, 9999))
    assert "no name at byte" in refused(with_field(good, ".nv.info.scale", 0, 2**31))
    assert "two sections are named '.nv.info'" in refused(
        with_field(good, ".symtab", 0, section(good, ".nv.info")[1][0])
    )
    assert "kernel 'scale' has no code" in refused(with_field(good, ".text.scale", 0, 0))
    begin = section(good, ".nv.info")[1][4]
    assert "a value of 0 bytes instead of 4" in refused(patched(good, begin + 4, "<I", 2**31))  # the symbol's index
    assert "attribute 0x2f of .nv.info would end at byte" in refused(patched(good, begin + 2, "<H", 60000))


def test_parameters_that_contradict_themselves(good: bytes) -> None:
    _, fields = section(good, ".nv.info.scale")
    data = good[fields[4] : fields[4] + fields[5]]
    first = fields[4] + data.index(b"\x04\x17\x0c\x00") + 4
    assert "is doubled or too long" in refused(patched(good, first + 4, "<H", 0))
    assert "are not numbered 0 to 5" in refused(patched(good, first + 4, "<H", 40))
    assert "at byte 60000 is doubled or too long" in refused(patched(good, first + 6, "<H", 60000))


def read_or_refused(data: bytes) -> Cubin | None:
    try:
        return read_cubin(data, "k")
    except CoreError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return None


def test_truncated_anywhere(good: bytes) -> None:
    for end in range(0, len(good), 7):
        assert read_or_refused(good[:end]) is None


@given(edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=20))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_changed_at_random(good: bytes, edits: list[tuple[int, int]]) -> None:
    data = bytearray(good)
    for place, value in edits:
        data[place % len(data)] = value
    read_or_refused(bytes(data))


def test_sections_that_lead_to_one_place_are_counted_each_time(good: bytes) -> None:
    """Thousands of sections over the same mebibyte of attributes would be 2^30 of them."""
    half = b"\x03\x1b\xff\x00" * (MAX_INFO_BYTES // 8)
    data = good + half
    for name in (".nv.info.scale", ".nv.compat"):
        data = with_field(with_field(data, name, 4, len(good)), name, 5, len(half))
    assert f"more than {MAX_INFO_BYTES} bytes of attributes" in refused(data)
