"""The layer over the driver: which device is taken, what its errors mean, and that nothing it gave out is left behind."""

from __future__ import annotations

import dataclasses
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from flare.core.architectures import architecture_for, kernels_remedy
from flare.core.cuda_graph import Bucket, KernelNode, Pointer, Scalar
from flare.errors import CoreError, InputError, ReplayDead
from flare.replay import cuda_driver
from flare.replay.cuda_driver import FATAL, DeviceError, NoDevice, open_device
from flare.replay.cuda_executables import GraphBuilder, load_functions
from tests.support.cuda_cubins import assemble
from tests.support.fake_cuda.library import FakeCuda, header
from tests.support.tiny_cuda.core import tiny_graphs, tiny_program

ALL = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]


@pytest.mark.parametrize(
    "offered, capability, taken",
    [
        (ALL, (8, 0), "sm_80"),
        (ALL, (8, 6), "sm_86"),
        (ALL, (8, 7), "sm_86"),
        (ALL, (8, 9), "sm_89"),
        (["sm_80"], (8, 9), "sm_80"),
        (["sm_89"], (8, 6), None),
        (ALL, (9, 0), "sm_90a"),
        (["sm_80", "sm_89"], (9, 0), None),
        (ALL, (10, 0), "sm_100a"),
        (ALL, (10, 3), "sm_103a"),
        (["sm_100a"], (10, 3), None),
        (ALL, (12, 0), "sm_120a"),
        (ALL, (12, 1), None),
        (ALL, (7, 5), None),
        ([], (9, 0), None),
    ],
)
def test_cubins_run_where_nvidia_says(offered: list[str], capability: tuple[int, int], taken: str | None) -> None:
    assert architecture_for(offered, capability) == architecture_for(reversed(offered), capability) == taken


def test_fatal_results_are_those_after_which_the_header_wants_a_new_process() -> None:
    """The driver's header says of each such result that the process must be terminated and relaunched."""
    comments = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*(CUDA_ERROR_\w+)\s*=", header().read_text(), re.DOTALL)
    assert len(comments) > 80
    found = {name for comment, name in comments if re.search(r"must be terminated[\s*]+and relaunched", comment)}
    assert len(found) > 8
    assert found <= FATAL
    assert FATAL <= {name for _, name in comments}


def test_a_device_is_opened_and_gives_all_back(fake: FakeCuda) -> None:
    fake.set("memory", 1 << 20)
    device = open_device(ALL)
    assert (device.name, device.capability, device.architecture) == ("fake device 0", (9, 0), "sm_90a")
    assert (device.memory(), device.driver_version()) == ((1 << 20, 1 << 20), "13.0")
    address = device.allocate(4096, "weights")
    assert address % 256 == 0 and device.memory()[0] == (1 << 20) - 4096
    assert device.allocate(0, "arena") == 0
    device.allocate_host(100, "host")
    assert sorted(size for _, size in fake.blocks()) == [100, 4096]
    device.close()
    device.close()
    assert not fake.blocks() and not fake.contexts()


@pytest.mark.parametrize(
    "memory, pinned, text",
    [
        (4095, "", "weights: 4096 bytes of memory of fake device 0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory; "
         "free some memory of the device"),
        (1 << 20, "cuMemAllocHost=2", "host: 100 bytes of pinned host memory: cuMemAllocHost: CUDA_ERROR_OUT_OF_MEMORY: "
         "injected into cuMemAllocHost_v2; free some memory of this machine"),
    ],
)  # fmt: skip
def test_memory_that_is_not_there(fake: FakeCuda, memory: int, pinned: str, text: str) -> None:
    fake.set("memory", memory)
    fake.fail(pinned)
    device = open_device(ALL)
    with pytest.raises(InputError) as error:
        device.allocate(4096, "weights")
        device.allocate_host(100, "host")
    assert str(error.value) == text
    device.close()
    assert not fake.blocks()


