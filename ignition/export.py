"""The export pipeline: from a checkpoint to a core, one function a stage, in the order in which they run.

open -> configure -> capture -> lower -> probe -> compile -> pack -> prove. A stage takes what earlier ones returned and
fails with one line (InputError). The core is written beside its place, and moved there when it is proved. Nothing here
depends on time, on the order of a dict, or on the number of threads: the same inputs and tool versions give a byte-identical
core.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import recipes
from flare.core.checksums import sha256_bytes
from flare.core.manifest import (
    FORMAT_VERSION,
    MAX_ALTERNATIVES,
    MAX_EXPLICIT_IDS,
    CpuTarget,
    CudaTarget,
    Limits,
    Logprobs,
    Manifest,
    Model,
)
from flare.core.manifest import Oracle as OracleEntry
from flare.core.manifest_checks import ID_WANTED, is_id, shown
from flare.core.oracle import Deviation
from flare.errors import InputError
from ignition import __version__
from ignition.checkpoint import open_checkpoint, open_named
from ignition.checkpoint.interface import Checkpoint
from ignition.graph import Graph
from ignition.options import Options
from ignition.pack import CoreWriter
from ignition.progress import Progress
from ignition.report import Report
from ignition.text_facts import TextFacts
from ignition.weights import Stored, choose_storage

if TYPE_CHECKING:
    from ignition.targets.cpu.export import CpuExport
    from ignition.targets.cuda.export import CudaExport


@dataclass(slots=True)
class Configured:
    """A recipe applied to a checkpoint: its model, the fixed limits, and where sampling settings come from."""

    recipe: recipes.Recipe
    model: Any
    source: recipes.Source | None
    limits: Limits
    checkpoint: Checkpoint
    notices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The core's name: that of its source, or else of its checkpoint."""
        return self.source.name if self.source else self.checkpoint.name


