"""What a manifest must be: unknown fields, missing fields and wrong types are refused with the field's path, and so is what
types alone cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from flare.core.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    MAX_ALTERNATIVES,
    MAX_EXPLICIT_IDS,
    CpuTarget,
    CudaTarget,
    HostPart,
    Manifest,
)
from flare.errors import CoreError

MAX_ID = 512
"""Most characters of a core's name."""

ID_WANTED = f"1 to {MAX_ID} printable characters"
"""What `is_id` asks of a core's name, for messages."""

_FORMATS = frozenset({"f32", "bf16", "f16", "q8", "q4"})


def decode_manifest(data: bytes, name: str = MANIFEST_FILE) -> Manifest:
    """Decodes and checks a manifest. Raises CoreError naming the field when anything is off."""
    try:
        head = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(head.get("version", b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CoreError(f"{name}: not a core's manifest ({_first_line(error)}); export the core again") from None
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CoreError(
            f"{name}: format version {shown(version)}, this program reads {FORMAT_VERSION}; export the core again"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CoreError(f"{name}: {_first_line(error)}; export the core again") from None
    _check(manifest, name)
    return manifest


def is_id(name: str) -> bool:
    """Whether a core can have this name. Exporters ask before they make one."""
    return 1 <= len(name) <= MAX_ID and name.isprintable()


def shown(value: object) -> str:
    """A value of a manifest as errors have it: in one line, of some length at most."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _check(manifest: Manifest, name: str) -> None:
    """Checks what types alone cannot say: ranges and references between fields."""

    def refuse(field: str, value: object, wanted: str) -> NoReturn:
        raise CoreError(f"{name}: {field[:200]} is {shown(value)}, wanted {wanted}; export the core again")

    limits = manifest.limits
    for field in limits.__struct_fields__:
        value = getattr(limits, field)
        if not 1 <= value < 2**31:
            refuse(f"limits.{field}", value, "1 to 2^31 - 1")
    if limits.page_tokens % 16:
        refuse("limits.page_tokens", limits.page_tokens, "a multiple of 16")
    logprobs = manifest.logprobs
    if not 0 <= logprobs.alternatives <= MAX_ALTERNATIVES:
        refuse("logprobs.alternatives", logprobs.alternatives, f"0 to {MAX_ALTERNATIVES}")
    most_ids = MAX_EXPLICIT_IDS if logprobs.alternatives else 0
    if not 0 <= logprobs.explicit_ids <= most_ids:
        wanted = f"0 to {most_ids} with logprobs.alternatives {logprobs.alternatives}"
        refuse("logprobs.explicit_ids", logprobs.explicit_ids, wanted)
    if logprobs.prompt and not logprobs.alternatives:
        refuse("logprobs.prompt", logprobs.prompt, "false with logprobs.alternatives 0")
    if not 1 <= manifest.model.vocabulary < 2**31:
        refuse("model.vocabulary", manifest.model.vocabulary, "1 to 2^31 - 1")
    if not is_id(manifest.model.id):
        refuse("model.id", manifest.model.id, ID_WANTED)
    for field in ("layers", "parameters", "hidden_size"):
        value = getattr(manifest.model, field)
        if value is not None and not 0 <= value < 2**48:
            refuse(f"model.{field}", value, "0 to 2^48 - 1")
    kinds = ["cpu" if isinstance(target, CpuTarget) else "cuda" for target in manifest.targets]
    if kinds not in (["cpu"], ["cuda"], ["cpu", "cuda"]):
        refuse("targets", kinds[:3], "cpu, cuda, or both in that order")
    for number, target in enumerate(manifest.targets):
        _check_target(target, manifest, f"targets[{number}]", refuse)
        if isinstance(target, CudaTarget) and target.host is not None:
            _check_host(target.host, manifest, f"targets[{number}].host", refuse)
    for path, entry in manifest.files.items():
        parts = path.split("/")
        if not path or path.startswith("/") or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
            refuse("files", path, "a relative path without '..'")
        if entry.bytes < 0 or len(entry.hash) != 64 or not set(entry.hash) <= set("0123456789abcdef"):
            refuse(f"files[{path!r}]", entry.hash, "a size and 64 hex digits")
    weights = [part.weights.file for part in manifest.parts]
    named = {"tokenizer.json", manifest.oracle.file}
    for part in manifest.parts:
        named.update(_named(part))
    if manifest.template.file is not None:
        named.add(manifest.template.file)
    if len(set(weights)) != len(weights) or named & set(weights):
        refuse("weights.file", weights, "a file for each target that is nothing else")
    for path, entry in manifest.files.items():
        if entry.chunked != (path in weights):
            refuse(f"files[{path!r}].chunked", entry.chunked, "true for weights, false for other files")
    if missing := sorted((named | set(weights)) - manifest.files.keys()):
        refuse("files", missing[0], "an entry for every file that the manifest names")
    levels = [] if manifest.cpu is None else [library.isa for library in manifest.cpu.libraries]
    if len(set(manifest.oracle.isas)) != len(manifest.oracle.isas) or set(manifest.oracle.isas) - set(levels):
        refuse("oracle.isas", manifest.oracle.isas, f"levels of the libraries, each once: {', '.join(levels)}")
    for field in ("mean_kl", "max_logprob_error", "top1_agreement"):
        if manifest.oracle.isas and getattr(manifest.oracle, field) is None:
            refuse(f"oracle.{field}", None, "a number where oracle.isas names levels")
    for token in [*manifest.tokens.eos, manifest.tokens.bos, manifest.tokens.pad]:
        if token is not None and not 0 <= token < manifest.model.vocabulary:
            refuse("tokens", token, "ids inside the vocabulary")


def _check_host(host: HostPart, manifest: Manifest, where: str, refuse: Callable[[str, object, str], NoReturn]) -> None:
    if not host.ops or min(host.ops.values()) < 1:
        refuse(f"{where}.ops", host.ops, "a number of nodes for each op, at least one op")
    if host.program.graphs.keys() != {"step"}:
        refuse(f"{where}.program.graphs", sorted(host.program.graphs), "one graph, named 'step'")
    if not host.program.libraries:
        refuse(f"{where}.program.libraries", [], "at least one")
    _check_target(host.program, manifest, f"{where}.program", refuse)


def _named(target: CpuTarget | CudaTarget) -> set[str]:
    """The files that a target names, but its weights; a file of cuda graphs names others, its cubins."""
    if isinstance(target, CudaTarget):
        return set(target.architectures.values())
    return {*target.graphs.values(), *(library.file for library in target.libraries)}


def _check_target(
    target: CpuTarget | CudaTarget, manifest: Manifest, where: str, refuse: Callable[[str, object, str], NoReturn]
) -> None:
    segments, kv_format = target.segments, target.weights.kv_format
    for field in segments.__struct_fields__:
        value = getattr(segments, field)
        if not 0 <= value < 2**48:
            refuse(f"{where}.segments.{field}", value, "0 to 2^48 - 1")
    if not segments.kv_page_bytes or segments.kv_page_bytes % 64:
        refuse(f"{where}.segments.kv_page_bytes", segments.kv_page_bytes, "a positive multiple of 64")
    if segments.weights_offset % 4096:
        refuse(f"{where}.segments.weights_offset", segments.weights_offset, "a multiple of 4096")
    if segments.io_bytes < manifest.limits.max_rows * manifest.model.vocabulary * 4:
        refuse(f"{where}.segments.io_bytes", segments.io_bytes, "room for max_rows rows of logits")
    known = _FORMATS | ({"fp8"} if isinstance(target, CudaTarget) else set())
    formats = target.weights.formats
    if unknown := sorted(formats.keys() - known):
        refuse(f"{where}.weights.formats", unknown[0], f"only {', '.join(sorted(known))}")
    if min(formats.values(), default=0) < 0 or sum(formats.values()) > segments.weights_bytes:
        refuse(f"{where}.weights.formats", formats, f"bytes of the {segments.weights_bytes} of the weights")
    if not 0 <= target.weights.decode_weight_bytes < 2**48:
        refuse(f"{where}.weights.decode_weight_bytes", target.weights.decode_weight_bytes, "0 to 2^48 - 1")
    if isinstance(target, CpuTarget):
        if "step" not in target.graphs:
            refuse(f"{where}.graphs", sorted(target.graphs), "a graph named 'step'")
        if kv_format == "bf16":
            refuse(f"{where}.weights.kv_format", kv_format, "f16 or f32")
        return
    files = list(target.architectures.values())
    if not files or len(set(files)) != len(files):
        refuse(f"{where}.architectures", target.architectures, "at least one, each with a file of its own")
    if kv_format != target.compute_dtype:
        refuse(f"{where}.weights.kv_format", kv_format, f"{target.compute_dtype}, the compute_dtype")
