"""What serves a core: one of its targets, on a device that came up, with as many kv pages as that has memory for.

A core's cuda target serves where there is a device for it. Elsewhere its cpu target stands in, if it has one and the operator
does not refuse that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flare import memory
from flare.config import RuntimeSettings
from flare.core.architectures import in_order
from flare.core.directory import Core
from flare.core.manifest import CpuTarget, CudaTarget
from flare.errors import InputError, SettingError
from flare.fallbacks import NO_DEVICE, Fallbacks

if TYPE_CHECKING:
    from flare.replay.cuda_driver import CudaDevice

_log = logging.getLogger("flare.backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A target of a core and the device that runs it.

    `architecture` is what its kernels were compiled for, such as x86-64-v4 or sm_90a; `device` is that for people, with the
    device's name where it has one. `open` takes the memory and returns the replay, which then owns the device; until it is
    called, `close` gives the device back.
    """

    target: CpuTarget | CudaTarget
    architecture: str
    device: str
    kv_pages: int
    open: Callable[[], Any]
    close: Callable[[], None] = lambda: None

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return "cuda" if isinstance(self.target, CudaTarget) else "cpu"


def choose_backend(core: Core, settings: RuntimeSettings, fallbacks: Fallbacks) -> Backend:
    """Returns what will serve the core; steps that the cpu target runs in the place of a device, or in part, are recorded in
    `fallbacks`.

    Raises InputError where nothing here can serve it or there is too little memory for its weights, SettingError where nothing
    may or there is too little for keys and values, and CoreError for a bad core.
    """
    manifest = core.manifest
    if manifest.cuda is None:
        return _cpu(core, settings, fallbacks)
    from flare.replay.cuda_driver import NoDevice, open_device

    try:
        return _cuda(core, manifest.cuda, settings, open_device(in_order(manifest.cuda.architectures)), fallbacks)
    except NoDevice as error:
        reason = str(error)
    if not fallbacks.allowed:
        remedy = "allow the fallback"
        if manifest.cpu is None:
            remedy = f"export the core with --target cpu as well and {remedy}"
        raise SettingError(
            "cpu_fallback", f"no device backend came up and CPU fallback is disabled: {reason}; or {remedy}"
        )
    if manifest.cpu is None:
        raise InputError(
            f"no device backend came up, and core {manifest.model.id} has nothing else to run on: {reason}; "
            "or export the core with --target cpu as well"
        )
    _log.warning("CPU FALLBACK at start: no device backend came up, the core's cpu target serves: %s", reason)
    return _cpu(core, settings, fallbacks, instead_of_device=NO_DEVICE)


def _cpu(core: Core, settings: RuntimeSettings, fallbacks: Fallbacks, *, instead_of_device: str = "") -> Backend:
    from flare.replay.program import choose_isa, cpu_target, open_replay

    target = cpu_target(core.manifest)
    isa = choose_isa(target)
    pages = _pages_here(core, settings, target)

    def open() -> Any:
        return open_replay(
            core,
            threads=settings.threads,
            kv_pages=pages,
            huge_pages=settings.huge_pages,
            isa=isa,
            fallbacks=fallbacks,
            instead_of_device=instead_of_device,
        )

    return Backend(target=target, architecture=isa, device=isa, kv_pages=pages, open=open)


def _cuda(
    core: Core, target: CudaTarget, settings: RuntimeSettings, device: CudaDevice, fallbacks: Fallbacks
) -> Backend:
    from flare.replay.cuda import CudaReplay
    from flare.replay.cuda_program import CudaProgram

    architecture = next(name for name in target.architectures if name == device.architecture)
    try:
        program = CudaProgram.open(core, architecture)
        program.check_shared(device)
        pages = _kv_pages(
            core,
            settings,
            where=device.name,
            free=device.memory()[0],
            reserved=program.reserved_bytes,
            default_share=memory.DEVICE_SHARE,
            page_bytes=target.segments.kv_page_bytes,
        )
        if target.host is not None:
            pages = min(pages, _pages_here(core, settings, target.host.program, program.pinned_bytes))
    except BaseException:
        device.close()
        raise
    return Backend(
        target=target,
        architecture=architecture,
        device=f"{device.name} ({architecture})",
        kv_pages=pages,
        open=lambda: CudaReplay(
            program,
            device=device,
            kv_pages=pages,
            threads=settings.threads,
            huge_pages=settings.huge_pages,
            fallbacks=fallbacks,
        ),
        close=device.close,
    )


def _pages_here(core: Core, settings: RuntimeSettings, target: CpuTarget, pinned: int = 0) -> int:
    """The number of kv pages that this machine has memory for beside a program of the processor and so many pinned bytes."""
    segments = target.segments
    return _kv_pages(
        core,
        settings,
        where="this machine",
        free=memory.free_memory(),
        reserved=segments.weights_bytes + segments.arena_bytes + segments.io_bytes + pinned,
        default_share=memory.HOST_SHARE,
        page_bytes=segments.kv_page_bytes,
    )


def _kv_pages(
    core: Core,
    settings: RuntimeSettings,
    *,
    where: str,
    free: int,
    reserved: int,
    default_share: float,
    page_bytes: int,
) -> int:
    limits = core.manifest.limits
    return memory.choose_kv_pages(
        settings.kv_memory,
        where=where,
        free=free,
        reserved=reserved,
        default_share=default_share,
        page_bytes=page_bytes,
        page_tokens=limits.page_tokens,
        slots=limits.slots,
        max_context=limits.max_context,
    )
