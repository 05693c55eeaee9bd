"""The CUDA driver, as far as a replay needs it: one device, its memory, one stream, loaded kernels, and what errors mean.

Everything goes through `cuda.bindings.driver`, an optional dependency that is imported when a device is opened and not before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any

from flare.core.architectures import architecture_for, kernels_remedy
from flare.errors import CoreError, FlareError, InputError, ReplayDead
from flare.replay.cuda_results import FATAL, REFUSED_IMAGE, UnknownResult, described, given

MIN_DRIVER = 12030
"""CUDA version, as the driver writes it, that first has all functions used here: edges with data in cuGraphAddNode."""


class NoDevice(InputError):
    """No CUDA device can be used here: no bindings, no driver, no device, or none that the core has kernels for, or none that
    can run them. The caller may serve another target of the core instead."""


class DeviceError(FlareError):
    """A call of the driver failed, and the device works on: what the call was for did not happen. `result` is the driver's name
    of the error."""

    def __init__(self, message: str, result: str) -> None:
        super().__init__(message)
        self.result = result


LOST = "the device is lost to this process, start it again"
"""What follows the failure that took the context."""

KV_REMEDY = "ask for less kv memory, or free some"
"""Where memory is short that kv pages take too."""

_SEE = "see nvidia-smi and CUDA_VISIBLE_DEVICES"

DEVICE_REMEDY = "free some memory of the device"


class OutOfMemory(InputError):
    """A call of the driver found too little memory. `message` is the line without what helps, which is `KV_REMEDY` unless who
    called knows better."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; {KV_REMEDY}")
        self.message = message


def load_bindings() -> ModuleType:
    """Returns `cuda.bindings.driver`. Raises NoDevice when the package is missing or too old."""
    try:
        import cuda.bindings
        import cuda.bindings.driver as api
    except ImportError as error:
        raise NoDevice(
            f"the cuda target needs cuda-python, which does not import here ({_line(error)}): "
            "pip install 'flare-ignition[cuda]'"
        ) from None
    version = cuda.bindings.__version__
    if int(version.partition(".")[0]) < 13:
        raise NoDevice(f"cuda-bindings {version}: at least 13.0 is needed: pip install 'flare-ignition[cuda]'")
    return api


