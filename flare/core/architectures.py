"""The architectures of CUDA devices that kernels are compiled for, and what each has."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Architecture = Literal["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an architecture has (CUDA C++ Programming Guide, "Compute Capabilities").

    shared_bytes: most shared memory of a block. matrix: the instruction that multiplies tiles, each of which rounds in its own
    way: `mma.sync` of one warp, `wgmma` of four, `tcgen05` in tensor memory. fp8: it widens 8-bit floats. programmatic: its
    graphs may have programmatic edges. tensor_maps: it copies boxes of tensors.
    """

    shared_bytes: int
    matrix: Literal["mma.sync", "wgmma", "tcgen05"]
    fp8: bool
    programmatic: bool
    tensor_maps: bool


ABILITIES: Mapping[str, Abilities] = {
    "sm_80": Abilities(163 << 10, "mma.sync", fp8=False, programmatic=False, tensor_maps=False),
    "sm_86": Abilities(99 << 10, "mma.sync", fp8=False, programmatic=False, tensor_maps=False),
    "sm_89": Abilities(99 << 10, "mma.sync", fp8=True, programmatic=False, tensor_maps=False),
    "sm_90a": Abilities(227 << 10, "wgmma", fp8=True, programmatic=True, tensor_maps=True),
    "sm_100a": Abilities(227 << 10, "tcgen05", fp8=True, programmatic=True, tensor_maps=True),
    "sm_103a": Abilities(227 << 10, "tcgen05", fp8=True, programmatic=True, tensor_maps=True),
    "sm_120a": Abilities(99 << 10, "mma.sync", fp8=True, programmatic=True, tensor_maps=True),
}
"""By architecture, the oldest first."""


def in_order(names: Container[str]) -> list[Architecture]:
    """Returns those of the architectures that are among the names, the oldest first: the order in which all texts have them."""
    return [name for name in get_args(Architecture) if name in names]


def architecture_for(available: Iterable[str], capability: tuple[int, int]) -> str | None:
    """Returns which of the architectures' cubins a device of that compute capability runs fastest, None if it runs none.

    Cubins run on devices of their own major version with the same or a greater minor one; those of an architecture with the
    suffix `a` on its own capability alone (CUDA C++ programming guide, binary compatibility and family-specific features).
    """
    major, minor = capability
    best: tuple[int, bool, str] | None = None
    for name in available:
        exact = name.endswith("a")
        number = int(name.removeprefix("sm_").removesuffix("a"))
        runs = (number == 10 * major + minor) if exact else number // 10 == major and number % 10 <= minor
        if runs:
            best = max(best or (0, False, ""), (number, exact, name))
    return best and best[2]


def kernels_remedy(*capabilities: tuple[int, int]) -> str:
    """Returns what gives a core kernels for devices of any of these compute capabilities."""
    named = dict.fromkeys(architecture_for(ABILITIES, capability) for capability in capabilities)
    if known := [name for name in named if name is not None]:
        return f"export the core with {' or '.join(known)} among its --target cuda"
    return f"no architecture that cores are exported for runs there ({', '.join(ABILITIES)})"
