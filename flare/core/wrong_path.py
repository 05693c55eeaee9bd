"""What stands at a path that is not a core: the end of an error's line, with the command that leads on."""

from __future__ import annotations

import os
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from shlex import quote

from flare.core.manifest import MANIFEST_FILE

CORES = "cores"
"""Where exports go by default."""

SEEN_ENTRIES = 1000
SHOWN_CORES = 3


def missing(path: Path) -> str:
    """Returns what to say of a path where nothing is."""
    beside = {str(core): core for folder in (path.parent, Path(CORES)) for core in _cores_in(folder)}
    close = get_close_matches(path.name, [core.name for core in beside.values()], n=1, cutoff=0.7)
    if close:
        near = next(shown for shown, core in beside.items() if core.name == close[0])
        return f"no such core directory; is {near} meant?"
    return "no such core directory; `ignition export RECIPE -o CORE` makes one"


def file(path: Path) -> str:
    """Returns what to say of something that is no directory."""
    if (core := _core_above(path)) is not None:
        return f"a file of the core {core}; name that directory"
    if _starts_with(path, b"GGUF"):
        return f"a GGUF file, not a core; {_export(path, path.stem)}"
    if (path.parent / "config.json").is_file():
        return f"a file of a checkpoint, not a core; {_export(path.parent, path.parent.name)}"
    return "a file; a core is a directory, which `ignition export` makes"


def directory(path: Path) -> str:
    """Returns what to say of a directory without a manifest."""
    names = _entries(path)
    if not names:
        return f"is empty, without a {MANIFEST_FILE}; `ignition export RECIPE -o {quote(str(path))}` puts a core there"
    if (core := _core_above(path)) is not None:
        return f"a part of the core {core}; name that directory"
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if "config.json" in names or "model.safetensors" in names:
        return f"a checkpoint, not a core; {_export(path, path.name)}"
    if ggufs:
        return f"holds {ggufs[0]}, which is no core; {_export(path / ggufs[0], Path(ggufs[0]).stem)}"
    if cores := _cores_in(path):
        more = ", ..." if len(cores) > SHOWN_CORES else ""
        return f"is no core, but holds some; name one: {', '.join(map(str, cores[:SHOWN_CORES]))}{more}"
    return f"has no {MANIFEST_FILE}, so it is not a core; export it again"


def _export(source: Path, name: str) -> str:
    return f"`ignition export {quote(str(source))} -o {quote(f'{CORES}/{name}')}` makes one of it"


def _core_above(path: Path) -> Path | None:
    """Returns the core that a path lies in."""
    parents = islice(Path(os.path.abspath(path)).parents, 3)  # a core's files lie at most two folders deep
    return next((parent for parent in parents if (parent / MANIFEST_FILE).is_file()), None)


def _cores_in(folder: Path) -> list[Path]:
    return sorted(folder / name for name in _entries(folder) if (folder / name / MANIFEST_FILE).is_file())


def _entries(folder: Path) -> list[str]:
    """Returns names in a folder, not of all of a very long one, and none of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, SEEN_ENTRIES) if not entry.name.startswith(".")]
    except OSError:
        return []


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False
