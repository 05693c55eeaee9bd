"""What somebody named as a checkpoint that is none: the end of an error's line, with the command that leads on."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from shlex import quote

CORE_MANIFEST = "core.json"
CONFIG = "config.json"
PARTS = (".safetensors", ".json", ".jinja", ".bin", ".pt", ".model")
"""Endings of files that lie in a checkpoint's directory."""

SEEN_ENTRIES = 1000


def directory(path: Path) -> str:
    """Returns what to say of a directory without config.json."""
    names = _entries(path)
    if CORE_MANIFEST in names:
        return f"a core already; `flare serve {quote(str(path))}` serves it, an export begins with a checkpoint"
    if not names:
        return "is empty; a Hugging Face directory or a .gguf file is needed"
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        more = f" and {len(ggufs) - 1} more" if len(ggufs) > 1 else ""
        return f"no {CONFIG}, but GGUF files; name one: {path / ggufs[0]}{more}"
    below = sorted(name for name in names if (path / name / CONFIG).is_file())
    if below:
        return f"no {CONFIG}, but there is {path / below[0] / CONFIG}; name its directory"
    return f"no {CONFIG}; a Hugging Face directory or a .gguf file is needed"


def file(path: Path) -> str | None:
    """Returns what to say of a file that is no GGUF file; None where nothing more is known of it."""
    if (path.parent / CORE_MANIFEST).is_file():
        return f"a file of the core {path.parent}; an export begins with a checkpoint"
    if path.suffix in PARTS and (path.parent / CONFIG).is_file():
        return f"a file of the checkpoint {path.parent}; name that directory"
    if path.suffix in PARTS:
        return f"not a GGUF file, and no {CONFIG} is beside it; a Hugging Face directory or a .gguf file is needed"
    if path.suffix == ".py":
        return "a Python file; recipes are named, not given as files: see `ignition export --help`"
    return None


def _entries(folder: Path) -> list[str]:
    """Returns names in a folder, not of all of a very long one."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, SEEN_ENTRIES)]
