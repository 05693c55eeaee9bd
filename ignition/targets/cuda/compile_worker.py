"""The process that compiles kernels: `python -m ignition.targets.cuda.compile_worker`, started by compile.py.

A process that interprets kernels cannot compile them, and what Triton's environment variables say must not get into a core:
so kernels are compiled in processes of their own. Jobs come on standard input and results leave on standard output, each one
MessagePack behind its length (four bytes, little endian), one result for each job. The end of the input ends the process at
once, with the assembler that runs for it and the folder that both write to: also when whoever started it was killed.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from flare.core.architectures import ABILITIES
from flare.core.cuda_graph import Box
from flare.core.tensor_maps import ELEMENT_BYTES, MapType
from ignition.targets.cuda.launch import Constant

PROGRAMMATIC = "PROGRAMMATIC"
"""Every kernel's constant that tells whether its architecture has programmatic edges (kernels/programmatic.py)."""

_WAIT = "griddepcontrol.wait"
_TOO_EARLY = re.compile(r"\.global\b|\b(?:ld|st|atom|red)\.(?!param\b|shared\b)|\b(?:bra|brx|call|ret|exit)\b")
"""What a kernel must not do before it has waited: reach memory that others write, or take one of several ways."""

_PAIRS = re.compile(r"\b(?:add|sub|mul|fma)\.[\w.]*f32x2\b")
"""Arithmetic on pairs of f32 (compile.py says why there is to be none)."""

PROMOTION: Literal[128] = 128
"""Bytes that the L2 cache fetches at least for a box: a box's rows have as many."""

_SWIZZLES: tuple[Literal[0, 32, 64, 128], ...] = (0, 32, 64, 128)
_ELEMENT_TYPES = {"fp16": 6, "bf16": 10}
"""How the compiler numbers swizzles (a place in the list) and elements, as devices do (PTX ISA, "tensormap.replace")."""


class Job(msgspec.Struct, frozen=True):
    """All that decides a kernel's machine code. signature: Triton's type by run-time parameter, where it is there, in order.
    constants: constexprs but PROGRAMMATIC, with absent pointers as None. package: where the kernel's file lies."""

    package: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Constant]
    warps: int
    stages: int
    architecture: str

    def key(self) -> bytes:
        """Returns what is equal for equal jobs only: 1, 1.0 and True are different constants."""
        return msgspec.msgpack.encode(self)


class Cubin(msgspec.Struct, frozen=True, tag="cubin"):
    """A compiled kernel. symbol: its name in `data`, an ELF file. threads: of a block. shared: bytes of dynamic shared memory.
    versions: of what made it, by tool. seconds: that it took. boxes: by parameter that is a tensor map."""

    data: bytes
    symbol: str
    threads: int
    shared: int
    versions: dict[str, str]
    seconds: float
    boxes: dict[str, Box] = {}


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Why a kernel has no cubin, in one line."""

    text: str


Result = Cubin | Failure


def read(stream: IO[bytes]) -> bytes | None:
    """Returns the next message, None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def write(stream: IO[bytes], message: object) -> None:
    """Writes a message and its length."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def capability(architecture: str) -> int:
    """Returns the number that Triton knows an architecture by: 90 for sm_90a. It compiles for the "a" variant from 90 on."""
    return int(architecture.removeprefix("sm_").removesuffix("a"))


def compile_job(job: Job) -> Result:
    """Compiles one kernel. Whatever Triton raises is a Failure."""
    try:
        return _compile(job)
    except Exception as error:  # of Triton, of its compilers, or of the kernel's file
        return Failure(last_line(error))


def build(job: Job) -> Any:
    """Returns a kernel as Triton compiles it, with all of its forms. Raises ValueError where its parameters are not the job's,
    and whatever Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file, _, name = job.kernel.rpartition(".")
    function: Any = getattr(import_module(f"{job.package}.{file}"), name)
    constants = {**job.constants, PROGRAMMATIC: ABILITIES[job.architecture].programmatic}
    if wrong := set(function.arg_names) ^ {*job.signature, *constants}:
        raise ValueError(f"its parameters and the launch differ in {', '.join(sorted(wrong))}")
    signature = {parameter: job.signature.get(parameter, "constexpr") for parameter in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, type_ in enumerate(signature.values()) if type_.startswith("*")
    }
    source = ASTSource(function, signature, constants, aligned)
    options = {"num_warps": job.warps, "num_stages": job.stages, "num_ctas": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability(job.architecture), 32), options=options)