def export_core(
    source: str,
    output: Path,
    options: Options | None = None,
    *,
    checkpoint: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Exports `source` (a recipe's or named source's name, a directory, or a GGUF file) to the core directory `output`.

    `checkpoint` gives a named recipe other weights. Raises InputError for everything that cannot be exported.
    """
    options = options or Options()
    progress = progress or Progress()
    options.check()
    with CoreWriter(Path(output)) as writer:
        with progress.stage("open"):
            opened, named = open_source(source, checkpoint)
        with progress.stage("configure"):
            configured = configure(opened, named, options)
        for line in configured.notices:
            progress.notice(line)
        with progress.stage("capture"):
            graph = capture_step(configured)
        with progress.stage("lower"):
            storage, notices = choose_weights(configured, graph, options)
            cpu = lower_cpu(configured, graph, storage, options) if options.cpu else None
            cuda = lower_cuda(configured, graph, storage, options) if options.architectures else None
        notices += [line for part in (cpu, cuda) if part for line in part.notices]
        for line in notices:
            progress.notice(line)
        with progress.stage("probe"):
            text = probe_text(configured, options)
        for line in text.notices:
            progress.notice(line)
        with progress.stage("compile"):
            if cpu:
                cpu.compile(options.levels, writer, progress)
            if cuda:
                cuda.compile(options.levels, writer, progress)
        with progress.stage("pack"):
            pack_text(configured, text, writer)
            targets = [part.pack(options.weights, writer, progress) for part in (cpu, cuda) if part]
            draft = _manifest(configured, targets, text, writer, options)
            if cuda:
                cuda.check(draft)
        with progress.stage("prove"):
            proof = prove(configured, storage, cpu, draft, writer, progress)
            manifest = proof.manifest
            writer.commit(manifest)
    return Report(
        output=writer.output,
        core_id=sha256_bytes(manifest.encode()),
        seconds=progress.stages,
        files={name: entry.bytes for name, entry in manifest.files.items()},
        targets=manifest.targets,
        deviation=proof.deviation,
        isas=manifest.oracle.isas,
        architectures=cuda.reports if cuda else [],
        logprobs=manifest.logprobs,
        notices=[*configured.notices, *notices, *text.notices],
    )


def open_source(source: str, checkpoint: str | None) -> tuple[Checkpoint, recipes.Found | None]:
    """Stage 1. Opens the checkpoint; a name that is no existing path must be a recipe or a named source.

    Another checkpoint for a named source leaves only its recipe: the core is named after the checkpoint then.
    """
    if os.path.exists(source):
        if checkpoint is not None:
            raise InputError(f"--checkpoint is {checkpoint!r}, but {source} is a checkpoint itself; give one of them")
        return open_checkpoint(source), None
    found = recipes.find(checked_name(source))
    if checkpoint is not None:
        return open_checkpoint(checkpoint), found._replace(source=None)
    if found.source is not None:
        return open_named(found.source), found
    if found.recipe.checkpoint is None:
        raise InputError(f"recipe {source} has no usual checkpoint; give one with --checkpoint DIR|FILE.gguf|REPO")
    return open_checkpoint(found.recipe.checkpoint), found


def checked_name(source: str) -> str:
    """Returns the name of a recipe or named source. Raises InputError for another word, which may be meant as a path."""
    names = recipes.names()
    if source in names:
        return source
    close = get_close_matches(source, names, n=1, cutoff=0.7)
    hint = f"; is {close[0]} meant?" if close else ""
    if source.count("/") == 1:
        hint = f"; a repository of the hub is given as `--checkpoint {quote(source)}` of a recipe"
    raise InputError(f"{source}: no such file or directory, and no recipe{hint}; there are: {', '.join(names)}")


def configure(checkpoint: Checkpoint, named: recipes.Found | None, options: Options) -> Configured:
    """Stage 2. Applies the recipe to the checkpoint's config and fixes the limits."""
    recipe = named.recipe if named else recipes.find(checkpoint.config).recipe
    model_type = checkpoint.config.get("model_type")
    if model_type not in recipe.model_types:
        raise InputError(
            f"{checkpoint.source}: model_type is {model_type!r}, recipe {recipe.name} takes {', '.join(recipe.model_types)}"
        )
    model = recipe.configure(checkpoint.config)
    context = min(model.max_context, options.max_context or model.max_context)
    if options.max_context is not None and options.max_context > model.max_context:
        raise InputError(
            f"--max-context is {options.max_context}, the model was made for {model.max_context}; choose at most that"
        )
    limits = Limits(
        max_context=context,
        slots=options.slots,
        page_tokens=options.page_tokens,
        max_step_tokens=options.max_step_tokens,
        max_rows=options.max_rows,
    )
    source = named.source if named else None
    configured = Configured(recipe, model, source, limits, checkpoint, list(checkpoint.notices))
    if not is_id(name := configured.name):
        raise InputError(
            f"{shown(name)}: a core's name of {len(name)} characters, wanted {ID_WANTED}; rename the checkpoint"
        )
    return configured


def capture_step(configured: Configured) -> Graph:
    """Stage 3. The step as a graph of ops; every tensor of the checkpoint is accounted for."""
    from ignition.capture import capture
    from ignition.weights import unused_tensors

    recipe, model = configured.recipe, configured.model
    for name in unused_tensors(configured.checkpoint, recipe.weights(model)):
        if not recipe.ignored(model, name):
            raise InputError(
                f"{configured.checkpoint.source}: tensor {name} is not used by recipe {recipe.name}; it would change the model"
            )
    return capture(recipe, model)


def choose_weights(configured: Configured, graph: Graph, options: Options) -> tuple[dict[str, Stored], list[str]]:
    """Stage 4, for all targets. The storage of every weight, and notices about what is requantised."""
    from ignition.patterns import matrix_names
    from ignition.targets.cpu.lower import KERNELS

    specs = configured.recipe.weights(configured.model)
    return choose_storage(
        specs, matrix_names(graph, KERNELS if options.cpu else None), configured.checkpoint, options.weights
    )


def lower_cpu(configured: Configured, graph: Graph, storage: Mapping[str, Stored], options: Options) -> CpuExport:
    """Stage 4, for the cpu target. Picks kernels, and places everything in memory."""
    from ignition.targets.cpu.export import CpuExport

    return CpuExport(graph, storage, configured.limits, cpu_fallback=options.cpu_fallback)


def lower_cuda(configured: Configured, graph: Graph, storage: Mapping[str, Stored], options: Options) -> CudaExport:
    """Stage 4, for the cuda target. Picks launches, and places everything in memory, for each architecture; what has no kernel
    becomes the host part."""
    from ignition.targets.cuda.export import CudaExport

    made = CudaExport(
        graph,
        storage,
        configured.limits,
        configured.model.vocabulary,
        options.architectures,
        cpu_fallback=options.cpu_fallback,
    )
    if options.isas is not None and not options.cpu and made.host is None:
        raise InputError(
            f"--isa is {','.join(options.isas)!r}, but it is for the cpu target, and for ops without a kernel on cuda, of "
            "which this model has none; leave it out, or add --target cpu"
        )
    return made


def probe_text(configured: Configured, options: Options) -> TextFacts:
    """Stage 5. Probes the chat template, and gathers special tokens and sampling defaults with their sources."""
    from ignition.text_facts import gather_text_facts

    return gather_text_facts(
        configured.checkpoint, configured.model.vocabulary, options.sampling_ranges, configured.recipe.sampling
    )


def pack_text(configured: Configured, text: TextFacts, writer: CoreWriter) -> None:
    """Stage 7, for all targets. Writes the tokenizer and the template beside the place of the core."""
    writer.add("tokenizer.json", configured.checkpoint.tokenizer_json)
    if text.template.file is not None:
        writer.add(text.template.file, (configured.checkpoint.chat_template or "").encode())


@dataclass(frozen=True, slots=True)
class Proof:
    """The finished manifest and how far the compiled graphs are from the reference, where any could run."""

    manifest: Manifest
    deviation: Deviation | None


def prove(
    configured: Configured,
    storage: Mapping[str, Stored],
    cpu: CpuExport | None,
    draft: Manifest,
    writer: CoreWriter,
    progress: Progress,
) -> Proof:
    """Stage 8. Runs the oracle's prompts through the torch reference and through every library that this machine can run.

    Raises InputError when a library's answers are out of tolerance: the export has failed. What a device answers is not known
    here.
    """
    from msgspec.structs import replace

    from ignition.proof import run_oracle

    oracle, found, isas = run_oracle(
        recipe=configured.recipe,
        model=configured.model,
        storage=storage,
        manifest=draft,
        graph=cpu.plan.graph if cpu else None,
        folder=writer.folder,
        advance=progress.advance,
    )
    writer.add("oracle.msgpack", oracle.encode())
    entry = OracleEntry(
        file="oracle.msgpack",
        isas=isas,
        mean_kl=_rounded(found.mean_kl) if found else None,
        max_logprob_error=_rounded(found.max_logprob_error) if found else None,
        top1_agreement=_rounded(found.top1_agreement) if found else None,
    )
    return Proof(replace(draft, oracle=entry, files=dict(writer.files)), found)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _manifest(
    configured: Configured,
    targets: list[CpuTarget | CudaTarget],
    text: TextFacts,
    writer: CoreWriter,
    options: Options,
) -> Manifest:
    """The manifest without the oracle's findings."""
    return Manifest(
        format="flare-core",
        version=FORMAT_VERSION,
        exporter={
            "ignition": __version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "numpy": _version("numpy"),
        },
        model=model_facts(configured),
        targets=targets,
        limits=configured.limits,
        logprobs=Logprobs(alternatives=MAX_ALTERNATIVES, explicit_ids=MAX_EXPLICIT_IDS, prompt=options.prompt_logprobs),
        tokens=text.tokens,
        template=text.template,
        sampling=text.sampling,
        oracle=OracleEntry(file="oracle.msgpack", isas=[], mean_kl=None, max_logprob_error=None, top1_agreement=None),
        files=dict(writer.files),
    )


def model_facts(configured: Configured) -> Model:
    """What the manifest says about the model itself: of the checkpoint, and of the recipe's weights and states."""
    checkpoint, model, recipe = configured.checkpoint, configured.model, configured.recipe
    hidden = checkpoint.config.get("hidden_size")
    weights = recipe.weights(model).values()
    return Model(
        id=configured.name,
        recipe=recipe.name,
        architecture=str(checkpoint.config.get("model_type")),
        source=Path(checkpoint.source).name if Path(checkpoint.source).exists() else checkpoint.source,
        vocabulary=model.vocabulary,
        layers=len(recipe.states(model)),
        hidden_size=hidden if type(hidden) is int else None,
        parameters=sum(math.prod(spec.shape) for spec in weights if spec.role != "constant"),
    )


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
