"""Configuration files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.errors import InputError
from flare.sources import Configuration, configure


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def from_file(tmp_path: Path, text: str) -> Configuration:
    return configure({}, {}, config=str(write(tmp_path / "flare.toml", text)))


def refusal(tmp_path: Path, text: str) -> str:
    """The one line that refuses a file; it names the file."""
    with pytest.raises(InputError) as caught:
        from_file(tmp_path, text)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/flare.toml: ") and "\n" not in line and len(line) < 400 + len(str(tmp_path))
    return line.removeprefix(f"{tmp_path}/flare.toml: ")
