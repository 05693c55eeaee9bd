"""What a cubin says of its kernels: the architecture, and of each kernel the parameters, block, cluster, registers and memory,
and whether it waits for the kernels before it.

A cubin is an ELF file. NVIDIA documents little of it: the layout of `e_flags` is in LLVM's `BinaryFormat/ELF.h`, and the
attributes of `.nv.info` have been found by comparing with what `cuobjdump -elf` prints of files of known content. Nothing here
trusts a number of the file before it has been compared with the file's length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from flare.errors import CoreError

MAX_SECTIONS = 1 << 12
MAX_INFO_BYTES = 1 << 20
"""Most bytes of all attributes together; those of a kernel are a few hundred."""

_MAX_NAME_BYTES = 4096
_MAX_PARAMETER_BYTES = 32764  # CUDA C++ Programming Guide, "Function Parameters"
_ELF_BYTES, _SECTION_BYTES, _SYMBOL_BYTES = 64, 64, 24
_EM_CUDA, _NOBITS = 190, 8

# EI_ABIVERSION of two layouts of e_flags, and their masks: the architecture's number, and whether it is an "a" one.
_FLAGS = {7: (0xFF, 0, 0x800), 8: (0xFF00, 8, 0x8)}

# Attributes, as cuobjdump names them behind EIATTR_: of a kernel, of all kernels, and of the file (EICOMPAT_ATTR_).
_REQNTID, _KPARAM_INFO, _CTA_PER_CLUSTER = 0x10, 0x17, 0x3D
_REGCOUNT = 0x2F
_CUDA_ACCELERATOR_TARGET = 0x09
_BYTE_VALUE, _SIZED_VALUE = 2, 4

# Code is instructions of 16 bytes, which two bytes tell apart. This one is nvdisasm's ACQBULK without a predicate, which both
# ptxas of Triton make of griddepcontrol.wait for every architecture that has it.
_INSTRUCTION, _INSTRUCTION_BYTES = "<H14x", 16
_WAIT = 0x782E

_RESERVED_BYTES = 1024  # of a block's shared memory, for the system, where there is a section of that name


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """A kernel of a cubin.

    parameters: (offset, bytes) of each, in order. block: threads in x, y, z that a launch must have, None if any will do.
    cluster: blocks in x, y, z, None without one. shared: bytes of static shared memory, without what the system reserves.
    registers: of a thread. waits: whether its code waits, somewhere, for kernels before programmatic edges.
    """

    parameters: tuple[tuple[int, int], ...]
    block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    shared: int
    registers: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Cubin:
    """`architecture` as compilers spell it, such as "sm_90a"; kernels by their symbols."""

    architecture: str
    kernels: dict[str, CubinKernel]


def read_cubin(data: bytes, name: str) -> Cubin:
    """Reads a cubin's bytes; `name` is for messages. Raises CoreError when it is no cubin, or not a whole one."""
    file = _Elf(data, name)
    registers = _registers(file)
    reserved = _RESERVED_BYTES if ".nv.shared.reserved.0" in file.sections else 0
    kernels = {}
    for section in file.sections:
        if not section.startswith(".nv.info."):
            continue
        symbol = section.removeprefix(".nv.info.")
        if f".text.{symbol}" not in file.sections:
            file.refuse(f"kernel {symbol[:80]!r} has no code")
        if symbol not in registers:
            file.refuse(f"kernel {symbol[:80]!r} has no register count")
        found: dict[int, tuple[int, int]] = {}
        block = cluster = None
        for attribute, value in file.attributes(section):
            if attribute == _REQNTID:
                block = file.unpack("<III", value)
            elif attribute == _CTA_PER_CLUSTER:
                cluster = file.unpack("<III", value)
            elif attribute == _KPARAM_INFO:
                _, ordinal, offset, packed = file.unpack("<IHHI", value)
                if ordinal in found or offset + (packed >> 18) > _MAX_PARAMETER_BYTES:
                    file.refuse(
                        f"parameter {ordinal} of kernel {symbol[:80]!r} at byte {offset} is doubled or too long"
                    )
                found[ordinal] = (offset, packed >> 18)
        if sorted(found) != list(range(len(found))):
            file.refuse(f"parameters of kernel {symbol[:80]!r} are not numbered 0 to {len(found) - 1}")
        shared = file.sections[f".nv.shared.{symbol}"].size if f".nv.shared.{symbol}" in file.sections else 0
        kernels[symbol] = CubinKernel(
            parameters=tuple(found[i] for i in range(len(found))),
            block=block,
            cluster=cluster,
            shared=max(0, shared - reserved),
            registers=registers[symbol],
            waits=_waits(file, symbol),
        )
    return Cubin(_architecture(file), kernels)


@dataclass(frozen=True, slots=True)
class _Section:
    offset: int
    size: int
    link: int
    stored: bool  # whether its bytes are in the file


