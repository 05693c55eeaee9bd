"""Sampling defaults, their sources and ranges, and the tokens that end a reply, from a model's own files.

The first of these that sets a field wins: the recipe's author settings, generation_config.json, config.json (its
embedded `generation_config`, then its top level), and neutral values that mean plain sampling. `null` sets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flare.errors import InputError

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_new_tokens": None,
    "max_length": None,
    "seed": None,
}
"""Every field that has a default, and the value that changes nothing: filters and penalties off, no limit, no seed."""

RANGED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The fields that author ranges bound or fix."""

BOUNDS = {
    "temperature": (-1e4, 1e4),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-4, 1e4),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""What the server samples with, inclusive: a default outside would make it refuse every request that leaves it open."""

_WHOLE = {  # integers, and the bounds of each
    "top_k": BOUNDS["top_k"],
    "max_new_tokens": (1, 2**63 - 1),
    "max_length": (1, 2**63 - 1),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class AuthorSampling:
    """What a model's author recommends, as a recipe states it: defaults, and inclusive ranges of what may vary."""

    defaults: Mapping[str, float | int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def gather_sampling(
    *,
    generation_config: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    author: AuthorSampling | None = None,
    ranges: Literal["author", "open"] | None = None,
) -> dict[str, Any]:
    """Returns the manifest's `sampling`: {"defaults", "sources", "ranges"}.

    `defaults` and `sources` have every field of `NEUTRAL`; a source is "recipe", "generation_config.json",
    "config.json" or "flare_default". `ranges` is "open", or maps every field of `RANGED` to [least, most], or to None
    where the field is fixed at its default. The option `ranges` None means the author's where there are any settings,
    else open. With open ranges `do_sample: false` makes the default temperature 0.

    Raises InputError naming file and field for a value of the wrong type or out of any sampler's bounds, and for author
    ranges that do not exist or do not hold their defaults.
    """
    if ranges == "author" and author is None:
        raise InputError(
            "--sampling-ranges author: this recipe has no author settings; leave the option out or say open"
        )
    fixed = author is not None and ranges != "open"
    defaults, sources = dict(NEUTRAL), dict.fromkeys(NEUTRAL, "flare_default")
    unset = set(NEUTRAL)
    sampling_said = False
    for source, prefix, values in _sources(author, generation_config, config):
        do_sample = values.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise InputError(f"{source}: {prefix}do_sample is {_shown(do_sample)}, must be true or false")
        greedy = do_sample is False and not sampling_said and not fixed
        sampling_said = sampling_said or do_sample is not None
        for name in [name for name in NEUTRAL if name in unset]:
            value = _checked(name, values.get(name), f"{source}: {prefix}{name}")
            if name == "temperature" and greedy:
                value = 0.0
            if value is not None:
                defaults[name], sources[name] = value, source
                unset.discard(name)
    return {
        "defaults": defaults,
        "sources": sources,
        "ranges": _author_ranges(author, defaults) if fixed and author is not None else "open",
    }


def gather_eos(
    *,
    generation_config: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    tokenizer_eos: int | None,
    vocabulary: int,
) -> list[int]:
    """Returns the ids that end a reply: generation_config.json's, then config.json's, then the tokenizer's, each once.

    All of them count: files often list only some, and every one is an end by its own file's word. Raises InputError
    naming file and field for anything but ids inside the vocabulary.
    """
    found: dict[int, None] = {}
    for source, prefix, values in _sources(None, generation_config, config):
        declared = values.get("eos_token_id")
        if declared is None:
            continue
        for token in declared if isinstance(declared, list) else [declared]:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise InputError(
                    f"{source}: {prefix}eos_token_id is {_shown(declared)}, must be ids from 0 to {vocabulary - 1}"
                )
            found[token] = None
    if tokenizer_eos is not None:
        if not 0 <= tokenizer_eos < vocabulary:
            raise InputError(
                f"tokenizer.json: the end token's id is {tokenizer_eos}, the model has {vocabulary} tokens"
            )
        found[tokenizer_eos] = None
    return list(found)


def _sources(
    author: AuthorSampling | None, generation_config: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(file, prefix of its fields, values) in order of precedence."""
    if author is not None:
        yield "recipe", "", author.defaults
    if generation_config is not None:
        yield "generation_config.json", "", generation_config
    if config is not None:
        embedded = config.get("generation_config")
        if embedded is not None:
            if not isinstance(embedded, Mapping):
                raise InputError(f"config.json: generation_config is {_shown(embedded)}, must be an object")
            yield "config.json", "generation_config.", embedded
        yield "config.json", "", config


def _checked(name: str, value: Any, where: str) -> Any:
    if value is None:
        return None
    if name in _WHOLE:
        least, most = _WHOLE[name]
        if type(value) is not int or not least <= value <= most:
            raise InputError(f"{where} is {_shown(value)}, must be an integer from {least} to {most}")
        return value
    low, high = BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{where} is {_shown(value)}, must be a number")
    if not low <= value <= high:
        raise InputError(f"{where} is {_shown(value)}, must be from {low:g} to {high:g}")
    return float(value)


def _author_ranges(author: AuthorSampling, defaults: Mapping[str, Any]) -> dict[str, list[float] | None]:
    for name, (low, high) in author.ranges.items():
        where = f"recipe: the range of {name}"
        if name not in RANGED:
            raise InputError(f"{where} bounds nothing; ranges exist for {', '.join(RANGED)}")
        for bound in (low, high):
            _checked(name, bound, where)
        if name == "temperature" and low <= 0:
            raise InputError(f"{where} starts at {low:g}, must start above 0")
        if not low <= defaults[name] <= high:
            raise InputError(f"{where} is {low:g} to {high:g}, must hold the default {defaults[name]:g}")
    return {name: list(author.ranges[name]) if name in author.ranges else None for name in RANGED}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
