"""Tensor maps from their recipes to kernels: what the driver is asked to make, how often, and what it says when it will not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from flare.core.cuda_graph import Box, Bucket, CudaGraphs, KernelNode, Pointer, TensorMap
from flare.core.tensor_maps import LEAST_WITH_GAPS, MapType
from flare.errors import CoreError, ReplayDead
from flare.replay import cuda_tensor_maps
from flare.replay.cuda_driver import CudaDevice, DeviceError, open_device
from flare.replay.cuda_executables import GraphBuilder, load_functions
from flare.replay.cuda_tensor_maps import TensorMaps
from tests.support.cuda_graphs import ARENA_BYTES, SCRATCH, WEIGHTS_BYTES, make_graphs, with_map
from tests.support.fake_cuda.executor import Executor
from tests.support.fake_cuda.library import FakeCuda

BOX = Box(shape=(16, 64), swizzle=128, promotion=128)

NEAR_LEAST = (LEAST_WITH_GAPS // 4, LEAST_WITH_GAPS // 4 - 16, LEAST_WITH_GAPS // 112 * 16)
"""Strides of five or eight rows that are about as many bytes as a tensor with gaps must have."""


def whole(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, segment: Any = "weights") -> TensorMap:
    base = Pointer(segment=segment, offset=offset, bytes=WEIGHTS_BYTES - offset)
    return TensorMap(base=base, shape=shape, strides=strides)


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    device = open_device(["sm_90a"])
    yield device
    device.close()


@pytest.fixture
def addresses(device: CudaDevice) -> dict[str, int]:
    segments = {"weights": WEIGHTS_BYTES, "arena": ARENA_BYTES}
    return {name: device.allocate(size, name) for name, size in segments.items()} | {"none": 0}


class Taken:
    """A graph of launches of `take` alone, each of a tensor of the weights."""

    def __init__(self, device: CudaDevice, addresses: dict[str, int], folder: Path) -> None:
        self.device = device
        self.graphs, self.cubins = with_map(folder, *make_graphs(folder, "sm_90a"))
        self.addresses = addresses
        functions = load_functions(device, self.graphs, self.cubins)
        self.builder = GraphBuilder(device, self.graphs, functions, addresses)

    def build(self, tensors: Sequence[TensorMap], name: str = "step[0]") -> Any:
        return self.builder.build(self.bucket(tensors), name)

    def bucket(self, tensors: Sequence[TensorMap]) -> Bucket:
        """Each launch writes its 16 x 128 results behind those of the one before."""
        nodes: list[Any] = []
        for number, tensor in enumerate(tensors):
            out = Pointer(segment="arena", offset=4096 * number, bytes=4096)
            node = KernelNode(kernel=2, grid=(1, 1, 1), args=[tensor, out, *SCRATCH], label=f"take {number}", after=[])
            nodes.append(node)
        return Bucket(tokens=1, rows=1, nodes=nodes)

    def run(self, tensors: Sequence[TensorMap], values: torch.Tensor) -> torch.Tensor:
        """Puts bf16 values at the weights' begin, and returns what the launches took, [launches, 16, 128]."""
        ctypes.memmove(self.addresses["weights"], values.contiguous().data_ptr(), values.nbytes)
        self.device.launch(self.build(tensors))
        self.device.synchronise()
        found = ctypes.string_at(self.addresses["arena"], 4096 * len(tensors))
        return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(-1, 16, 128)


@pytest.fixture
def taken(device: CudaDevice, addresses: dict[str, int], cubins: Path) -> Taken:
    return Taken(device, addresses, cubins)


@pytest.fixture
def running(fake: FakeCuda, taken: Taken) -> Iterator[Executor]:
    executor = Executor(fake, taken.graphs, package="tests.support")
    yield executor
    executor.remove()


