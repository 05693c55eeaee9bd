"""What an export tells at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from flare.core.manifest import Logprobs
from flare.core.oracle import Deviation
from ignition.inspect import logprobs_text, size


@dataclass(frozen=True, slots=True)
class Report:
    """What an export did: seconds by stage, bytes by file, and what people should know."""

    output: Path
    core_id: str
    seconds: dict[str, float]
    files: dict[str, int]
    formats: dict[str, int]
    deviation: Deviation
    isas: list[str]
    logprobs: Logprobs
    notices: list[str]

    def text(self) -> str:
        """The report as lines for people."""
        times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        files = ", ".join(
            f"{name} {size(count)}" for name, count in sorted(self.files.items(), key=lambda f: -f[1])[:4]
        )
        formats = ", ".join(f"{name} {size(count)}" for name, count in sorted(self.formats.items()))
        return "\n".join(
            [
                f"core      {self.output}  (id {self.core_id[:16]})",
                f"size      {size(sum(self.files.values()))}: {files}",
                f"weights   {formats}",
                f"proof     mean KL {self.deviation.mean_kl:.2g}, top-1 agreement {self.deviation.top1_agreement:.3f} "
                f"against the reference on the same weights ({', '.join(self.isas)})",
                f"logprobs  {logprobs_text(self.logprobs.alternatives, self.logprobs.explicit_ids, self.logprobs.prompt)}",
                f"seconds   {sum(self.seconds.values()):.1f}: {times}",
                *(f"notice    {line}" for line in self.notices),
                f"next      flare serve {quote(str(self.output))}",
            ]
        )
