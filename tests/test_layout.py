"""The tree is fit to be published: nothing in it depends on, or tells of, the machine that it was written on."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME_PATH = re.compile(r"(?<![\w./-])/(?:home|root|Users|mnt|work|workspace|builds|tmp/[a-z]+)/[\w.]")
BINARY = {".png", ".svgz", ".gguf", ".so"}


def shipped_files(repository: Path) -> Iterator[Path]:
    """Every file that git tracks or would track; outside a git checkout, every file but the ones made by tools."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else ()
    for path in (repository / name for name in names) if names else repository.rglob("*"):
        made_by_tools = any(p == "__pycache__" or p.startswith(".venv") for p in path.relative_to(repository).parts)
        if path.is_file() and path.suffix not in BINARY and not made_by_tools:
            yield path


def test_no_file_names_a_path_of_the_machine_it_was_written_on(repository: Path) -> None:
    found = []
    for path in shipped_files(repository):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if HOME_PATH.search(line):
                found.append(f"{path.relative_to(repository)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["flare", "ignition", "recipes"])
def test_every_folder_of_python_files_tells_its_story(repository: Path, folder: str) -> None:
    """Each package has an __init__.py with a docstring; the import rules see only packages that have one."""
    for directory in [repository / folder, *(repository / folder).rglob("*")]:
        if directory.is_dir() and any(directory.glob("*.py")):
            initial = directory / "__init__.py"
            assert initial.is_file(), f"{directory.relative_to(repository)} has no __init__.py"
            story = ast.get_docstring(ast.parse(initial.read_text()))
            assert story, f"{initial.relative_to(repository)} has no docstring, or an empty one"


def test_constraints_pin_every_direct_dependency(repository: Path) -> None:
    """pip -c constraints.txt fixes the version of each dependency and extra, and names no place to take them from."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for group in project["optional-dependencies"].values() for r in group)]
    names = {normalise(re.split(r"[\[<>=!~ ]", requirement)[0]) for requirement in wanted} - {"flare-ignition"}
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    unpinned = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not unpinned, f"not of the form name==version: {unpinned}"
    assert names <= {normalise(line.split("==")[0]) for line in lines}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
