"""`ignition inspect`: what a core is and what it can serve, as plain data and as text for people."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from flare.core.directory import open_core


def describe(path: Path) -> dict[str, Any]:
    """Returns the facts about a core, JSON-ready. Raises CoreError or InputError as `open_core` does."""
    core = open_core(path)
    manifest = core.manifest
    graphs = {}
    for name in sorted(manifest.graphs):
        graph = core.graph(name)
        kernels = Counter(node.kernel.partition("<")[0] for node in graph.nodes)
        graphs[name] = {
            "nodes": len(graph.nodes),
            "phases": graph.nodes[-1].phase + 1 if graph.nodes else 0,
            "kernels": dict(sorted(kernels.items())),
        }
    limits, segments = manifest.limits, manifest.segments
    return {
        "path": str(core.path),
        "id": core.manifest_sha256,
        "exporter": manifest.exporter,
        "model": msgspec.to_builtins(manifest.model),
        "target": msgspec.to_builtins(manifest.target),
        "limits": msgspec.to_builtins(limits),
        "segments": msgspec.to_builtins(segments),
        "weights": msgspec.to_builtins(manifest.weights),
        "kv": {
            "format": manifest.weights.kv_format,
            "bytes_per_token": segments.kv_page_bytes // limits.page_tokens,
            "bytes_for_full_context": -(-limits.max_context // limits.page_tokens) * segments.kv_page_bytes,
        },
        "graphs": graphs,
        "apis": {
            "chat": manifest.template.file is not None,
            "completions": True,
            "logprobs": False,
            "prompt_logprobs": "score" in manifest.graphs,
            "images": False,
        },
        "tokens": msgspec.to_builtins(manifest.tokens),
        "sampling": msgspec.to_builtins(manifest.sampling),
        "template": msgspec.to_builtins(manifest.template),
        "oracle": msgspec.to_builtins(manifest.oracle),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "files": {name: entry.bytes for name, entry in sorted(manifest.files.items())},
    }


def size(count: int) -> str:
    """Bytes for people: 98.4 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def render(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""
    model, limits, weights, sampling = facts["model"], facts["limits"], facts["weights"], facts["sampling"]
    template, oracle, kv = facts["template"]["facts"], facts["oracle"], facts["kv"]
    formats = ", ".join(f"{name} {size(count)}" for name, count in sorted(weights["formats"].items()))
    rows: list[tuple[str, str]] = [
        ("core", f"{facts['path']}  ({size(facts['bytes'])}, id {facts['id'][:16]})"),
        (
            "model",
            f"{model['id']}: {model['architecture']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers",
        ),
        ("source", f"{model['source']} through recipe {model['recipe']}"),
        ("weights", f"{formats}; {size(weights['decode_weight_bytes'])} read for each token"),
        ("target", f"{facts['target']['kind']}: " + ", ".join(lib["isa"] for lib in facts["target"]["libraries"])),
        (
            "context",
            f"{limits['max_context']} tokens; {limits['slots']} requests at once; {limits['max_step_tokens']} tokens a step",
        ),
        (
            "kv",
            f"{kv['format']}, pages of {limits['page_tokens']} tokens, {size(kv['bytes_per_token'])} a token, {size(kv['bytes_for_full_context'])} for a full context",
        ),
        ("serves", ", ".join(name for name, able in facts["apis"].items() if able)),
    ]
    for name, graph in facts["graphs"].items():
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in graph["kernels"].items())
        rows.append((f"graph {name}", f"{graph['nodes']} nodes in {graph['phases']} phases: {kernels}"))
    defaults = ", ".join(
        f"{name} {value} ({sampling['sources'].get(name, 'flare_default')})"
        for name, value in sorted(sampling["defaults"].items())
        if value is not None
    )
    ranges = (
        sampling["ranges"]
        if isinstance(sampling["ranges"], str)
        else ", ".join(f"{n} {r}" for n, r in sorted(sampling["ranges"].items()))
    )
    rows += [("sampling", defaults), ("ranges", ranges)]
    if facts["template"]["file"] is None:
        rows.append(("template", "none: chat requests are refused"))
    else:
        thinking = template.get("thinking") or {}
        levels = ", ".join(level["id"] for level in thinking.get("levels", ())) or "none"
        rows.append(("template", f"from {facts['template']['source']}; thinking levels: {levels}"))
        for name in sorted(template):
            if name != "thinking" and isinstance(template[name], (str, bool, int, list, type(None))):
                rows.append(("", f"{name}: {template[name]!r}"))
    rows.append(
        (
            "oracle",
            f"mean KL {oracle['mean_kl']:.2g}, top-1 agreement {oracle['top1_agreement']:.3f} against the reference; compiled results for {', '.join(oracle['isas'])}",
        )
    )
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)
