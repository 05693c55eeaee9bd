"""exp, log and Philox of the cuda kernels: published vectors, and the bits of the cpu target's own."""

from __future__ import annotations

import ctypes
import math
import random
import subprocess
from ctypes import c_float, c_uint32
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flare.replay.cpu import CpuArg, CpuReplay
from ignition.targets.cuda.kernels.exact_math import exp_nonpositive, logarithm, philox, uniform
from tests.support import triton_interpreter  # noqa: F401, for what it changes
from tests.support.fake_library import fill, io, node, program
from tests.support.philox import uniform as reference_uniform


@triton.jit
def exp_of(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, exp_nonpositive(tl.load(x + at)))


@triton.jit
def log_of(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, logarithm(tl.load(x + at)))


@triton.jit
def philox_of(words, out):
    w0, w1, w2, w3 = philox(
        tl.load(words),
        tl.load(words + 1),
        tl.load(words + 2),
        tl.load(words + 3),
        tl.load(words + 4),
        tl.load(words + 5),
    )
    tl.store(out, w0)
    tl.store(out + 1, w1)
    tl.store(out + 2, w2)
    tl.store(out + 3, w3)


@triton.jit
def uniform_of(words, out):
    tl.store(out, uniform(tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)))


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    key: tuple[int, ...], counter: tuple[int, ...], words: tuple[int, ...]
) -> None:
    out = torch.zeros(4, dtype=torch.int64)
    philox_of[(1,)](torch.tensor([*counter, *key]), out)
    assert tuple(out.tolist()) == words


def test_uniform_is_the_upper_53_bits_of_two_words() -> None:
    source = random.Random(1)
    for seed, choice, position in [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (2**63, 2**31, 1)] + [
        (source.getrandbits(64), source.getrandbits(32), source.getrandbits(32)) for _ in range(10)
    ]:
        words = np.array([position, choice, seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        out = torch.zeros(1, dtype=torch.float64)
        uniform_of[(1,)](torch.from_numpy(words), out)
        assert out.item() == reference_uniform(seed, choice, position)


def test_exp_has_the_bits_of_the_cpu_targets() -> None:
    edges = [0.0, -0.0, -1e-30, -1e-42, -86.0, math.nextafter(-86.0, -87.0), -86.0001, -1e30, -math.inf]
    source = random.Random(2)
    xs = np.array(edges + [-(86.5 ** source.random()) + 1 for _ in range(4096 - len(edges))], np.float32)
    nodes = [node("Parts", 0, CpuArg("io", 1024, 64), CpuArg("io", 2048, 16384))]
    with CpuReplay(program(nodes), threads=1, kv_pages=40) as replay:
        io(replay, c_uint32, 6)[:] = [0] * 6
        io(replay, c_float, len(xs), 2048)[:] = xs.tolist()
        fill(replay, [0])
        replay.step(1, 0)
        expected = np.array(io(replay, c_float, len(xs), 2048), np.float32)
    found = torch.zeros(len(xs))
    exp_of[(1,)](torch.from_numpy(xs), found, len(xs))
    assert found.numpy().tobytes() == expected.tobytes()
    exact = np.exp(xs.astype(np.float64))
    kept = xs >= -86
    assert (abs(found.numpy() - exact)[kept] <= 2 * np.spacing(exact[kept].astype(np.float32))).all()
    assert (found.numpy()[~kept] == 0).all()


def test_log_has_the_bits_of_the_cpu_targets(tmp_path: Path, repository: Path) -> None:
    source = random.Random(3)
    xs = [
        1.0,
        2.0,
        0.5,
        math.sqrt(0.5),
        math.nextafter(1.0, 2.0),
        math.nextafter(1.0, 0.0),
        2.0**-1022,
        1.7e308,
        151936.0,
    ]
    xs += [math.exp(12 * source.random()) for _ in range(1024 - len(xs))]
    code = '#include "logarithm.h"\nextern "C" double log_of(double x) { return flare::logarithm(x); }\n'
    (tmp_path / "log.cc").write_text(code)
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "log.cc", "-o", "log.so"]
    subprocess.run([*command, f"-I{repository / 'ignition/targets/cpu/kernels'}"], cwd=tmp_path, check=True)
    native = ctypes.CDLL(str(tmp_path / "log.so")).log_of
    native.restype, native.argtypes = ctypes.c_double, [ctypes.c_double]
    found = torch.zeros(len(xs), dtype=torch.float64)
    log_of[(1,)](torch.tensor(xs, dtype=torch.float64), found, len(xs))
    assert found.tolist() == [native(x) for x in xs]
    for x, y in zip(xs, found.tolist(), strict=True):
        assert abs(y - math.log(x)) <= 1e-15 + 2 * math.ulp(math.log(x))