class CudaDevice:
    """A device with its primary context, and one stream on which everything runs, in order. One thread at a time uses it.

    What it gives out (memory, kernels, executable graphs) it frees in `close`, the last first. Every method raises ReplayDead
    when the context is lost, InputError when memory is short, otherwise DeviceError, and what its own text says.
    """

    def __init__(self, api: ModuleType, handle: Any) -> None:
        self.api = api
        self.architecture = ""
        """The core's architecture that `open_device` chose."""
        self.lost = ""
        """Why the context is lost; empty while it is not."""
        self.waits = 0
        """Begins and ends of waits for what was started, for other threads to watch: odd while one is under way."""
        self.name = "CUDA device"
        self.context: Any = None
        self.stream: Any = None
        self._handle = handle
        self._threads = (
            threading.local()
        )  # those whose context is this one; a thread's number would be another's after it
        self._owned = ExitStack()
        attribute = api.CUdevice_attribute
        self.capability: tuple[int, int] = tuple(
            self._attribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"))
            for part in ("MAJOR", "MINOR")
        )
        self.shared_bytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        """Most shared memory of a block, static and dynamic together."""
        name = self.call("cuDeviceGetName", 256, handle)
        self.name = bytes(name).split(b"\0")[0].decode(errors="replace").strip()

    def __str__(self) -> str:
        """The device with its compute capability, for messages."""
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"

    def start(self) -> None:
        """Takes the primary context and makes the stream. Raises NoDevice if the device cannot be had (in exclusive use, out of
        memory)."""
        try:
            self.context = self.call("cuDevicePrimaryCtxRetain", self._handle)
            self._owned.callback(self._release, "cuDevicePrimaryCtxRelease", self._handle)
            self.attach()
            self.stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            self._owned.callback(self._release, "cuStreamDestroy", self.stream)
        except FlareError as error:
            self.close()
            said = str(error)
            if isinstance(error, OutOfMemory):
                said = f"{error.message}; {DEVICE_REMEDY}"
            elif isinstance(error, DeviceError) and error.result == "CUDA_ERROR_DEVICE_UNAVAILABLE":
                said = (
                    f"{error}; another process may have it to itself, or its compute mode forbids contexts "
                    "(nvidia-smi says which): end that, or name another device in CUDA_VISIBLE_DEVICES"
                )
            raise NoDevice(f"{self.name}: cannot be used: {said}") from None

    def attach(self) -> None:
        """Makes the context the calling thread's, where it is not yet."""
        if not hasattr(self._threads, "attached"):
            self.call("cuCtxSetCurrent", self.context)
            self._threads.attached = True

    def close(self) -> None:
        """Frees everything, when the work under way is done. Closing twice is fine, and so is closing a lost context."""
        if self.context is not None and not self.lost:
            with suppress(FlareError):  # nobody waits for what runs any more, so its failure is nobody's
                self.call("cuCtxSetCurrent", self.context)
                if self.stream is not None:
                    self.synchronise()
        self.context = None
        self._owned.close()

    def memory(self) -> tuple[int, int]:
        """Returns the device's free memory and all of it, in bytes."""
        self.attach()
        free, total = self.call("cuMemGetInfo")
        return free, total

    def driver_version(self) -> str:
        """Returns the CUDA version that the driver supports, such as "13.0"."""
        return _dotted(self.call("cuDriverGetVersion"))

    def allocate(self, size: int, what: str, remedy: str = DEVICE_REMEDY) -> int:
        """Returns the address of `size` bytes of device memory, 256-byte aligned, for as long as the device is open; 0 for no
        bytes. `remedy` says what helps where there is too little."""
        if not size:
            return 0
        address = int(self._taken("cuMemAlloc", size, f"{what}: {size} bytes of memory of {self.name}", remedy))
        self._owned.callback(self._release, "cuMemFree", address)
        return address

    def allocate_host(self, size: int, what: str) -> int:
        """As `pin`, for as long as the device is open, and zeroed."""
        address = self.pin(size, what)
        ctypes.memset(address, 0, size)
        self._owned.callback(self._release, "cuMemFreeHost", address)
        return address

    def pin(self, size: int, what: str) -> int:
        """Returns the address of `size` bytes of pinned host memory, of any content, which go back to `unpin`."""
        what = f"{what}: {size} bytes of pinned host memory"
        return int(self._taken("cuMemAllocHost", size, what, "free some memory of this machine"))

    def unpin(self, address: int) -> None:
        """Frees what `pin` gave."""
        self._release("cuMemFreeHost", address)

    def load_kernels(self, image: bytes, kernels: Mapping[str, int], file: str) -> dict[str, Any]:
        """Loads a cubin; returns the functions of the kernels named, each with as many bytes of dynamic shared memory allowed.

        Raises CoreError when the driver refuses the cubin, lacks a kernel in it, or has not so much shared memory.
        """
        self.attach()
        where = file
        try:
            library = self.call("cuLibraryLoadData", image, None, None, 0, None, None, 0)
            self._owned.callback(self._release, "cuLibraryUnload", library)
            functions = {}
            for name, shared in kernels.items():
                where = f"{file}: kernel {name[:80]!r}"
                kernel = self.call("cuLibraryGetKernel", library, name.encode())
                function = functions[name] = self.call("cuKernelGetFunction", kernel)
                if shared:  # without asking, a function has 48 KiB less its static ones
                    limit = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    where = f"{where} with {shared} bytes of shared memory"
                    # of the function, which nodes launch: a kernel's attribute is another, which a function's overrides
                    self.call("cuFuncSetAttribute", function, limit, shared)
        except DeviceError as error:
            if error.result not in REFUSED_IMAGE:
                raise
            raise CoreError(
                f"{where}: the driver (CUDA {self.driver_version()}) of {self.name} refuses it: {error}; "
                "export the core for this device, or install a newer driver"
            ) from None
        return functions

    def instantiate(self, graph: Any) -> Any:
        """Returns the executable form of a built graph, uploaded to the device, for as long as the device is open."""
        executable = self.call("cuGraphInstantiate", graph, 0)
        self._owned.callback(self._release, "cuGraphExecDestroy", executable)
        self.call("cuGraphUpload", executable, self.stream)
        return executable

    def launch(self, executable: Any) -> None:
        """Starts an executable graph on the stream."""
        self.call("cuGraphLaunch", executable, self.stream)

    def upload(self, target: int, source: int, size: int) -> None:
        """Starts a copy from pinned host memory; neither side may change until `synchronise`."""
        self.call("cuMemcpyHtoDAsync", target, source, size, self.stream)

    def download(self, target: int, source: int, size: int) -> None:
        """Starts a copy to pinned host memory; neither side may change until `synchronise`."""
        self.call("cuMemcpyDtoHAsync", target, source, size, self.stream)

    def synchronise(self) -> None:
        """Waits until everything that was started is done."""
        self.waits += 1
        try:
            self.call("cuStreamSynchronize", self.stream)
        finally:
            self.waits += 1

    def settle(self) -> None:
        """Waits after a failure, raising nothing: what was started uses memory that is to be freed. Where that fails too, the
        failure is one that stays, whatever the driver calls it: then the device is lost."""
        if self.stream is None or self.lost:
            return
        try:
            self.synchronise()
        except FlareError as error:
            self.lost = self.lost or f"{error}; {LOST}"

    def read(self, target: int, source: int, size: int) -> None:
        """Copies device memory to any host memory, and waits for that; nothing may run on the stream."""
        self.call("cuMemcpyDtoH", target, source, size)

    def event(self) -> Any:
        """Returns a new event, for as long as the device is open."""
        event = self.call("cuEventCreate", self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        self._owned.callback(self._release, "cuEventDestroy", event)
        return event

    def record(self, event: Any) -> None:
        """Lets the event happen when everything that was started before is done."""
        self.call("cuEventRecord", event, self.stream)

    def wait(self, event: Any) -> None:
        """Waits until the event, as it was recorded last, has happened."""
        self.call("cuEventSynchronize", event)

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the driver and returns what it gives besides its result: nothing, one value, or a tuple."""
        try:
            found = given(self.api, function, *arguments)
        except UnknownResult as error:  # it may be one that stays
            self.lost = f"{error}; {LOST}"
            raise ReplayDead(self.lost) from None
        self._check(function, found)
        return found[1] if len(found) == 2 else found[1:]

    def function(self, name: str, prototype: Any) -> Callable[..., None]:
        """Returns a function of the driver that the bindings have in no usable form, by its ctypes type. It raises as `call`
        does."""
        address, _ = self.call("cuGetProcAddress", name.encode(), MIN_DRIVER, 0)
        function, known = prototype(address), {int(result): result for result in self.api.CUresult}

        def checked(*arguments: Any) -> None:
            result = function(*arguments)
            self._check(name, (known.get(result, result),))

        return checked

    def _check(self, function: str, found: tuple[Any, ...]) -> None:
        result = found[0]
        if result:
            raise self._error(function, result)

    def _error(self, function: str, result: Any) -> FlareError:
        name, message = described(self.api, function, result)
        if name == "CUDA_ERROR_OUT_OF_MEMORY":
            return OutOfMemory(message)
        if name not in FATAL:
            return DeviceError(message, name)
        self.lost = f"{message}; {LOST}"
        return ReplayDead(self.lost)

    def _taken(self, function: str, size: int, what: str, remedy: str) -> Any:
        self.attach()
        try:
            return self.call(function, size)
        except OutOfMemory as error:
            raise InputError(f"{what}: {error.message}; {remedy}") from None

    def _release(self, function: str, handle: Any) -> None:
        """Frees one thing. What a lost context does not free, the end of the process does."""
        if not self.lost:
            with suppress(UnknownResult):  # as other results of freeing, which are not looked at
                given(self.api, function, handle)

    def _attribute(self, attribute: Any) -> int:
        return self.call("cuDeviceGetAttribute", attribute, self._handle)


def open_device(architectures: Iterable[str]) -> CudaDevice:
    """Opens the first device, in the driver's order, that runs kernels of one of the core's architectures; its `architecture`
    is the best of them. CUDA_VISIBLE_DEVICES says which devices there are, as everywhere.

    Raises NoDevice, with the reason, when there is none.
    """
    offered = list(architectures)
    api = load_bindings()
    try:
        result = given(api, "cuInit", 0)[0]
    except RuntimeError:
        raise NoDevice("no CUDA driver: libcuda.so.1 does not load; install NVIDIA's driver") from None
    except UnknownResult as error:
        raise NoDevice(f"no CUDA device: {error}; {_SEE}") from None
    if result:
        raise NoDevice(f"no CUDA device: {described(api, 'cuInit', result)[1]}; {_SEE}")
    version = api.cuDriverGetVersion()[1]
    if version < MIN_DRIVER:
        found, least = _dotted(version), _dotted(MIN_DRIVER)
        raise NoDevice(
            f"no CUDA device: the driver supports CUDA {found}, at least {least} is needed; install a newer one"
        )
    seen: list[CudaDevice] = []
    for ordinal in range(api.cuDeviceGetCount()[1]):
        try:
            device = CudaDevice(api, api.cuDeviceGet(ordinal)[1])
        except FlareError as error:
            raise NoDevice(f"CUDA device {ordinal} cannot be used: {error}") from None
        architecture = architecture_for(offered, device.capability)
        if architecture is not None:
            device.architecture = architecture
            device.start()
            return device
        seen.append(device)
    raise NoDevice(
        f"no CUDA device for this core: it has kernels for {', '.join(offered) or 'nothing'}, here there is "
        f"{', '.join(map(str, seen)) or 'none'}; {kernels_remedy(*(device.capability for device in seen))}"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
