"""Every planted defect of a tensor map is refused by name, against the signature, the cubin and the driver's header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from flare.core.architectures import ABILITIES
from flare.core.cubin import read_cubin
from flare.core.cuda_checks import check_cuda_graphs
from flare.core.cuda_graph import Box, Pointer, TensorMap, decode_cuda_graphs
from flare.core.tensor_maps import MAX_BOX, MAX_RANK, MAX_STRIDE, SEGMENTS, MapType
from flare.errors import CoreError
from tests.support.cuda_cubins import ARCHITECTURES, MAPPED, cubin, metadata
from tests.support.cuda_graphs import file_of, make_graphs, make_kernel, make_manifest, with_map
from tests.support.fake_cuda.library import header
from tests.support.graph_defects import Change, arg, changed, pointer, put, refused

ARCHITECTURE = "sm_90a"
TAKE, KERNEL = "step[1] node 7 ('take'): argument 0: ", "kernel 2 ('cuda_kernels.take'): "


def tensor(**changes: Any) -> Change:
    """Changes fields of the map of the last launch of a step, of its base the rest."""
    base = {name: value for name, value in changes.items() if name not in ("shape", "strides")}
    rest = {name: value for name, value in changes.items() if name not in base}

    def change(g: dict[str, Any]) -> None:
        given = arg(g, 0, 7)
        given.update(rest)
        given["base"].update(base)

    return change


def box(**changes: Any) -> Change:
    return lambda g: g["kernels"][2]["boxes"]["x"].update(changes)


def signature(kind: str) -> Change:
    return lambda g: g["kernels"][2]["signature"].update(x=kind)


DEFECTS: list[tuple[Change, str]] = [
    # the tensor
    (tensor(shape=[100, 72, 1]), f"{TAKE}a tensor of 3 dimensions and 1 strides, wanted 2 and 1"),
    (tensor(strides=[]), f"{TAKE}a tensor of 2 dimensions and 0 strides, wanted 2 and 1"),
    (tensor(strides=[144, 144]), "a tensor of 2 dimensions and 2 strides"),
    (tensor(shape=[0, 72]), f"{TAKE}a tensor of 0 elements in a dimension, wanted 1 to 2147483647"),
    (tensor(shape=[100, -72]), "a tensor of -72 elements in a dimension"),
    (tensor(shape=[2**31, 72]), "a tensor of 2147483648 elements in a dimension"),
    (tensor(shape=[100, 2**32]), "a tensor of 4294967296 elements in a dimension"),
    (tensor(strides=[152]), f"{TAKE}a stride of 152 bytes, wanted a multiple of 16 from 144 to 1099511627760"),
    (tensor(strides=[128]), "a stride of 128 bytes"),
    (tensor(strides=[-144]), "a stride of -144 bytes"),
    (tensor(shape=[2, 72], strides=[2**40]), "a stride of 1099511627776 bytes"),
    (tensor(shape=[114, 72]), f"{TAKE}a tensor of 16416 bytes in 14400, wanted as many"),
    (tensor(shape=[99, 72]), f"{TAKE}a tensor of 14256 bytes in 14400, wanted as many"),
    (tensor(shape=[100, 71]), "a tensor of 14398 bytes in 14400"),
    (tensor(bytes=14399), f"{TAKE}a tensor of 14400 bytes in 14399"),
    (tensor(bytes=14401), f"{TAKE}a tensor of 14400 bytes in 14401"),
    (tensor(shape=[2, 72], strides=[2**40 - 16]), "a tensor of 1099511627904 bytes in 14400"),
    (tensor(strides=[160], bytes=15984), f"{TAKE}a tensor of 15984 bytes with gaps, wanted none or at least 131072"),
    # where it lies
    (tensor(offset=2048), f"{TAKE}bytes 2048..16448 of segment weights, which has 16384"),
    (tensor(offset=-64), "bytes -64..14336 of segment weights"),
    (tensor(offset=8, bytes=14400), f"{TAKE}byte 8 of segment weights, wanted a multiple of 64"),
    (tensor(offset=16, bytes=14400), "byte 16 of segment weights"),
    (tensor(segment="host", bytes=64, shape=[1, 8], strides=[16]), "a tensor map of segment host, wanted one of weights"),
    (tensor(segment="kv", bytes=64, shape=[1, 8], strides=[16]), f"{TAKE}a tensor map of segment kv"),
    (tensor(segment="none", bytes=0), f"{TAKE}a null pointer"),
    (tensor(shape=[50, 144], strides=[288]),
     "step[1] node 7 ('take'): it is the first to use x, bytes 0..14400 of weights as [50, 144] elements in strides of [288], "
     "where graphs/cuda-sm_90a.msgpack: step[0] uses x, bytes 0..14400 of weights as [100, 72] elements in strides of [144]"),
    # arguments
    (put(0, pointer("weights", 0, 64), 7), f"{TAKE}a pointer, wanted a tensor map"),
    (put(0, {"kind": "scalar", "type": "i32", "value": 1}, 7), f"{TAKE}a scalar, wanted a tensor map"),
    (lambda g: put(1, arg(g, 0, 7), 7)(g), "argument 1: a tensor map, wanted a pointer"),
    (lambda g: put(2, arg(g, 0, 7), 7)(g), "argument 2: a tensor map, wanted a pointer"),
    (lambda g: put(2, arg(g, 0, 7), 6)(g), "argument 2: a tensor map, wanted a scalar of type i32"),
    # boxes
    (lambda g: g["kernels"][2]["boxes"].clear(), f"{KERNEL}parameter 'x' is a tensor map without a box"),
    (lambda g: g["kernels"][2]["boxes"].update(y=g["kernels"][2]["boxes"]["x"]), "parameter 'y' has a box and is no tensor"),
    (box(shape=[16]), f"{KERNEL}parameter 'x' has a box of 1 dimensions, its signature has 2"),
    (box(shape=[24, 64]), "'x' has a box of 24 elements in a dimension of 16, wanted 16"),
    (box(shape=[8, 64]), "a box of 8 elements in a dimension of 16, wanted 16"),
    (box(shape=[16, 48]), "a box of 48 elements in a dimension of 128, wanted 64"),
    (box(shape=[0, 64]), "a box of 0 elements in a dimension of 16"),
    (box(shape=[16, 64], swizzle=0), "a box of 64 elements in a dimension of 128, wanted 128"),
    (box(shape=[16, 128]), "a box of 128 elements in a dimension of 128, wanted 64"),
    (box(swizzle=64), "a box of 64 elements in a dimension of 128, wanted 32"),
    (signature("tensordesc<bf16[16,32]>"), "a swizzle of 128 bytes, its signature has rows of 64"),
    # the signature
    (signature("tensordesc<fp32[16,128]>"), f"{KERNEL}parameter 'x', a tensor map, has elements of fp32, wanted bf16 or fp16"),
    (signature("tensordesc<bf16[1,1,1,1,16,128]>"), "parameter 'x', a tensor map, has 6 dimensions, wanted at most 5"),
    (signature("tensordesc<bf16[0,128]>"), "parameter 'x', a tensor map, has a block of 0 x 128, wanted powers of two"),
    (signature("tensordesc<bf16[16,96]>"), "has a block of 16 x 96, wanted powers of two"),
    (signature("tensordesc<bf16[16,1,128]>"), "it has 10 parameters by its signature, scratch included, and 8 by its cubin"),
    (signature("tensordesc<bf16[16, 128]>"), "'tensordesc<bf16[16, ', wanted i32, i64, fp32, a pointer or a tensor map"),
    (signature("*bf16"), "it has 4 parameters by its signature, scratch included, and 8 by its cubin"),
    (lambda g: g["kernels"][2].update(signature={"y": "*bf16", "x": "tensordesc<bf16[16,128]>"}),
     "parameter 0 has 8 bytes by its signature and 128 by its cubin"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), DEFECTS)
def test_planted_defects(cubins: Path, change: Change, says: str) -> None:
    graphs, files = with_map(cubins, *make_graphs(cubins, ARCHITECTURE))
    assert says in refused(changed(graphs, change), files)


@pytest.mark.parametrize("architecture", MAPPED)
def test_good_maps_pass_and_survive_their_file(cubins: Path, architecture: Any) -> None:
    graphs, files = with_map(cubins, *make_graphs(cubins, architecture))
    check_cuda_graphs(graphs, make_manifest(architecture), files, file_of(architecture))
    assert decode_cuda_graphs(graphs.encode(), "g") == graphs
    # What the compiler wanted: 16-byte chunks change places within 128 bytes, which is what a box's row has.
    (said,) = metadata(cubins, "take", architecture)["tensordesc_meta"]
    assert (said["block_size"], said["swizzle"], said["elem_size"]) == ([16, 64], 3, 2)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(MAPPED)))
def test_architectures_without_tensor_maps(cubins: Path, architecture: Any) -> None:
    """The tensor map's type alone is refused: no cubin of such an architecture takes one."""
    assert not ABILITIES[architecture].tensor_maps
    graphs, files = make_graphs(cubins, architecture)
    kernel = replace(graphs.kernels[0], signature=make_kernel(cubins, "take", "sm_90a").signature)
    says = f"kernel 0 ('cuda_kernels.scale'): parameter 'x' is a tensor map, {architecture} has none"
    broken = replace(graphs, kernels=[kernel, *graphs.kernels[1:]])
    assert says in refused(broken, files, make_manifest(architecture), file_of(architecture))


