"""What an export tells at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from flare.core.manifest import CpuTarget, CudaSegments, CudaTarget, Logprobs
from flare.core.oracle import Deviation
from ignition.inspect import by_part, logprobs_text, size

LISTED_FILES = 4
"""How many of a core's files the report names, the largest first."""


@dataclass(frozen=True, slots=True)
class ArchitectureReport:
    """What an export made for one architecture of devices: numbers of kernels and cubins, bytes of the cubins, numbers of nodes
    by kind of graph and bucket (tokens of a step, rows of a draw or score), and the seconds of all compilers together."""

    architecture: str
    kernels: int
    cubins: int
    cubin_bytes: int
    nodes: Mapping[str, Mapping[int, int]]
    seconds: float

    def text(self) -> str:
        """The report's line."""
        counts = "; ".join(
            f"{kind} {', '.join(f'{bucket}: {count}' for bucket, count in buckets.items())}"
            for kind, buckets in self.nodes.items()
        )
        return (
            f"{self.architecture:<9} {self.kernels} kernels in {self.cubins} cubins ({size(self.cubin_bytes)}, "
            f"{self.seconds:.1f} s of compiling); nodes by bucket: {counts}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What an export did: seconds by stage, bytes by file, and what people should know."""

    output: Path
    core_id: str
    seconds: dict[str, float]
    files: dict[str, int]
    targets: Sequence[CpuTarget | CudaTarget]
    deviation: Deviation | None
    isas: list[str]
    architectures: Sequence[ArchitectureReport]
    logprobs: Logprobs
    notices: list[str]

    def text(self) -> str:
        """The report as lines for people."""
        times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        largest = sorted(self.files.items(), key=lambda file: -file[1])[:LISTED_FILES]
        files = ", ".join(f"{name} {size(count)}" for name, count in largest)
        if len(self.files) > LISTED_FILES:
            files += f", and {len(self.files) - LISTED_FILES} more"
        proof = "the reference's answers are stored; a device's cannot be had without one"
        if self.deviation is not None:
            proof = (
                f"mean KL {self.deviation.mean_kl:.2g}, top-1 agreement {self.deviation.top1_agreement:.3f} "
                f"against the reference on the same weights ({', '.join(self.isas)})"
            )
        return "\n".join(
            [
                f"core      {self.output}  (id {self.core_id[:16]})",
                f"size      {size(sum(self.files.values()))}: {files}",
                f"weights   {by_part(self.targets, _weights)}",
                f"memory    {by_part(self.targets, _memory)}",
                *(architecture.text() for architecture in self.architectures),
                f"proof     {proof}",
                f"logprobs  {logprobs_text(self.logprobs.alternatives, self.logprobs.explicit_ids, self.logprobs.prompt)}",
                f"seconds   {sum(self.seconds.values()):.1f}: {times}",
                *(f"notice    {line}" for line in self.notices),
                f"next      flare serve {quote(str(self.output))}",
            ]
        )


def _weights(target: CpuTarget | CudaTarget) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sorted(target.weights.formats.items())) or "none"


def _memory(target: CpuTarget | CudaTarget) -> str:
    """What a server takes beside weights and kv pages."""
    segments = target.segments
    found = f"arena {size(segments.arena_bytes)}, io {size(segments.io_bytes)}"
    return f"{found}, host {size(segments.host_bytes)}" if isinstance(segments, CudaSegments) else found