def waits_first(ptx: str) -> bool:
    """Whether a kernel's PTX waits for the kernel before it, and does nothing earlier that it must not do."""
    before, wait, _ = ptx.partition(".entry")[2].partition("\n{")[2].partition(_WAIT)
    return bool(wait) and not _TOO_EARLY.search(before)


def _compile(job: Job) -> Result:
    maps = {name: found for name, kind in job.signature.items() if (found := MapType.read(kind)) is not None}
    if maps and not ABILITIES[job.architecture].tensor_maps:
        return Failure(f"{', '.join(maps)}: {job.architecture} has no tensor maps")
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    begin = time.perf_counter()
    compiled = build(job)
    facts = compiled.metadata
    if facts.global_scratch_size or facts.profile_scratch_size:
        return Failure("it wants scratch memory in global memory, which a graph's nodes do not have")
    if facts.num_ctas != 1:
        return Failure(f"it wants clusters of {facts.num_ctas} blocks, which a graph's nodes do not have")
    if ABILITIES[job.architecture].programmatic and not waits_first(compiled.asm["ptx"]):
        return Failure("it does not wait first for the kernel before it; make begin(PROGRAMMATIC) its first statement")
    if _PAIRS.search(compiled.asm["ptx"]):
        return Failure(
            "it computes on pairs of f32, whose products and sums ptxas fuses; this Triton ignores DISABLE_LLVM_OPT"
        )
    versions = {"triton": triton.__version__, "ptxas": get_ptxas(capability(job.architecture)).version}
    boxes = {}
    for (name, kind), said in zip(maps.items(), facts.tensordesc_meta, strict=True):
        if (found := read_box(kind, said)) is None:
            return Failure(f"its tensor map {name} is none that graphs can have: {said}")
        boxes[name] = found
    seconds = time.perf_counter() - begin
    return Cubin(compiled.asm["cubin"], facts.name, 32 * facts.num_warps, facts.shared, versions, seconds, boxes)


def read_box(kind: MapType, said: dict[str, Any]) -> Box | None:
    """Returns the box of a tensor map from what the compiler says of it, None where a map of `kind` cannot have it."""
    if kind.wrong_type() is not None or said["swizzle"] not in range(len(_SWIZZLES)):
        return None
    box = Box(shape=tuple(said["block_size"]), swizzle=_SWIZZLES[said["swizzle"]], promotion=PROMOTION)
    element = (said["elem_size"], said["elem_type"]) == (ELEMENT_BYTES[kind.element], _ELEMENT_TYPES[kind.element])
    plain = element and not said["fp4_padded"] and not said["is_im2col"]
    return box if plain and kind.wrong_box(box) is None else None


def last_line(error: BaseException) -> str:
    """Returns the line of a compiler's message that says what is wrong: the last one, or the assembler's first error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("ptxas") and ("error" in line or "fatal" in line)]
    return (wrong or lines[-1:] or [type(error).__name__])[0]


def main() -> None:
    """Compiles jobs until the input ends."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Triton prints the text of kernels that fail
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # the end() below sends it to the assembler, and so to this process too
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def take() -> None:
        while (message := read(sys.stdin.buffer)) is not None:
            jobs.put(message)
        end(Path(os.environ["TMPDIR"]))

    threading.Thread(target=take, daemon=True).start()
    while True:
        result = compile_job(msgspec.msgpack.decode(jobs.get(), type=Job))
        with suppress(BrokenPipeError):  # nobody reads any more: `take` ends the process, and cleans up
            write(results, result)


def end(folder: Path) -> None:
    """Ends this process and those that it started, and removes their folder; the last of several ends the folder above."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.killpg(0, signal.SIGTERM)
    # Another program takes this one's place, so that no thread of it goes on and writes while the folder is removed. The signal
    # may still wait for this process: ignored, it is forgotten.
    remove = 'trap "" TERM; rm -rf -- "$0"; rmdir -- "${0%/*}" 2>/dev/null'
    os.execv("/bin/sh", ["sh", "-c", remove, str(folder)])


if __name__ == "__main__":
    main()
