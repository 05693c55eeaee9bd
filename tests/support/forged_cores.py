"""Cores whose files say something else than was exported, behind hashes that are right: only their meaning gives them away."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flare.core.checksums import sha256_chunked


def forge(core: Path, name: str, change: Any) -> None:
    """Changes a file and every hash that covers it, so that only the meaning of the bytes can give it away."""
    data = change((core / name).read_bytes())
    (core / name).write_bytes(data)
    manifest = json.loads((core / "core.json").read_bytes())
    manifest["files"][name] = {"bytes": len(data), "hash": hashlib.sha256(data).hexdigest(), "chunked": False}
    forge_manifest(core, lambda m: m.update(manifest))


def forge_manifest(core: Path, change: Any) -> None:
    manifest = json.loads((core / "core.json").read_bytes())
    change(manifest)
    data = (json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    sign(core, data)


def sign(core: Path, manifest: bytes) -> None:
    """Writes the manifest's bytes, and their hash."""
    (core / "core.json").write_bytes(manifest)
    (core / "core.sha256").write_text(f"{hashlib.sha256(manifest).hexdigest()}  core.json\n")


def graph(change: Any) -> Any:
    import msgpack

    def apply(data: bytes) -> bytes:
        content = msgpack.unpackb(data)
        change(content)
        return msgpack.packb(content)

    return apply


def forge_weights(core: Path, change: Any) -> None:
    """Changes bytes of the weights in place, behind the safetensors header, and their hash."""
    weights = core / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    change(data)
    weights.write_bytes(data)
    forge_manifest(core, lambda m: m["files"][weights.name].update(hash=sha256_chunked(weights)))


def changed(source: str, name: str, change: Any) -> Any:
    """Changes one of a source's results wherever the token that follows is far from the likeliest, so that the results go on
    to agree with each other; `compiled` is every library's."""

    def apply(oracle: dict[str, Any]) -> None:
        for prompt in oracle["prompts"]:
            for found in prompt["compiled"].values() if source == "compiled" else [prompt[source]]:
                for position, rank in enumerate(found["ranks"]):
                    if rank > 30:
                        found[name][position] = change(found[name][position])

    return graph(apply)


def without_levels(core: Path) -> None:
    """As if the export had run on a machine that could run none of the core's libraries but one that this one lacks."""
    forge(core, "oracle.msgpack", graph(lambda o: [prompt["compiled"].clear() for prompt in o["prompts"]]))
    forge_manifest(core, lambda m: m["oracle"].update(isas=[]))
