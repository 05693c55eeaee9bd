"""Whoever names something else than a core is told what it is, and the command that leads on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flare.core.directory import open_core
from flare.errors import CoreError, NoCore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two models as people have them and a stand-in for a core."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama/config.json", "llama/model.safetensors", "llama/tokenizer.json", "cores/smollm2/core.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("cores/smollm2/kernels/sm_90a").mkdir(parents=True)
    Path("cores/smollm2/kernels/sm_90a/norm.cubin").write_text("")
    Path("cores/smollm2/kernels/cpu.so").write_text("")
    Path("my gguf").mkdir()
    Path("my gguf/tiny.gguf").write_bytes(b"GGUF\3\0\0\0")
    Path("notes.txt").write_text("x")
    Path("empty dir").mkdir()
    Path("other").mkdir()
    Path("other/notes.txt").write_text("x")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("nothing", "nothing: no such core directory; `ignition export RECIPE -o CORE` makes one"),
        ("What is 2 + 2?", "What is 2 + 2?: no such core directory; `ignition export RECIPE -o CORE` makes one"),
        ("smollm2", "smollm2: no such core directory; is cores/smollm2 meant?"),
        ("cores/smollm", "cores/smollm: no such core directory; is cores/smollm2 meant?"),
        ("notes.txt", "notes.txt: a file; a core is a directory, which `ignition export` makes"),
        ("pipe", "pipe: a file; a core is a directory, which `ignition export` makes"),
        (
            "my gguf/tiny.gguf",
            "my gguf/tiny.gguf: a GGUF file, not a core; "
            "`ignition export 'my gguf/tiny.gguf' -o cores/tiny` makes one of it",
        ),
        (
            "llama/model.safetensors",
            "llama/model.safetensors: a file of a checkpoint, not a core; "
            "`ignition export llama -o cores/llama` makes one of it",
        ),
    ],
)
def test_no_directory(here: Path, path: str, line: str) -> None:
    with pytest.raises(NoCore) as caught:
        open_core(path)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("llama", "llama: a checkpoint, not a core; `ignition export llama -o cores/llama` makes one of it"),
        (
            "my gguf",
            "my gguf: holds tiny.gguf, which is no core; "
            "`ignition export 'my gguf/tiny.gguf' -o cores/tiny` makes one of it",
        ),
        ("cores", "cores: is no core, but holds some; name one: cores/smollm2"),
        (
            "empty dir",
            "empty dir: is empty, without a core.json; `ignition export RECIPE -o 'empty dir'` puts a core there",
        ),
        ("other", "other: has no core.json, so it is not a core; export it again"),
    ],
)
def test_another_directory(here: Path, path: str, line: str) -> None:
    with pytest.raises(CoreError) as caught:
        open_core(path)
    assert str(caught.value) == line


@pytest.mark.parametrize("path", ["core.json", "kernels/cpu.so", "kernels/sm_90a/norm.cubin"])
def test_a_file_of_a_core(here: Path, path: str) -> None:
    path = f"cores/smollm2/{path}"
    with pytest.raises(NoCore, match=f"^{path}: a file of the core {here}/cores/smollm2; name that directory$"):
        open_core(path)


def test_a_part_of_a_core(here: Path) -> None:
    with pytest.raises(CoreError, match=f"^cores/smollm2/kernels: a part of the core {here}/cores/smollm2; name"):
        open_core("cores/smollm2/kernels")
