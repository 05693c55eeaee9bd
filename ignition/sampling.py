"""Sampling defaults, their sources and ranges, and the tokens that end a reply, from a model's own files.

The first of these that sets a field wins: the recipe's author settings, generation_config.json, config.json (its
embedded `generation_config`, then its top level), and neutral values that mean plain sampling. `null` sets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from flare.core.sampling import NEUTRAL as SAMPLED
from flare.core.sampling import VALID, WHOLE
from flare.errors import InputError
from recipes.sampling import AuthorSampling

NEUTRAL: dict[str, Any] = {**SAMPLED, "max_new_tokens": None, "max_length": None, "seed": None}
"""Every field that has a default, and the value that changes nothing: filters and penalties off, no limit, no seed."""


def gather_sampling(
    *,
    generation_config: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    author: AuthorSampling | None = None,
    ranges: Literal["author", "open"] | None = None,
) -> dict[str, Any]:
    """Returns the manifest's `sampling`: {"defaults", "sources", "ranges"}.

    `defaults` and `sources` have every field of `NEUTRAL`; a source is "recipe", "generation_config.json",
    "config.json" or "flare_default". `ranges` is "open", or maps every field that is sampled with to [least, most], or to None
    where the field is fixed at its default. The option `ranges` None means the author's where there are any settings,
    else open. With open ranges `do_sample: false` makes the default temperature 0.

    Raises InputError naming file and field for a value of the wrong type or out of any sampler's bounds, and for author
    ranges that do not exist or do not hold their defaults.
    """
    if ranges == "author" and author is None:
        raise InputError(
            "--sampling-ranges author: this recipe has no author settings; leave the option out or say open"
        )
    if author is not None and (unknown := sorted(author.defaults.keys() - NEUTRAL.keys())):
        raise InputError(f"recipe: {unknown[0]} is no sampling field; there are {', '.join(NEUTRAL)}")
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
    if name in WHOLE:
        least, most = WHOLE[name]
        if type(value) is not int or not least <= value <= most:
            raise InputError(f"{where} is {_shown(value)}, must be an integer from {least} to {most}")
        return value
    low, high = VALID[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{where} is {_shown(value)}, must be a number")
    if not low <= value <= high:
        raise InputError(f"{where} is {_shown(value)}, must be from {low:g} to {high:g}")
    return float(value)


def _author_ranges(author: AuthorSampling, defaults: Mapping[str, Any]) -> dict[str, list[float] | None]:
    for name, (low, high) in author.ranges.items():
        where = f"recipe: the range of {name}"
        if name not in SAMPLED:
            raise InputError(f"{where} bounds nothing; ranges exist for {', '.join(SAMPLED)}")
        for bound in (low, high):
            _checked(name, bound, where)
        if name == "temperature" and low <= 0:
            raise InputError(f"{where} starts at {low:g}, must start above 0")
        if not low <= defaults[name] <= high:
            raise InputError(f"{where} is {low:g} to {high:g}, must hold the default {defaults[name]:g}")
    return {name: list(author.ranges[name]) if name in author.ranges else None for name in SAMPLED}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