def test_a_kernel_reads_its_tensor_and_zeros_behind_it(taken: Taken, running: Executor) -> None:
    """Rows that end inside a box, columns too, strides with gaps, and one row alone; memory behind them is no zeros."""
    values = torch.arange(1, WEIGHTS_BYTES // 2 + 1).to(torch.bfloat16)
    tensors = [
        whole((9, 72), (144,)),
        whole((16, 128), (256,), 64),
        whole((3, 8), (1024,), 128),
        whole((1, 128), (256,)),
    ]
    found = taken.run(tensors, values)
    for tensor, block in zip(tensors, found, strict=True):
        (rows, columns), step, start = tensor.shape, tensor.strides[0] // 2, tensor.base.offset // 2
        wanted = torch.zeros(16, 128, dtype=torch.bfloat16)
        wanted[:rows, :columns] = values[start:].as_strided((rows, columns), (step, 1))
        assert torch.equal(block, wanted)
    assert running.launched == ["cuda_kernels.take"] * 4 and not running.failures


def encodings(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collects the arguments of every map that the driver makes."""
    made: list[tuple[Any, ...]] = []
    real = device.function

    def function(name: str, prototype: Any) -> Any:
        encode = real(name, prototype)
        return lambda *arguments: (made.append(arguments), encode(*arguments))

    monkeypatch.setattr(device, "function", function)
    return made


def test_the_driver_makes_each_recipe_once(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    made = encodings(taken.device, monkeypatch)
    same, other = whole((9, 72), (144,)), whole((10, 72), (144,))
    for bucket in ([same, other, same], [whole((9, 72), (144,)), other], [other]):
        taken.build(bucket)
    assert len(made) == 2 and len({address for address, *_ in made}) == 2
    assert all(address % 128 == 0 for address, *_ in made)


def test_the_driver_is_asked_as_its_header_says(
    device: CudaDevice, addresses: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion as numbered in the header; the innermost first."""
    made = encodings(device, monkeypatch)
    maps = TensorMaps(device, addresses)
    tensor = whole((2, 3, 8), (64, 16), 192)
    maps.parameters(tensor, "fp16", Box(shape=(1, 4, 8), swizzle=32, promotion=0))
    maps.parameters(tensor, "bf16", Box(shape=(1, 4, 8), swizzle=0, promotion=256))
    maps.parameters(whole((7,), ()), "bf16", Box(shape=(16,), swizzle=64, promotion=64))
    plain = [[list(value) if isinstance(value, ctypes.Array) else value for value in some[1:]] for some in made]
    base = addresses["weights"]
    assert plain == [
        [6, 3, base + 192, [8, 3, 2], [16, 64, 0], [8, 4, 1], [1, 1, 1], 0, 1, 0, 0],
        [9, 3, base + 192, [8, 3, 2], [16, 64, 0], [8, 4, 1], [1, 1, 1], 0, 0, 3, 0],
        [9, 1, base, [7], [0], [16], [1], 0, 2, 1, 0],
    ]


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        ("cuTensorMapEncodeTiled=1@2", CoreError, "step[3]: node 1 ('take 1'): the driver refuses the tensor map of argument "
         "0: cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE: injected into cuTensorMapEncodeTiled; export the core again"),
        ("cuTensorMapEncodeTiled=719", ReplayDead, "cuTensorMapEncodeTiled: CUDA_ERROR_LAUNCH_FAILED: injected into cuTensor"),
        ("cuTensorMapEncodeTiled=1234", CoreError, "cuTensorMapEncodeTiled: result 1234: "),
        ("cuGraphAddNode=1@2", CoreError, "step[3]: node 1 ('take 1'): the driver refuses it: cuGraphAddNode"),
    ],
)  # fmt: skip
def test_a_map_that_the_driver_refuses(
    taken: Taken, fake: FakeCuda, failure: str, kind: type[Exception], text: str
) -> None:
    fake.fail(failure)
    with pytest.raises(kind) as error:
        taken.build([whole((9, 72), (144,)), whole((10, 72), (144,))], "step[3]")
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensor", "box", "text"),
    [
        (whole((9, 72), (152,)), BOX, "a stride of 152 bytes"),
        (whole((9, 72), (128,)), BOX, "a stride of 128 bytes"),
        (whole((2, 72), (2**40,)), BOX, "a stride of 1099511627776 bytes"),
        (whole((0, 72), (144,)), BOX, "a size of 0"),
        (whole((1, 2**32 + 1), (2**33 + 16,)), BOX, "a size of 4294967297"),
        (whole((9, 72), (144,), 8), BOX, "wanted a multiple of 16"),
        (whole((114, 72), (144,)), BOX, "a tensor outside of memory"),
        (whole((9, 72), (144,)), Box(shape=(257, 64), swizzle=128, promotion=0), "a box of 257"),
        (whole((9, 72), (144,)), Box(shape=(0, 64), swizzle=128, promotion=0), "a box of 0"),
        (whole((9, 72), (144,)), Box(shape=(16, 4), swizzle=128, promotion=0), "a box with rows of 4 elements"),
        (whole((9, 72), (144,)), Box(shape=(16, 64), swizzle=64, promotion=0), "a box with rows of 64 elements"),
        (whole((1,) * 5 + (8,), (16,) * 5), Box(shape=(1,) * 5 + (8,), swizzle=0, promotion=0), "a rank of 6"),
    ],
)  # fmt: skip
def test_the_fake_refuses_maps_that_the_header_forbids(
    device: CudaDevice, addresses: dict[str, int], tensor: TensorMap, box: Box, text: str
) -> None:
    with pytest.raises(DeviceError, match=f"cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE: .*{text}"):
        TensorMaps(device, addresses).parameters(tensor, "bf16", box)


