"""`ignition inspect`: what a core is and what it can serve, as plain data and as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flare.core.architectures import Architecture, in_order
from flare.core.directory import Core, open_core
from flare.core.graph import Graph
from flare.core.manifest import CpuTarget, CudaTarget


def describe(path: Path) -> dict[str, Any]:
    """Returns the facts about a core, JSON-ready. Raises CoreError or InputError as `open_core` does."""
    core = open_core(path)
    manifest = core.manifest
    chat = manifest.template.file is not None
    return {
        "path": str(core.path),
        "id": core.manifest_sha256,
        "exporter": manifest.exporter,
        "model": msgspec.to_builtins(manifest.model),
        "limits": msgspec.to_builtins(manifest.limits),
        "logprobs": msgspec.to_builtins(manifest.logprobs),
        "targets": [_target(core, target) for target in manifest.targets],
        "apis": {
            "chat": chat,
            "completions": True,
            "messages": chat,
            "responses": chat,
            "decisions": chat and manifest.logprobs.explicit_ids > 0,
            "systemone": chat and manifest.logprobs.explicit_ids > 0,
            "tools": chat and _takes_tools(manifest.template.facts),
            "logprobs": manifest.logprobs.alternatives > 0,
            "prompt_logprobs": manifest.logprobs.prompt,
            "images": False,
        },
        "tokens": msgspec.to_builtins(manifest.tokens),
        "sampling": msgspec.to_builtins(manifest.sampling),
        "template": msgspec.to_builtins(manifest.template),
        "oracle": msgspec.to_builtins(manifest.oracle),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "files": {name: entry.bytes for name, entry in sorted(manifest.files.items())},
    }


def _target(core: Core, target: CpuTarget | CudaTarget) -> dict[str, Any]:
    """What the manifest says of a target, with what its kv pools take and what is in its graphs."""
    facts: dict[str, Any] = msgspec.to_builtins(target)
    facts["kv"] = _kv(core, target)
    if isinstance(target, CudaTarget):
        facts["architectures"] = {name: _cuda_graphs(core, name) for name in in_order(target.architectures)}
        if target.host is not None:
            facts["host"] |= {"kv": _kv(core, target.host.program), "graph": _cpu_graph(core.host_graph())}
    else:
        facts["graphs"] = {name: _cpu_graph(core.graph(name)) for name in sorted(target.graphs)}
    return facts


def _kv(core: Core, part: CpuTarget | CudaTarget) -> dict[str, Any]:
    """What keys and values take in the pool of a target, without its host part, or of a host part's program."""
    limits, page = core.manifest.limits, part.segments.kv_page_bytes
    return {
        "format": part.weights.kv_format,
        "bytes_per_token": page // limits.page_tokens,
        "bytes_for_full_context": -(-limits.max_context // limits.page_tokens) * page,
    }


def _cpu_graph(graph: Graph) -> dict[str, Any]:
    kernels = Counter(node.kernel.partition("<")[0] for node in graph.nodes)
    return {
        "nodes": len(graph.nodes),
        "phases": graph.nodes[-1].phase + 1 if graph.nodes else 0,
        "kernels": dict(sorted(kernels.items())),
    }


def _cuda_graphs(core: Core, architecture: Architecture) -> dict[str, Any]:
    """Kernels by what they were compiled from, cubins, and of each kind of graph its buckets."""
    graphs, files = core.cuda_graphs(architecture), core.manifest.files
    cubins = {kernel.cubin for kernel in graphs.kernels}
    return {
        "kernels": dict(sorted(Counter(kernel.source for kernel in graphs.kernels).items())),
        "cubins": len(cubins),
        "cubin_bytes": sum(files[name].bytes for name in cubins if name in files),
        **{
            kind: [{"tokens": b.tokens, "rows": b.rows, "nodes": len(b.nodes)} for b in getattr(graphs, kind)]
            for kind in ("step", "sample", "score")
        },
    }


def _takes_tools(facts: dict[str, Any]) -> bool:
    """Whether the template shows the model its tools, and the core says how the model writes calls."""
    syntax = (facts.get("output") or {}).get("tools")
    return syntax is not None and (facts.get("tools") or {}).get("declared", True)


def size(count: int) -> str:
    """Bytes for people: 98.4 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def by_part(targets: Sequence[CpuTarget | CudaTarget], text: Callable[[CpuTarget | CudaTarget], str]) -> str:
    """What `text` says of each target and of a host part, each with its name behind it; of a cpu target alone without one."""
    parts: list[tuple[str, CpuTarget | CudaTarget]] = []
    for target in targets:
        parts.append(("cuda" if isinstance(target, CudaTarget) else "cpu", target))
        if isinstance(target, CudaTarget) and target.host is not None:
            parts.append(("host part", target.host.program))
    if [name for name, _ in parts] == ["cpu"]:
        return text(targets[0])
    return "; ".join(f"{text(part)} ({name})" for name, part in parts)


def logprobs_text(alternatives: int, explicit_ids: int, prompt: bool) -> str:
    """What the core gives of log probabilities, for people."""
    if not alternatives:
        return "none"
    scored = "prompts are scored" if prompt else "prompts are not scored (export with --prompt-logprobs)"
    return f"up to {alternatives} alternatives, or {explicit_ids} given ids; {scored}"


def render(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""
    model, limits, sampling, oracle = facts["model"], facts["limits"], facts["sampling"], facts["oracle"]
    parameters = f"{model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers"
    limit = f"{limits['slots']} requests at once; {limits['max_step_tokens']} tokens a step"
    rows: list[tuple[str, str]] = [
        ("core", f"{facts['path']}  ({size(facts['bytes'])}, id {facts['id'][:16]})"),
        ("model", f"{model['id']}: {model['architecture']}, {parameters}"),
        ("source", f"{model['source']} through recipe {model['recipe']}"),
        ("context", f"{limits['max_context']} tokens; {limit}"),
        ("logprobs", logprobs_text(**facts["logprobs"])),
        ("serves", ", ".join(name for name, able in facts["apis"].items() if able)),
    ]
    for target in facts["targets"]:
        rows += _target_rows(target, limits["page_tokens"])
    rows += [("sampling", _defaults(sampling)), ("ranges", _ranges(sampling["ranges"]))]
    rows += _template_rows(facts["template"], facts["template"]["facts"])
    if oracle["isas"]:
        found = f"mean KL {oracle['mean_kl']:.2g}, top-1 agreement {oracle['top1_agreement']:.3f} against the reference"
        rows.append(("oracle", f"{found}; compiled results for {', '.join(oracle['isas'])}"))
    else:
        rows.append(("oracle", "the reference's answers; no compiled results"))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _target_rows(target: dict[str, Any], page_tokens: int) -> list[tuple[str, str]]:
    """What a target's graphs run on and take."""
    offered, graphs = [lib["isa"] for lib in target.get("libraries", ())], target.get("graphs", {})
    architectures = target.get("architectures", {})
    computes = f"; computes in {target['compute_dtype']}" if architectures else ""
    rows = [
        ("target", f"{target['kind']}: {', '.join([*offered, *architectures])}{computes}"),
        ("weights", _weights_text(target["weights"])),
        ("kv", _kv_text(target["kv"], page_tokens)),
    ]
    for name, graph in graphs.items():
        rows.append((f"graph {name}", _graph_text(graph)))
    for name, found in architectures.items():
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in found["kernels"].items())
        rows.append((name, f"{found['cubins']} cubins of {size(found['cubin_bytes'])}: {kernels}"))
        for kind, unit in (("step", "tokens"), ("sample", "rows"), ("score", "rows")):
            if buckets := found[kind]:
                nodes = max(bucket["nodes"] for bucket in buckets)
                sizes = ", ".join(str(bucket[unit]) for bucket in buckets)
                rows.append(("", f"{kind} for {sizes} {unit}, of {nodes} nodes at most"))
    if host := target.get("host"):
        lacking = ", ".join(f"{count} {name}" for name, count in host["ops"].items())
        levels = ", ".join(library["isa"] for library in host["program"]["libraries"])
        rows.append(("host part", f"the processor runs {lacking}: {levels}"))
        rows.append(("", f"weights: {_weights_text(host['program']['weights'])}"))
        rows.append(("", f"kv: {_kv_text(host['kv'], page_tokens)}"))
        rows.append(("", _graph_text(host["graph"])))
    return rows


