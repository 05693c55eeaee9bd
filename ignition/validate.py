"""`ignition validate`: accepts or refuses a core. Every check is named, timed and reported; none needs torch.

The checks run in the order in which they build on each other, and a core is good only if all of them pass: structure and
checksums of every file, the weights' headers, the libraries, the graphs against segments and kernels (those of a cuda target
once for each architecture, behind its host part), the tokenizer, the chat template, and the oracle's answers on every
instruction set level that this machine can run. What only a device can show is a check that was not run, and says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flare.core.architectures import Architecture, in_order
from flare.core.directory import Core, open_core, read_manifest, verify_weights
from flare.core.graph import Graph, check_graph
from flare.core.manifest import CpuTarget, CudaTarget, KernelLibrary, Manifest
from flare.core.oracle import read_oracle
from flare.errors import CoreError, FlareError, InputError
from flare.replay.program import cpu_target
from flare.tables import check_tables
from ignition.inspect import by_part


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what it found, its seconds. `status` is passed, failed or not_run."""

    name: str
    status: str
    detail: str
    seconds: float


@dataclass(slots=True)
class Result:
    """All checks of one core. `exit_code` is 1 when one failed, else 0."""

    core: str
    checks: list[Check] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return int(any(check.status == "failed" for check in self.checks))

    def text(self) -> str:
        marks = {"passed": "ok  ", "failed": "BAD ", "not_run": "--  "}
        lines = [f"{marks[c.status]} {c.name:<12} {c.seconds:7.3f} s  {c.detail}" for c in self.checks]
        left = [c.name for c in self.checks if c.status == "not_run"]
        verdict = "refused" if self.exit_code else f"accepted, not run: {', '.join(left)}" if left else "accepted"
        return "\n".join([*lines, f"core {self.core}: {verdict}"])

    def json(self) -> str:
        checks = [
            {"name": c.name, "status": c.status, "detail": c.detail, "seconds": round(c.seconds, 4)}
            for c in self.checks
        ]
        return json.dumps(
            {"core": self.core, "accepted": self.exit_code == 0, "checks": checks}, indent=2, ensure_ascii=False
        )

    def write_junit(self, file: Path) -> None:
        """Writes the checks as one JUnit test suite. Raises InputError when the file cannot be written."""
        failures = sum(c.status == "failed" for c in self.checks)
        skipped = sum(c.status == "not_run" for c in self.checks)
        total = sum(c.seconds for c in self.checks)
        suite = ElementTree.Element(
            "testsuite",
            name="ignition validate",
            tests=str(len(self.checks)),
            failures=str(failures),
            skipped=str(skipped),
            errors="0",
            time=f"{total:.3f}",
        )
        for check in self.checks:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.core, name=check.name, time=f"{check.seconds:.3f}"
            )
            if check.status == "failed":
                ElementTree.SubElement(case, "failure", message=check.detail)
            elif check.status == "not_run":
                ElementTree.SubElement(case, "skipped", message=check.detail)
        try:
            ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)
        except OSError as error:
            raise InputError(f"--junit {file}: cannot be written ({error.strerror})") from None


TEXT_CHECKS = ("tokenizer", "template")
ON_A_DEVICE = "needs a device: `flare serve CORE --no-cpu-fallback --check` replays it there"


class NotRun(Exception):
    """A check cannot be made here; the text says why."""


def validate_core(path: Path, *, numerics: bool = False) -> Result:
    """Runs every check on the core at `path`. A check that fails does not stop those that do not build on it.

    With `numerics` those of text are left out: what computes is checked, and replayed.

    Raises InputError when there is no such directory.
    """
    result = Result(core=str(path))

    def run(name: str, check: Callable[[], str]) -> bool:
        begin = time.perf_counter()
        try:
            detail, status = check(), "passed"
        except NotRun as reason:
            detail, status = str(reason), "not_run"
        except InputError:
            raise
        except FlareError as error:
            detail, status = str(error), "failed"
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # whatever a bad core makes happen; a panic of the tokenizers library is no Exception
            detail, status = f"the check ended with {type(error).__name__}; export the core again", "failed"
        result.checks.append(Check(name, status, detail, time.perf_counter() - begin))
        return status == "passed"

    named: list[Manifest] = []
    opened: list[Core] = []

    def structure() -> str:
        named.append(read_manifest(path)[0])
        core = open_core(path)
        check_tables(core.manifest)
        opened.append(core)
        return f"{len(core.manifest.files)} files, sizes, modes and hashes agree with the manifest"

    good = run("structure", structure)
    for name, check in _later(named[0] if named else None):
        if numerics and name in TEXT_CHECKS:
            continue
        needs_all = name == "oracle" and any(
            c.status == "failed" and c.name in ("weights", "libraries", "graphs") for c in result.checks
        )
        if not good or needs_all:
            result.checks.append(Check(name, "not_run", "an earlier check failed", 0.0))
            continue
        run(name, lambda check=check: check(opened[0]))
    return result


def _later(manifest: Manifest | None) -> list[tuple[str, Callable[[Core], str]]]:
    """The checks behind the structure's, in order: those of the manifest's targets, and without one those of every core."""
    checks: list[tuple[str, Callable[[Core], str]]] = [("weights", check_weights)]
    if manifest is not None and manifest.cpu is not None:
        checks += [("libraries", check_libraries), ("graphs", check_graphs)]
    if manifest is not None and manifest.cuda is not None:
        if manifest.cuda.host is not None:
            checks += [("host part", check_host_part)]
        checks += [
            (f"cuda {name}", partial(check_architecture, architecture=name))
            for name in in_order(manifest.cuda.architectures)
        ]
    return [*checks, ("tokenizer", check_tokenizer), ("template", check_template), ("oracle", check_oracle)]