def test_what_the_checks_accept_the_header_allows(device: CudaDevice) -> None:
    """Random tensors and boxes near their limits: whatever opens a core lets pass, the driver makes a map of; many of them have
    gaps, which only tensors of some size may have."""
    memory = 32 * LEAST_WITH_GAPS
    maps = TensorMaps(device, {"weights": device.allocate(memory, "weights")})
    random, accepted, gapped = Random(1), 0, 0
    for _ in range(4000):
        rank = random.randint(1, 3)
        block = tuple(random.choice([1, 8, 16, 64, 128, 256, 512]) for _ in range(rank))
        kind = MapType("bf16", block)
        swizzle, wide = random.choice([0, 0, 32, 64, 128]), random.random() < 0.1
        parts = [*block[:-1], swizzle // 2 or block[-1]]
        box = Box(
            shape=tuple(random.choice([8, 512]) if wide else min(size, 256) for size in parts),
            swizzle=swizzle,
            promotion=random.choice([0, 64, 128, 256]),
        )
        shape = tuple(random.choice([0, 1, 5, 8, 8, 64, 200]) for _ in range(rank))
        below, strides, gaps = 2 * shape[-1], [], False
        for count in reversed(shape[:-1]):
            strides.append(random.choice([below, below + 8, below + 16, below - 16, 4096, *NEAR_LEAST]))
            gaps |= strides[-1] != below
            below = count * strides[-1]
        offset = random.choice([0, 64, memory - LEAST_WITH_GAPS, memory - 256])
        extent = 2 * shape[-1] + sum((count - 1) * stride for count, stride in zip(shape[-2::-1], strides, strict=True))
        base = Pointer(segment="weights", offset=offset, bytes=min(extent, memory - offset))
        tensor = TensorMap(base=base, shape=shape, strides=tuple(reversed(strides)))
        if kind.wrong_box(box) is None and kind.wrong_tensor(tensor) is None:
            maps.parameters(tensor, "bf16", box)
            accepted += 1
            gapped += gaps
    assert accepted > 200 and gapped > 50


def test_the_fake_has_maps_from_compute_capability_9_on(
    device: CudaDevice, addresses: dict[str, int], fake: FakeCuda
) -> None:
    fake.set("capability", 89)
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_SUPPORTED: a device of 89 has no tensor maps"):
        TensorMaps(device, addresses).parameters(whole((9, 72), (144,)), "bf16", BOX)


def test_the_fake_wants_a_map_aligned_as_in_the_header(
    device: CudaDevice, addresses: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = encodings(device, monkeypatch)
    TensorMaps(device, addresses).parameters(whole((9, 72), (144,)), "bf16", BOX)
    ((_, *arguments),) = made
    memory = ctypes.create_string_buffer(512)
    aligned = -(-ctypes.addressof(memory) // 128) * 128
    encode = device.function("cuTensorMapEncodeTiled", cuda_tensor_maps._PROTOTYPE)
    encode(aligned, *arguments)
    for shift in (16, 64):
        with pytest.raises(DeviceError, match=r"CUDA_ERROR_INVALID_VALUE: a map at 0x\w+, wanted a multiple of 128"):
            encode(aligned + shift, *arguments)


def test_the_fake_knows_a_map_from_other_bytes(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorMaps, "parameters", lambda *_: (taken.addresses["weights"], [9, 72, 72, 1]))
    with pytest.raises(CoreError, match=r"node 0 .* cuGraphAddNode: .*take: parameter 0 is no tensor map"):
        taken.build([whole((9, 72), (144,))])


@pytest.mark.parametrize(
    "change",
    [
        lambda graphs: set_boxes(graphs, Box(shape=(16, 32), swizzle=128, promotion=128)),
        lambda graphs: set_boxes(graphs, Box(shape=(16, 64), swizzle=0, promotion=128)),
    ],
    ids=["another box", "another swizzle"],
)
def test_the_fake_shows_a_map_that_its_kernel_does_not_expect(
    taken: Taken, running: Executor, fake: FakeCuda, change: Any
) -> None:
    """A device would wait for bytes that never come, or find them in other places."""
    functions = load_functions(taken.device, taken.graphs, taken.cubins)
    taken.builder = GraphBuilder(taken.device, change(taken.graphs), functions, taken.addresses)
    with pytest.raises(ReplayDead, match="take: the executor failed"):
        taken.run([whole((9, 72), (144,))], torch.zeros(8, dtype=torch.bfloat16))
    assert "ValueError: a tensor map of " in running.failures[0]


def set_boxes(graphs: CudaGraphs, box: Box) -> CudaGraphs:
    return replace(graphs, kernels=[*graphs.kernels[:2], replace(graphs.kernels[2], boxes={"x": box})])