def _weights_text(weights: dict[str, Any]) -> str:
    formats = ", ".join(f"{name} {size(count)}" for name, count in sorted(weights["formats"].items()))
    return f"{formats or 'none'}; {size(weights['decode_weight_bytes'])} read for each token"


def _kv_text(kv: dict[str, Any], page_tokens: int) -> str:
    token, context = size(kv["bytes_per_token"]), size(kv["bytes_for_full_context"])
    return f"{kv['format']}, pages of {page_tokens} tokens, {token} a token, {context} for a full context"


def _graph_text(graph: dict[str, Any]) -> str:
    kernels = ", ".join(f"{count} {kernel}" for kernel, count in graph["kernels"].items())
    return f"{graph['nodes']} nodes in {graph['phases']} phases: {kernels}"


def _defaults(sampling: dict[str, Any]) -> str:
    known = {name: value for name, value in sorted(sampling["defaults"].items()) if value is not None}
    return ", ".join(f"{name} {value} ({sampling['sources'][name]})" for name, value in known.items())


def _ranges(ranges: str | dict[str, Any]) -> str:
    return (
        ranges if isinstance(ranges, str) else ", ".join(f"{name} {bounds}" for name, bounds in sorted(ranges.items()))
    )


def _template_rows(entry: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What the chat template can do, one line a fact."""
    if entry["file"] is None:
        return [("template", "none: chat requests are refused")]
    levels = ", ".join(level["id"] for level in facts["thinking"]["levels"]) or "none"
    rows = [("template", f"from {entry['source']}; thinking levels: {levels}")]
    system, tools = facts["system"], facts["tools"]
    rows.append(
        ("", f"system message: leading {system['leading']}, inline {system['inline']}; developer {facts['developer']}")
    )
    if system["default"] is not None:
        rows.append(("", f"system text when none is given: {system['default']!r}"))
    able = [name for name in ("declared", "calls", "results") if tools[name]]
    continues = "yes" if facts["continuation"]["supported"] else "no"
    rows.append(("", f"tools: {', '.join(able) or 'none'}; continues an answer: {continues}"))
    output = facts["output"]
    between = "none" if output["reasoning"] is None else " and ".join(map(repr, output["reasoning"]))
    rows.append(("", f"writes calls as: {output['tools'] or 'not known'}; reasoning between: {between}"))
    if facts["variables"]:
        rows.append(("", f"further variables: {', '.join(facts['variables'])}"))
    return rows