def check_weights(core: Core) -> str:
    """Every byte of the weights, and the safetensors headers: tensors of u8, aligned, without holes or overlaps."""
    verify_weights(core)
    return by_part(core.manifest.targets, partial(_check_tensors, core))


def _check_tensors(core: Core, target: CpuTarget | CudaTarget) -> str:
    name, segments = target.weights.file, target.segments
    with open(core.file(name), "rb") as stream:
        text = stream.read(segments.weights_offset)[8:]
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        spans = sorted((tuple(e["data_offsets"]), e["dtype"], tensor) for tensor, e in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CoreError(f"{name}: its header is not a safetensors header; export the core again") from None
    end = 0
    for (first, last), dtype, tensor in spans:
        if dtype != "U8" or first != end or last < first or first % 64:
            raise CoreError(f"{name}: tensor {tensor[:80]} lies at {first}..{last} as {dtype}, expected U8 from {end}")
        end = last
    if end != segments.weights_bytes:
        raise CoreError(f"{name}: tensors end at {end}, the manifest says {segments.weights_bytes}")
    return f"{len(spans)} tensors, {end} bytes"


def check_libraries(core: Core) -> str:
    """Every kernel library of this machine's architecture loads, has the ABI of this program, and is of its level."""
    return _check_libraries(core, cpu_target(core.manifest))


def _check_libraries(core: Core, target: CpuTarget) -> str:
    return ", ".join(f"{library.isa} ({len(_kernels(core, library))} kernels)" for library in target.libraries)


def _kernels(core: Core, library: KernelLibrary) -> set[str]:
    from flare.replay.program import library_kernels

    try:
        return library_kernels(core, library)
    except (ValueError, KeyError, TypeError, AttributeError):  # its description is not the JSON that it should be
        raise CoreError(
            f"{library.file}: does not describe itself as a kernel library; export the core again"
        ) from None


def check_graphs(core: Core) -> str:
    """Every node's kernel exists in every library, every argument lies inside its segment."""
    target = cpu_target(core.manifest)
    nodes = sum(_check_graph(core, target, core.graph(name), file) for name, file in sorted(target.graphs.items()))
    return f"{nodes} nodes inside their segments"


def _check_graph(core: Core, target: CpuTarget, graph: Graph, file: str) -> int:
    """Checks a graph with every library, and returns how many nodes it has."""
    for library in target.libraries:
        check_graph(graph, target.segments, _kernels(core, library), f"{file} ({library.isa})")
    return len(graph.nodes)


def check_host_part(core: Core) -> str:
    """What runs on the processor for want of kernels: its libraries, and its graph against them and their segments."""
    cuda = core.manifest.cuda
    assert cuda is not None and cuda.host is not None
    target = cuda.host.program
    libraries = _check_libraries(core, target)
    nodes = _check_graph(core, target, core.host_graph(), target.graphs["step"])
    return f"{libraries}, {nodes} nodes inside their segments"


def check_architecture(core: Core, architecture: Architecture) -> str:
    """Every cubin is for the architecture and has the kernels as the graphs launch them, in bounds and in order."""
    from flare.core.cuda_checks import open_cuda_graphs

    graphs, cubins = open_cuda_graphs(core, architecture)
    buckets = [*graphs.step, *graphs.sample, *graphs.score]
    nodes = sum(len(bucket.nodes) for bucket in buckets)
    return f"{len(graphs.kernels)} kernels of {len(cubins)} cubins, {nodes} nodes in {len(buckets)} buckets"


def check_tokenizer(core: Core) -> str:
    """The tokenizer loads, the highest of its ids fits the vocabulary, and text survives encoding and decoding."""
    from flare.text.tokenizer import Tokenizer
    from ignition.text_facts import token_ids

    tokenizer = Tokenizer.load(core.file("tokenizer.json"))
    vocabulary = core.manifest.model.vocabulary
    highest = max(token_ids(core.read("tokenizer.json")).values(), default=-1)
    if highest >= vocabulary:
        raise CoreError(f"tokenizer.json: its highest id is {highest}, the model has {vocabulary} tokens")
    text = "The quick brown fox: 12 jumps over\n\tthe lazy dog."
    ids = tokenizer.encode(text, special=False)
    decoded = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
    if decoded.strip() != text:
        raise CoreError(f"tokenizer.json: {text!r} comes back as {decoded[:80]!r}")
    return f"{tokenizer.vocab_size} ids, text survives"


def check_template(core: Core) -> str:
    """The chat template renders the prober's conversations to what the manifest records."""
    from ignition.text_facts import check_template_facts

    return check_template_facts(core)


def check_oracle(core: Core) -> str:
    """The stored prompts give the stored answers, on every level that this machine can run.

    Raises NotRun where the core has no cpu target: its oracle is read, and only a device can replay it.
    """
    from flare.replay.oracle import check_core, pages_needed
    from flare.replay.program import open_replay, runnable_isas

    manifest = core.manifest
    oracle = read_oracle(core)
    if manifest.cpu is None:
        raise NotRun(f"{len(oracle.prompts)} prompts are read and not replayed; the cuda target {ON_A_DEVICE}")
    offered = [library.isa for library in manifest.cpu.libraries]
    levels = runnable_isas(offered)
    if not levels:
        raise CoreError(f"this machine can run none of the core's levels ({', '.join(offered)})")
    pages = pages_needed([prompt.tokens for prompt in oracle.prompts], manifest.limits.page_tokens)
    reports = []
    for isa in levels:
        with open_replay(core, threads=1, kv_pages=pages, isa=isa) as replay:
            reports.append(check_core(core, manifest.cpu, replay, isa))
    if manifest.cuda is not None:
        reports.append(f"not replayed: the cuda target {ON_A_DEVICE}")
    return "; ".join(reports)