class _Elf:
    """A cubin's sections by name, and what is read of them within bounds."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self._info_bytes = 0
        header = self._take(0, _ELF_BYTES, "the header")
        if header[:6] != b"\x7fELF\x02\x01" or self.unpack("<H", header[18:20])[0] != _EM_CUDA:
            self.refuse("no 64-bit ELF file for NVIDIA's devices")
        if header[8] not in _FLAGS:
            self.refuse(f"ABI version {header[8]}, this program reads {', '.join(map(str, _FLAGS))}")
        self.abi = header[8]
        (self.flags,) = self.unpack("<I", header[48:52])
        segments, start = self.unpack("<QQ", header[32:48])
        segment_bytes, segment_count, entry_bytes, count, names = self.unpack("<HHHHH", header[54:64])
        self._take(segments, segment_bytes * segment_count, "the table of segments")
        if entry_bytes != _SECTION_BYTES or not names < count <= MAX_SECTIONS:
            self.refuse(f"{count} sections of {entry_bytes} bytes with names in section {names}")
        table = self._take(start, count * _SECTION_BYTES, "the table of sections")
        entries = [
            (key, _Section(offset, size, link, kind != _NOBITS))
            for key, kind, _, _, offset, size, link, _, _, _ in struct.iter_unpack("<IIQQQQIIQQ", table)
        ]
        strings = self.content(entries[names][1])
        self.ordered = [section for _, section in entries]
        self.sections: dict[str, _Section] = {}
        for key, section in entries:
            found = self.text(strings, key)
            if section.stored:
                self._within(section.offset, section.size, f"section {found[:80]!r}")
            if found and found in self.sections:
                self.refuse(f"two sections are named {found[:80]!r}")
            self.sections[found] = section

    def refuse(self, what: str) -> NoReturn:
        raise CoreError(f"{self.name}: not a good cubin: {what}; export the core again")

    def _within(self, offset: int, size: int, what: str) -> None:
        if offset + size > len(self.data):
            self.refuse(f"{what} would end at byte {offset + size} of {len(self.data)}")

    def _take(self, offset: int, size: int, what: str) -> bytes:
        self._within(offset, size, what)
        return self.data[offset : offset + size]

    def content(self, section: _Section) -> bytes:
        """Returns a section's bytes, none of one that is not stored."""
        return self.data[section.offset : section.offset + section.size] if section.stored else b""

    def unpack(self, form: str, value: bytes) -> tuple[int, ...]:
        """Returns the numbers at the begin of a value."""
        size = struct.calcsize(form)
        if len(value) < size:
            self.refuse(f"a value of {len(value)} bytes instead of {size}")
        return struct.unpack_from(form, value)

    def text(self, strings: bytes, offset: int) -> str:
        """Returns the string at an offset of a table of strings."""
        end = strings.find(b"\0", offset, offset + _MAX_NAME_BYTES)
        if end < 0:
            self.refuse(f"no name at byte {offset} of its table")
        return strings[offset:end].decode("ascii", "replace")

    def attributes(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yields the attributes of a section: numbers and values."""
        section = self.sections[name]
        self._info_bytes += section.size
        if self._info_bytes > MAX_INFO_BYTES:
            self.refuse(f"more than {MAX_INFO_BYTES} bytes of attributes")
        data, at = self.content(section), 0
        while at < len(data):
            form, attribute, size = self.unpack("<BBH", data[at : at + 4])
            at += 4
            if form != _SIZED_VALUE:  # what would be the size is the value
                yield attribute, data[at - 2 : at - 1] if form == _BYTE_VALUE else data[at - 2 : at]
                continue
            if at + size > len(data):
                self.refuse(f"attribute {attribute:#x} of {name[:80]} would end at byte {at + size} of {len(data)}")
            yield attribute, data[at : at + size]
            at += size


def _architecture(file: _Elf) -> str:
    mask, shift, accelerated = _FLAGS[file.abi]
    number, special = (file.flags & mask) >> shift, bool(file.flags & accelerated)
    if ".nv.compat" in file.sections:  # where compilers from 13 on say it
        special |= (_CUDA_ACCELERATOR_TARGET, b"\1") in file.attributes(".nv.compat")
    return f"sm_{number}{'a' if special else ''}"


def _waits(file: _Elf, symbol: str) -> bool:
    code = file.content(file.sections[f".text.{symbol}"])
    if len(code) % _INSTRUCTION_BYTES:
        file.refuse(f"the code of kernel {symbol[:80]!r} has {len(code)} bytes, no multiple of {_INSTRUCTION_BYTES}")
    return any(word == _WAIT for (word,) in struct.iter_unpack(_INSTRUCTION, code))


def _registers(file: _Elf) -> dict[str, int]:
    """Registers of a thread, by function."""
    if ".nv.info" not in file.sections or ".symtab" not in file.sections:
        file.refuse("it has no .nv.info, or no .symtab")
    table = file.sections[".symtab"]
    symbols = file.content(table)
    if table.link >= len(file.ordered):
        file.refuse(f".symtab has its names in section {table.link} of {len(file.ordered)}")
    strings = file.content(file.ordered[table.link])
    found = {}
    for attribute, value in file.attributes(".nv.info"):
        if attribute == _REGCOUNT:
            index, count = file.unpack("<II", value)
            (key,) = file.unpack("<I", symbols[index * _SYMBOL_BYTES : (index + 1) * _SYMBOL_BYTES])
            found[file.text(strings, key)] = count
    return found