@pytest.mark.parametrize("architecture", MAPPED)
def test_a_cubin_takes_the_map_its_sizes_and_its_strides(cubins: Path, architecture: str) -> None:
    kernel = read_cubin(cubin(cubins, "take", architecture), "c").kernels["take"]
    kind = MapType.read("tensordesc<bf16[16,128]>")
    assert kind is not None and [size for _, size in kernel.parameters] == [*kind.parameter_bytes(), 8, 8, 8]


def wrong(kind: str, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> str | None:
    found = MapType.read(kind)
    assert found is not None
    return found.wrong_tensor(
        TensorMap(base=Pointer(segment="weights", offset=0, bytes=size), shape=shape, strides=strides)
    )


def test_tensors_at_their_limits() -> None:
    assert wrong("tensordesc<fp16[64]>", (7,), (), 14) is None
    assert wrong("tensordesc<fp16[64]>", (7,), (), 13) == "a tensor of 14 bytes in 13, wanted as many"
    assert wrong("tensordesc<fp16[1,1,1,1,8]>", (2, 3, 4, 5, 8), (960, 320, 80, 16), 1920) is None
    assert wrong("tensordesc<fp16[1,8]>", (2**31 - 1, 8), (16,), 2**35 - 16) is None
    assert wrong("tensordesc<fp16[1,8]>", (2, 8), (2**40 - 16,), 2**40) is None
    # With gaps: the last byte counts, not where the next row would begin.
    assert wrong("tensordesc<fp16[1,8]>", (2, 8), (2**17 - 16,), 2**17) is None
    assert "131056 bytes with gaps" in str(wrong("tensordesc<fp16[1,8]>", (2, 8), (2**17 - 32,), 2**17 - 16))


def test_the_limits_are_those_of_the_drivers_header() -> None:
    text = header().read_text()
    text = re.sub(r"[\s*]+", " ", text[: text.index("CUresult CUDAAPI cuTensorMapEncodeTiled(")])
    text = text[text.rindex("Create a tensor map descriptor object representing tiled") :]
    assert f"less than or equal to the maximum supported dimensionality of {MAX_RANK}" in text
    assert f"must be non-zero and less than or equal to {MAX_BOX}" in text
    assert "in bytes, must be a multiple of 16 and less than 2^40" in text and MAX_STRIDE == 2**40 - 16
    assert "must be non-zero and less than or equal to 2^32" in text
    rows = re.findall(r"CU_TENSOR_MAP_SWIZZLE_(\d+)B requires? the bounding box inner dimension to be <= (\d+)", text)
    assert rows == [("32", "32"), ("64", "64"), ("128", "128")]
    assert set(SEGMENTS) == {"weights", "arena", "io"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (box(swizzle=16), "Invalid enum value 16"),
        (box(promotion=32), "Invalid enum value 32"),
        (box(fill="nan"), "unknown field `fill`"),
        (lambda g: arg(g, 0, 7).pop("strides"), "missing required field `strides`"),
        (lambda g: arg(g, 0, 7).update(shape=[1.5, 2]), "Expected `int`, got `float`"),
    ],
)
def test_files_of_other_fields(cubins: Path, change: Change, says: str) -> None:
    plain = msgspec.to_builtins(with_map(cubins, *make_graphs(cubins, ARCHITECTURE))[0])
    change(plain)
    with pytest.raises(CoreError) as caught:
        decode_cuda_graphs(msgspec.msgpack.encode(plain), "graphs/g")
    assert says in str(caught.value) and str(caught.value).startswith("graphs/g: ")


def test_a_box_of_no_swizzle_may_have_longer_rows() -> None:
    kind = MapType.read("tensordesc<bf16[16,128]>")
    assert kind is not None
    assert kind.wrong_box(Box(shape=(16, 128), swizzle=0, promotion=0)) is None
