"""The C interface of a kernel library, as ctypes. The C side is `ignition/targets/cpu/kernels/interface.h`.

Structures carry their sizes, so a library of another version refuses them.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS
from flare.errors import CoreError

ABI_VERSION = 4
SEGMENTS = {"none": 0, "weights": 1, "arena": 2, "io": 3, "kv": 4}

# Result codes beside 0 (good) and 1 (refused).
ROWS_FAILED = 2
UNAVAILABLE = 3


Interpret = ctypes.CFUNCTYPE(None, c_int32, c_void_p, c_void_p)
"""What a library calls for a node that is interpreted or runs on a device; see `CalledNodes.run`."""


class ArgStruct(ctypes.Structure):
    _fields_ = [("segment", c_int32), ("reserved", c_int32), ("offset", c_uint64), ("bytes", c_uint64)]


class NodeStruct(ctypes.Structure):
    _fields_ = [("kernel", c_char_p), ("args", POINTER(ArgStruct)), ("nargs", c_int32), ("phase", c_int32)]


class OpenArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("vocabulary", c_int32),
        ("max_context", c_int32),
        ("slots", c_int32),
        ("max_step_tokens", c_int32),
        ("max_rows", c_int32),
        ("page_tokens", c_int32),
        ("kv_pages", c_int32),
        ("threads", c_int32),
        ("huge_pages", c_int32),
        ("node_count", c_int32),
        ("reserved", c_int32),
        ("kv_page_bytes", c_uint64),
        ("arena_bytes", c_uint64),
        ("io_bytes", c_uint64),
        ("logits_offset", c_uint64),
        ("weights_bytes", c_uint64),
        ("weights", c_void_p),
        ("nodes", POINTER(NodeStruct)),
        ("interpret", Interpret),
    ]


class StepArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tokens", c_int32),
        ("rows", c_int32),
        ("page_stride", c_int32),
        ("token", POINTER(c_int32)),
        ("position", POINTER(c_int32)),
        ("slot", POINTER(c_int32)),
        ("page_table", POINTER(c_int32)),
        ("row", POINTER(c_int32)),
    ]


class SampleParams(ctypes.Structure):
    """How one row's token is chosen; `kernels/sampler.h` documents the meaning and order of the fields.

    `history` points to int32 tokens, the `prompt_len` of the prompt first; `mask` to one bit a token, bit t % 32 of word
    t // 32, set where the token may be drawn (null: all may); `explicit_ids` to `explicit` tokens, up to MAX_EXPLICIT_IDS,
    whose log probabilities are wanted. Their arrays must outlive the `sample` call. `alternatives` is how many of the likeliest
    tokens are wanted with theirs, up to MAX_ALTERNATIVES; at -1 the row gets no log probabilities at all.
    """

    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
        ("top_k", c_int32),
        ("choice", c_uint32),
        ("seed", c_uint64),
        ("position", c_uint32),
        ("history_len", c_int32),
        ("prompt_len", c_int32),
        ("reserved", c_int32),
        ("history", POINTER(c_int32)),
        ("mask", POINTER(c_uint32)),
        ("explicit_ids", POINTER(c_int32)),
        ("explicit", c_int32),
        ("alternatives", c_int32),
    ]


class RowLogprobs(ctypes.Structure):
    """A row's log probabilities, natural logarithms over the complete vocabulary, of the logits as the model gave them;
    `kernels/logprobs.h` documents them.

    `chosen` and `rank` (from 1; 0: the row has no probabilities) are the drawn token's or the target's; `ids[:count]` and
    `values[:count]` the likeliest tokens, best first; `explicit` those of `SampleParams.explicit_ids`, in their order.
    """

    _fields_ = [
        ("chosen", c_float),
        ("rank", c_int32),
        ("count", c_int32),
        ("reserved", c_int32),
        ("ids", c_int32 * MAX_ALTERNATIVES),
        ("values", c_float * MAX_ALTERNATIVES),
        ("explicit", c_float * MAX_EXPLICIT_IDS),
    ]


class SampleArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("params_size", c_uint32),
        ("rows", c_int32),
        ("logprobs_size", c_uint32),
        ("params", POINTER(SampleParams)),
        ("sampled", POINTER(c_int32)),
        ("logprobs", POINTER(RowLogprobs)),
    ]


class ScoreArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("logprobs_size", c_uint32),
        ("first", c_int32),
        ("count", c_int32),
        ("target", POINTER(c_int32)),
        ("wanted", POINTER(c_int32)),
        ("logprobs", POINTER(RowLogprobs)),
    ]


class Buffer(ctypes.Structure):
    """CPython's Py_buffer: the way to the address of a read-only mmap."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


def load_library(path: Path) -> ctypes.CDLL:
    """Loads a kernel library and declares its functions. Raises CoreError if it does not load or has another ABI."""
    try:
        library = ctypes.CDLL(str(path))
        library.flare_abi_version.restype = c_uint32
        version = library.flare_abi_version()
        if version != ABI_VERSION:
            raise CoreError(f"{path}: ABI version {version}, this flare replays {ABI_VERSION}: export the core again")
        library.flare_library_info.restype = c_char_p
        library.flare_open.argtypes = [POINTER(OpenArgs), POINTER(c_void_p), c_char_p, c_size_t]
        library.flare_begin.argtypes = [c_void_p, POINTER(StepArgs), c_char_p, c_size_t]
        library.flare_finish.argtypes = [c_void_p, c_char_p, c_size_t]
        library.flare_sample.argtypes = [c_void_p, POINTER(SampleArgs), c_char_p, c_size_t]
        library.flare_score.argtypes = [c_void_p, POINTER(ScoreArgs), c_char_p, c_size_t]
        library.flare_logits.argtypes = [c_void_p]
        library.flare_logits.restype = c_void_p
        library.flare_close.argtypes = [c_void_p]
        library.flare_close.restype = None
    except (OSError, AttributeError) as error:
        raise CoreError(f"{path}: not a kernel library of this machine: {error}") from None
    return library
