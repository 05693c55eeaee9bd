"""Whoever exports something that is no checkpoint is told what it is, and what to name instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.errors import InputError
from ignition.export import open_source


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with stand-ins for what people have about."""
    monkeypatch.chdir(tmp_path)
    files = [
        "models/llama/config.json",
        "models/llama/model.safetensors",
        "cores/my core/core.json",
        "loose.safetensors",
    ]
    for name in (*files, "cores/my core/weights.safetensors", "recipe.py", "notes.txt", "ggufs/b.gguf", "ggufs/a.gguf"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{} no model")
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "cores/my core",
            "cores/my core: a core already; `flare serve 'cores/my core'` serves it, an export begins with a checkpoint",
        ),
        (
            "cores/my core/weights.safetensors",
            "cores/my core/weights.safetensors: a file of the core cores/my core; an export begins with a checkpoint",
        ),
        ("empty", "empty: is empty; a Hugging Face directory or a .gguf file is needed"),
        ("ggufs", "ggufs: no config.json, but GGUF files; name one: ggufs/a.gguf and 1 more"),
        ("models", "models: no config.json, but there is models/llama/config.json; name its directory"),
        (
            "models/llama/model.safetensors",
            "models/llama/model.safetensors: a file of the checkpoint models/llama; name that directory",
        ),
        (
            "loose.safetensors",
            "loose.safetensors: not a GGUF file, and no config.json is beside it; "
            "a Hugging Face directory or a .gguf file is needed",
        ),
        (
            "recipe.py",
            "recipe.py: a Python file; recipes are named, not given as files: see `ignition export --help`",
        ),
        ("notes.txt", "notes.txt: starts with b'{} n', not with b'GGUF'; this is not a GGUF file"),
        ("no.gguf", "no.gguf: no such file or directory, and no recipe; there are: dense, smollm2"),
        (
            "HuggingFaceTB/SmolLM2-135M",
            "HuggingFaceTB/SmolLM2-135M: no such file or directory, and no recipe; a repository of the hub is given as "
            "`--checkpoint HuggingFaceTB/SmolLM2-135M` of a recipe; there are: dense, smollm2",
        ),
        (
            "smolm2",
            "smolm2: no such file or directory, and no recipe; is smollm2 meant?; there are: dense, smollm2",
        ),
    ],
)
def test_what_is_no_checkpoint(here: Path, source: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        open_source(source, None)
    assert str(caught.value) == line


def test_another_checkpoint_of_a_recipe_is_told_the_same(here: Path) -> None:
    with pytest.raises(InputError, match="^empty: is empty; a Hugging Face directory"):
        open_source("smollm2", "empty")