def refusal(*offered: str) -> str:
    with pytest.raises(NoDevice) as error:
        open_device(offered or ALL)
    assert isinstance(error.value, InputError) and "\n" not in str(error.value)
    return str(error.value)


def test_no_device_is_said_in_one_line_each(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set("devices", 0)
    assert refusal() == (
        "no CUDA device: cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected; see nvidia-smi and "
        "CUDA_VISIBLE_DEVICES"
    )
    fake.reset()
    fake.fail("cuInit=803")
    assert "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: injected into cuInit" in refusal()
    fake.set("devices", 2)
    fake.set("capability", 75)
    assert refusal("sm_80", "sm_90a") == (
        "no CUDA device for this core: it has kernels for sm_80, sm_90a, here there is fake device 0 (compute capability "
        "7.5), fake device 1 (compute capability 7.5); no architecture that cores are exported for runs there (sm_80, sm_86, "
        "sm_89, sm_90a, sm_100a, sm_103a, sm_120a)"
    )
    for capability, name in ((100, "sm_100a"), (89, "sm_89"), (87, "sm_86")):
        fake.set("capability", capability)
        assert refusal("sm_90a").endswith(f"; export the core with {name} among its --target cuda")
    fake.reset()
    fake.set("driver", 12020)
    assert refusal() == ("no CUDA device: the driver supports CUDA 12.2, at least 12.3 is needed; install a newer one")
    fake.set("driver", 12030)
    open_device(ALL).close()
    for function in ("cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate"):
        fake.fail(f"{function}=2")
        text = refusal()
        assert text.startswith(f"fake device 0: cannot be used: {function}: CUDA_ERROR_OUT_OF_MEMORY"), function
        assert text.endswith("; free some memory of the device") and not fake.contexts()
    fake.fail("cuDevicePrimaryCtxRetain=46")
    assert refusal() == (
        "fake device 0: cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE: injected into "
        "cuDevicePrimaryCtxRetain; another process may have it to itself, or its compute mode forbids contexts "
        "(nvidia-smi says which): end that, or name another device in CUDA_VISIBLE_DEVICES"
    )
    open_device(ALL).close()
    fake.fail("cuDeviceGetAttribute=101")
    assert refusal().startswith("CUDA device 0 cannot be used: cuDeviceGetAttribute: CUDA_ERROR_INVALID_DEVICE")


def test_a_remedy_names_an_architecture_of_each_device() -> None:
    assert kernels_remedy((10, 0), (12, 1), (9, 0), (10, 0)) == (
        "export the core with sm_100a or sm_90a among its --target cuda"
    )


@pytest.mark.parametrize(
    ("capability", "architecture", "kib"), [(80, "sm_80", 163), (86, "sm_80", 99), (89, "sm_86", 99)]
)
def test_kernels_of_an_older_architecture_may_take_too_much(
    fake: FakeCuda, tiny_kernels: Path, tmp_path: Path, capability: int, architecture: str, kib: int
) -> None:
    """The check says beforehand what the driver would refuse: the static buffer has 100 bytes."""
    image = assemble(tmp_path, "ptxas", architecture)
    graphs, _ = tiny_graphs(tiny_kernels)
    fake.set("capability", capability)
    device = open_device([architecture])
    try:
        assert device.shared_bytes == kib << 10
        for shared, fits in (((kib << 10) - 100, True), ((kib << 10) - 99, False)):
            kernel = replace(graphs.kernels[0], cubin="k.cubin", name="plain", source="a.tile", shared=shared)
            program = tiny_program(tiny_kernels, tmp_path / "weights")
            program = dataclasses.replace(
                program,
                graphs=replace(graphs, arch=architecture, kernels=[kernel]),
                cubins={"k.cubin": image},
            )
            if fits:
                program.check_shared(device)
                assert device.load_kernels(image, {"plain": shared}, "k.cubin")
                continue
            with pytest.raises(NoDevice) as error:
                program.check_shared(device)
            assert str(error.value) == (
                f"fake device 0 (compute capability {capability // 10}.{capability % 10}) gives a block {kib << 10} bytes of "
                f"shared memory, kernel a.tile of {architecture} takes {(kib << 10) + 1}; export the core with "
                f"sm_{capability} among its --target cuda"
            )
            with pytest.raises(CoreError, match="cuFuncSetAttribute"):
                device.load_kernels(image, {"plain": shared}, "k.cubin")
    finally:
        device.close()


def test_static_shared_memory_counts_among_what_needs_no_asking(
    fake: FakeCuda, tiny_kernels: Path, tmp_path: Path
) -> None:
    """A function has 48 KiB without asking, static ones included: 50 more are too many for it, and are asked for."""
    image, shared = assemble(tmp_path, "ptxas", "sm_80"), (48 << 10) - 50
    fake.set("capability", 80)
    graphs, _ = tiny_graphs(tiny_kernels)
    kernel = replace(graphs.kernels[0], cubin="k", name="plain", threads=64, shared=shared, signature={})
    none = Pointer(segment="none", offset=0, bytes=0)
    node = KernelNode(
        kernel=0, grid=(1, 1, 1), args=[none, Scalar(type="i32", value=0), none, none], label="plain", after=[]
    )
    device = open_device(["sm_80"])
    try:
        only = replace(graphs, kernels=[kernel])
        builder = GraphBuilder(device, only, load_functions(device, only, {"k": image}), {"none": 0})
        assert builder.build(Bucket(tokens=1, rows=1, nodes=[node]), "step")
    finally:
        device.close()


def test_no_driver_and_no_bindings_are_told_apart(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> Any:
        raise RuntimeError("libcuda is not there\nsecond line")  # as the bindings do at their first call

    with monkeypatch.context() as patch:
        patch.setattr(cuda_driver, "load_bindings", lambda: SimpleNamespace(cuInit=missing))
        assert refusal() == "no CUDA driver: libcuda.so.1 does not load; install NVIDIA's driver"
    with monkeypatch.context() as patch:
        for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            patch.setitem(sys.modules, name, None)
        text = refusal()
        assert text.startswith("the cuda target needs cuda-python, which does not import here (")
        assert text.endswith("): pip install 'flare-ignition[cuda]'")
    import cuda.bindings

    with monkeypatch.context() as patch:
        patch.setattr(cuda.bindings, "__version__", "12.9.4")
        assert refusal() == "cuda-bindings 12.9.4: at least 13.0 is needed: pip install 'flare-ignition[cuda]'"


def test_cubins_that_the_driver_refuses(fake: FakeCuda, tiny_kernels: Path) -> None:
    _, cubins = tiny_graphs(tiny_kernels)
    file, image = next(iter(cubins.items()))
    fake.set("capability", 80)
    device = open_device(["sm_80"])
    remedy = "; export the core for this device, or install a newer driver"
    with pytest.raises(CoreError) as error:
        device.load_kernels(image, {"write": 0}, file)
    assert str(error.value) == (
        f"{file}: the driver (CUDA 13.0) of fake device 0 refuses it: cuLibraryLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU: "
        f"a cubin for sm_90 on a device of 80{remedy}"
    )
    with pytest.raises(CoreError, match=r"x\.cubin: .* refuses it: cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE"):
        device.load_kernels(b"no ELF", {"write": 0}, "x.cubin")
    device.close()
    fake.reset()
    device = open_device(ALL)
    with pytest.raises(CoreError, match=r"kernel 'other': .* cuLibraryGetKernel: CUDA_ERROR_NOT_FOUND"):
        device.load_kernels(image, {"other": 0}, file)
    with pytest.raises(CoreError, match=r"kernel 'write' with 300000 bytes of shared memory: .* cuFuncSetAttribute"):
        device.load_kernels(image, {"write": 300000}, file)
    assert device.load_kernels(image, {"write": 200000}, file).keys() == {"write"}
    fake.fail("cuLibraryLoadData=2")
    with pytest.raises(InputError, match="cuLibraryLoadData: CUDA_ERROR_OUT_OF_MEMORY"):
        device.load_kernels(image, {"write": 0}, file)
    device.close()


def test_errors_are_of_the_call_or_of_the_context(fake: FakeCuda) -> None:
    device = open_device(ALL)
    fake.fail("cuStreamSynchronize=701")
    with pytest.raises(DeviceError) as error:
        device.synchronise()
    assert (error.value.result, device.lost) == ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "")
    device.synchronise()
    fake.fail("cuStreamSynchronize=700")
    lost = (
        "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS: injected into cuStreamSynchronize; the device is lost to this "
        "process, start it again"
    )
    with pytest.raises(ReplayDead) as dead:
        device.synchronise()
    assert str(dead.value) == lost == device.lost
    device.close()


@pytest.mark.parametrize("call", ["synchronise", "attach"])
def test_a_result_that_the_bindings_do_not_know_loses_the_device(fake: FakeCuda, call: str) -> None:
    """A newer driver's: bindings raise, and not what others of ours do."""
    device = open_device(ALL)
    fake.fail({"synchronise": "cuStreamSynchronize=12345", "attach": "cuMemAlloc=12345"}[call])
    with pytest.raises(ReplayDead) as dead:
        device.synchronise() if call == "synchronise" else device.allocate(64, "weights")
    function = {"synchronise": "cuStreamSynchronize", "attach": "cuMemAlloc"}[call]
    assert str(dead.value) == device.lost and "\n" not in device.lost
    assert device.lost.startswith(f"{function}: a result that this cuda-bindings does not know (12345")
    assert device.lost.endswith("); the device is lost to this process, start it again")
    device.close()


def test_unknown_results_at_the_ends(fake: FakeCuda) -> None:
    fake.fail("cuInit=12345")
    assert refusal() == (
        "no CUDA device: cuInit: a result that this cuda-bindings does not know (12345 is not a valid CUresult); see "
        "nvidia-smi and CUDA_VISIBLE_DEVICES"
    )
    device = open_device(ALL)
    device.allocate(64, "weights")
    fake.fail("cuMemFree=12345")
    device.close()
    assert not fake.contexts()


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (ValueError("12345 is not a valid CUresult"), True),
        (KeyError(12345), True),
        (ValueError("12345 is not a valid CUdevice_attribute"), False),
        (ValueError("byte must be in range(0, 256)"), False),
        (KeyError("flags"), False),
    ],
)
def test_what_bindings_say_of_arguments_is_no_result(fake: FakeCuda, error: Exception, unknown: bool) -> None:
    """It is a fault of ours, which the device survives and nothing hides."""

    def raising(*_: Any) -> None:
        raise error

    device = open_device(ALL)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "api", SimpleNamespace(cuStreamSynchronize=raising, cuMemFreeHost=raising))
        with nullcontext() if unknown else pytest.raises(type(error)):
            device.unpin(0)
        with pytest.raises(ReplayDead if unknown else type(error)) as caught:
            device.synchronise()
    assert bool(device.lost) == unknown == (caught.value is not error)
    device.close()


def test_a_failure_that_stays_loses_the_device(fake: FakeCuda) -> None:
    """Its result need not be one of those known to be fatal: a driver that has lost a device may call that anything."""
    device = open_device(ALL)
    fake.fail("cuStreamSynchronize=304@2")
    with pytest.raises(DeviceError):
        device.synchronise() or device.synchronise()
    device.settle()
    assert not device.lost
    fake.fail("cuStreamSynchronize=304@1+")
    device.settle()
    assert device.lost == (
        "cuStreamSynchronize: CUDA_ERROR_OPERATING_SYSTEM: injected into cuStreamSynchronize; the device is lost to this "
        "process, start it again"
    )
    device.close()
