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
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

import recipes
from flare.core.checksums import sha256_bytes
from flare.core.graph import check_graph
from flare.core.manifest import (
    FORMAT_VERSION,
    MAX_ALTERNATIVES,
    MAX_EXPLICIT_IDS,
    KernelLibrary,
    Limits,
    Logprobs,
    Manifest,
    Model,
    Segments,
    Weights,
)
from flare.core.manifest import Oracle as OracleEntry
from flare.core.manifest import Target as TargetEntry
from flare.core.oracle import Deviation
from flare.errors import InputError
from flare.replay.cpu_interface import ABI_VERSION
from ignition import __version__
from ignition.checkpoint import open_checkpoint, open_named
from ignition.checkpoint.interface import Checkpoint
from ignition.graph import Graph
from ignition.options import Options
from ignition.pack import CoreWriter, lay_out_weights
from ignition.plan import Plan
from ignition.progress import Progress
from ignition.report import Report
from ignition.text_facts import TextFacts
from ignition.weights import QUANTISED_FORMATS, Stored, choose_storage


@dataclass(slots=True)
class Configured:
    """A recipe applied to a checkpoint: its model, the fixed limits, and where sampling settings come from."""

    recipe: recipes.Recipe
    model: Any
    source: recipes.Source | None
    limits: Limits
    checkpoint: Checkpoint
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A lowered and placed step with its weights' storage."""

    plan: Plan
    storage: dict[str, Stored]
    weights_header: bytes
    weights_bytes: int
    kernels: list[str]
    kv_format: str


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
            prepared, notices = lower_step(configured, graph, options)
        for line in notices:
            progress.notice(line)
        with progress.stage("probe"):
            text = probe_text(configured, options)
        for line in text.notices:
            progress.notice(line)
        with progress.stage("compile"):
            libraries = compile_kernels(prepared, options, writer, progress)
        with progress.stage("pack"):
            pack_files(configured, prepared, text, writer, progress)
        with progress.stage("prove"):
            proof = prove(configured, prepared, text, libraries, writer, options, progress)
            manifest = proof.manifest
            writer.commit(manifest)
    return Report(
        output=writer.output,
        core_id=sha256_bytes(manifest.encode()),
        seconds=progress.stages,
        files={name: entry.bytes for name, entry in manifest.files.items()},
        formats=manifest.weights.formats,
        deviation=proof.deviation,
        isas=manifest.oracle.isas,
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
    return Configured(recipe, model, named.source if named else None, limits, checkpoint, list(checkpoint.notices))


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


def lower_step(configured: Configured, graph: Graph, options: Options) -> tuple[Prepared, list[str]]:
    """Stage 4. Chooses weight formats, picks kernels, and places everything in memory."""
    from ignition.plan import plan
    from ignition.targets.cpu.lower import lower, matrix_names

    specs = configured.recipe.weights(configured.model)
    storage, notices = choose_storage(specs, matrix_names(graph), configured.checkpoint, options.weights)
    formats = {name: stored.format for name, stored in storage.items()}
    kv_format = "f16" if QUANTISED_FORMATS & set(formats.values()) or {"f16", "bf16"} & set(formats.values()) else "f32"
    lowered = lower(graph, formats, kv_format, configured.limits)
    spans, header = lay_out_weights({name: stored.bytes() for name, stored in storage.items()})
    placed = plan(lowered, spans, configured.limits)
    last = list(spans.values())[-1]
    weights_bytes = -(-(last.offset + last.bytes) // 64) * 64
    kernels = list(dict.fromkeys(call.kernel for call in lowered.calls))
    prepared = Prepared(placed, storage, header, weights_bytes, kernels, kv_format)
    check_graph(placed.graph, _segments(prepared, configured), set(kernels), "graph step")
    return prepared, notices


def probe_text(configured: Configured, options: Options) -> TextFacts:
    """Stage 5. Probes the chat template, and gathers special tokens and sampling defaults with their sources."""
    from ignition.text_facts import gather_text_facts

    return gather_text_facts(
        configured.checkpoint, configured.model.vocabulary, options.sampling_ranges, configured.recipe.sampling
    )


def compile_kernels(
    prepared: Prepared, options: Options, writer: CoreWriter, progress: Progress
) -> list[KernelLibrary]:
    """Stage 6. Compiles the kernels once for each instruction set level."""
    from ignition.targets.cpu.compile import compile_libraries
    from ignition.targets.cpu.source import generate, headers

    sources = {isa: generate(prepared.kernels, isa) for isa in options.isas}
    libraries = []
    for isa, compiled in compile_libraries(sources, headers(), progress.advance).items():
        file = f"kernels/cpu-{isa}.so"
        writer.add(file, compiled.data)
        libraries.append(
            KernelLibrary(
                file=file, isa=isa, machine=platform.machine(), compiler=compiled.compiler, flags=list(compiled.flags)
            )
        )
    return libraries


def pack_files(
    configured: Configured, prepared: Prepared, text: TextFacts, writer: CoreWriter, progress: Progress
) -> None:
    """Stage 7. Writes graphs, tokenizer, template and weights beside the place of the core."""
    writer.add("graphs/step.msgpack", prepared.plan.graph.encode())
    writer.add("tokenizer.json", configured.checkpoint.tokenizer_json)
    if text.template.file is not None:
        writer.add(text.template.file, (configured.checkpoint.chat_template or "").encode())
    done = 0

    def packer(stored: Stored) -> Any:
        def make() -> bytes:
            nonlocal done
            data = stored.pack()
            done += len(data)
            progress.advance(done, prepared.weights_bytes, stored.name)
            return data

        return make

    writer.add_weights(prepared.weights_header, [packer(stored) for stored in prepared.storage.values()])


@dataclass(frozen=True, slots=True)
class Proof:
    """The finished manifest and how far the compiled graphs are from the reference."""

    manifest: Manifest
    deviation: Deviation


def prove(
    configured: Configured,
    prepared: Prepared,
    text: TextFacts,
    libraries: list[KernelLibrary],
    writer: CoreWriter,
    options: Options,
    progress: Progress,
) -> Proof:
    """Stage 8. Runs the oracle's prompts through the torch reference and through every library that this machine can run.

    Raises InputError when a library's answers are out of tolerance: the export has failed.
    """
    from ignition.proof import run_oracle

    draft = _manifest(configured, prepared, text, libraries, writer, options)
    oracle, found, isas = run_oracle(
        recipe=configured.recipe,
        model=configured.model,
        storage=prepared.storage,
        manifest=draft,
        graph=prepared.plan.graph,
        folder=writer.folder,
        advance=progress.advance,
    )
    writer.add("oracle.msgpack", oracle.encode())
    entry = OracleEntry(
        file="oracle.msgpack",
        isas=isas,
        mean_kl=_rounded(found.mean_kl),
        max_logprob_error=_rounded(found.max_logprob_error),
        top1_agreement=_rounded(found.top1_agreement),
    )
    from msgspec.structs import replace as replace_struct

    return Proof(replace_struct(draft, oracle=entry, files=dict(writer.files)), found)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _segments(prepared: Prepared, configured: Configured) -> Segments:
    return Segments(
        weights_bytes=prepared.weights_bytes,
        weights_offset=len(prepared.weights_header),
        arena_bytes=prepared.plan.arena_bytes,
        io_bytes=prepared.plan.io_bytes,
        kv_page_bytes=prepared.plan.kv_page_bytes,
    )


def _manifest(
    configured: Configured,
    prepared: Prepared,
    text: TextFacts,
    libraries: list[KernelLibrary],
    writer: CoreWriter,
    options: Options,
) -> Manifest:
    """The manifest without the oracle's findings."""
    formats: dict[str, int] = {}
    for stored in prepared.storage.values():
        name = "f32" if stored.format == "vector" else stored.format
        formats[name] = formats.get(name, 0) + stored.bytes()
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
        target=TargetEntry(kind="cpu", abi=ABI_VERSION, libraries=libraries),
        limits=configured.limits,
        logprobs=Logprobs(alternatives=MAX_ALTERNATIVES, explicit_ids=MAX_EXPLICIT_IDS, prompt=options.prompt_logprobs),
        segments=_segments(prepared, configured),
        weights=Weights(
            option=options.weights,
            formats=formats,
            kv_format=prepared.kv_format,
            decode_weight_bytes=decode_weight_bytes(prepared),
            header_sha256=sha256_bytes(prepared.weights_header),
        ),
        graphs={"step": "graphs/step.msgpack"},
        tokens=text.tokens,
        template=text.template,
        sampling=text.sampling,
        oracle=OracleEntry(file="oracle.msgpack", isas=[], mean_kl=0.0, max_logprob_error=0.0, top1_agreement=0.0),
        files=dict(writer.files),
    )


def model_facts(configured: Configured) -> Model:
    """What the manifest says about the model itself: of the checkpoint, and of the recipe's weights and states."""
    checkpoint, model, recipe = configured.checkpoint, configured.model, configured.recipe
    hidden = checkpoint.config.get("hidden_size")
    weights = recipe.weights(model).values()
    return Model(
        id=configured.source.name if configured.source else checkpoint.name,
        recipe=recipe.name,
        architecture=str(checkpoint.config.get("model_type")),
        source=Path(checkpoint.source).name if Path(checkpoint.source).exists() else checkpoint.source,
        vocabulary=model.vocabulary,
        layers=len(recipe.states(model)),
        hidden_size=hidden if type(hidden) is int else None,
        parameters=sum(math.prod(spec.shape) for spec in weights if spec.role != "constant"),
    )


def decode_weight_bytes(prepared: Prepared) -> int:
    """Bytes of weights that one decode step of one request reads: all that its nodes bind, but of an embedding one row."""
    total = 0
    seen: set[int] = set()
    for node in prepared.plan.graph.nodes:
        for arg in node.args:
            if arg.segment != "weights":
                continue
            if node.kernel.startswith("Embed<"):
                total += arg.bytes // prepared.storage[node.label].spec.shape[0]
            elif arg.offset not in seen:
                seen.add(arg.offset)
                total += arg.bytes
    return total


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
