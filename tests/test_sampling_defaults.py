"""Sampling defaults and end tokens out of models' files: precedence, sources, ranges, and values that are no values."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flare.conversation import SamplingRequest
from flare.errors import InputError
from flare.tables import checked_ranges
from ignition.sampling import NEUTRAL, gather_eos, gather_sampling
from recipes.sampling import AUTHORS, AuthorSampling
from tests.support.live_server import make_model

AUTHOR = AuthorSampling(
    {"temperature": 1, "top_p": 0.95, "top_k": 20}, {"temperature": (0.7, 1), "presence_penalty": (0.0, 2.0)}
)


def gather(generation: Any = None, config: Any = None, **options: Any) -> dict[str, Any]:
    facts = gather_sampling(generation_config=generation, config=config, **options)
    assert facts["defaults"].keys() == facts["sources"].keys() == NEUTRAL.keys()
    return json.loads(json.dumps(facts))


def test_nothing_set_is_plain_sampling() -> None:
    facts = gather({}, {})
    assert facts["defaults"] == NEUTRAL
    assert set(facts["sources"].values()) == {"flare_default"}
    assert facts["ranges"] == "open"


def test_each_field_comes_from_the_first_file_that_sets_it() -> None:
    facts = gather(
        {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 512},
        {"temperature": 0.1, "top_p": 0.5, "min_p": 0.2, "generation_config": {"top_p": 0.9, "max_length": 4096}},
    )
    assert facts["defaults"] == NEUTRAL | {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.2,
        "max_new_tokens": 512,
        "max_length": 4096,
    }
    named = {name: source for name, source in facts["sources"].items() if source != "flare_default"}
    assert named == {
        "temperature": "generation_config.json",
        "top_k": "generation_config.json",
        "max_new_tokens": "generation_config.json",
        "top_p": "config.json",
        "min_p": "config.json",
        "max_length": "config.json",
    }


@pytest.mark.parametrize(
    ("generation", "config", "temperature", "source"),
    [
        ({"do_sample": False, "temperature": 0.6}, {}, 0.0, "generation_config.json"),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": False}, 0.6, "generation_config.json"),
        ({"do_sample": True}, {"do_sample": False}, 1.0, "flare_default"),
        ({"temperature": 0.6}, {"do_sample": False}, 0.6, "generation_config.json"),
        (None, {"do_sample": False}, 0.0, "config.json"),
        ({}, {"generation_config": {"do_sample": False}, "temperature": 0.3}, 0.0, "config.json"),
        ({"do_sample": None}, {}, 1.0, "flare_default"),
    ],
)
def test_a_model_that_does_not_sample_is_greedy(generation: Any, config: Any, temperature: float, source: str) -> None:
    facts = gather(generation, config)
    assert facts["defaults"]["temperature"] == temperature
    assert facts["sources"]["temperature"] == source


def test_author_settings_come_first_and_fix_what_they_give_no_range() -> None:
    facts = gather({"temperature": 0.2, "top_k": 5, "min_p": 0.1, "do_sample": False}, {}, author=AUTHOR)
    assert facts["defaults"]["temperature"] == 1.0
    assert facts["defaults"]["min_p"] == 0.1
    assert facts["sources"]["top_k"] == "recipe"
    assert facts["ranges"] == {
        "temperature": [0.7, 1],
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": None,
        "presence_penalty": [0.0, 2.0],
        "frequency_penalty": None,
    }


def test_ranges_can_be_opened_and_asked_for() -> None:
    assert gather(author=AUTHOR, ranges="open")["ranges"] == "open"
    assert gather(author=AUTHOR, ranges="author")["ranges"] == gather(author=AUTHOR)["ranges"]
    assert gather(ranges="open")["ranges"] == "open"
    with pytest.raises(InputError, match="--sampling-ranges author"):
        gather(ranges="author")


@pytest.mark.parametrize(
    ("author", "words"),
    [
        (AuthorSampling({"temperature": 0.5}, {"temperature": (0.7, 1)}), "temperature is 0.7 to 1, must hold .* 0.5"),
        (AuthorSampling({}, {"temperature": (0, 1)}), "temperature starts at 0"),
        (AuthorSampling({}, {"top_p": (0.5, 1.5)}), "top_p is 1.5"),
        (AuthorSampling({}, {"seed": (1, 2)}), "seed bounds nothing"),
        (AuthorSampling({}, {"temperature": (1.2, 0.8)}), "temperature is 1.2 to 0.8, must hold"),
        (AuthorSampling({}, {"temperature": (float("nan"), 1)}), "the range of temperature is nan"),
        (AuthorSampling({"temprature": 1}), "recipe: temprature is no sampling field; there are temperature, "),
    ],
)
def test_author_ranges_must_hold_their_defaults(author: AuthorSampling, words: str) -> None:
    with pytest.raises(InputError, match=words):
        gather(author=author)


BAD = [
    ("temperature", "0.7"),
    ("temperature", True),
    ("temperature", float("nan")),
    ("temperature", [1]),
    ("top_k", 2.5),
    ("top_k", True),
    ("top_k", -2),
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", "x"),
    ("frequency_penalty", float("inf")),
    ("max_new_tokens", 0),
    ("max_new_tokens", "all"),
    ("max_length", 2**70),
    ("seed", -1),
    ("do_sample", "no"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_that_is_none_is_named_with_its_file_and_field(name: str, value: Any) -> None:
    for files, where in (
        (({name: value}, {}), rf"^generation_config\.json: {name} is "),
        ((None, {name: value}), rf"^config\.json: {name} is "),
        ((None, {"generation_config": {name: value}}), rf"^config\.json: generation_config\.{name} is "),
    ):
        with pytest.raises(InputError, match=where) as caught:
            gather(*files)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_an_embedded_generation_config_must_be_an_object() -> None:
    with pytest.raises(InputError, match=r"config\.json: generation_config is \[1\]"):
        gather(None, {"generation_config": [1]})


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 5}, 5, [5, 7]),
        (None, {"eos_token_id": 5}, 5, [5]),
        ({}, {"eos_token_id": [5, 7]}, None, [5, 7]),
        (None, {}, 5, [5]),
        ({"eos_token_id": None}, {"generation_config": {"eos_token_id": 3}, "eos_token_id": 4}, 3, [3, 4]),
        ({"eos_token_id": []}, {}, None, []),
    ],
)
def test_all_end_tokens_count_once_in_order(
    generation: Any, config: Any, tokenizer: int | None, expected: list
) -> None:
    found = gather_eos(generation_config=generation, config=config, tokenizer_eos=tokenizer, vocabulary=10)
    assert found == expected


@pytest.mark.parametrize("value", ["5", 5.0, True, -1, 10, [5, None], [[5]], {"a": 1}])
def test_an_end_token_must_be_in_the_vocabulary(value: Any) -> None:
    with pytest.raises(InputError, match=r"^generation_config\.json: eos_token_id is .*0 to 9"):
        gather_eos(generation_config={"eos_token_id": value}, config={}, tokenizer_eos=None, vocabulary=10)
    with pytest.raises(InputError, match=r"tokenizer\.json: .* 10"):
        gather_eos(generation_config={}, config={}, tokenizer_eos=10, vocabulary=10)


SPECIFIED = """
qwen38 1 0.95 20 Temperature [0.7, 1]; top-p [0.8, 0.95]; presence penalty [0, 2] Qwen3.8-Flash-Next thinking/instruct presets
qwen38_dense 1 0.95 20 Temperature [0.7, 1]; top-p [0.8, 0.95]; presence penalty [0, 2] Qwen3.8-27B thinking/instruct presets
glm53 1 0.95 Disabled Temperature [0.95, 1]; top-p [0.95, 1] GLM-5.3-Flash evaluation presets
deepseek4 1 0.95 Disabled None DeepSeek-V4-Flash-Vision-Exp agent evaluations
deepseek41 1 1 Disabled Repetition penalty [1, 1.1] DeepSeek-V4.1-Flash-1017 recommendations
mimo_v2 1 0.95 Disabled None MiMo-V2.6-Pro-MOPD deployment; MiMo-V2.6-Flash-RL deployment
kimi3 1 1 Disabled Top-p [0.95, 1] Kimi-K3 single-step/agentic evaluations
step5 1 0.95 Disabled None Step-5-Preview-NVFP4 inference recommendations
nemotron_h 1 0.95 Disabled None Nemotron-3.5-Bolt text recommendations
kimi31 1 0.95 Disabled None Kimi-K3.1-Pro evaluation settings
minimax_m3 1 0.95 Disabled None MiniMax-M3.1-Flash usage recommendations
muse_spark 1 1 Disabled None Muse-Spark-Open-816B-A42B-NVFP4 model card
gemma4 1 0.95 64 None Gemma 4 model card sampling recommendations
"""
"""The specification's table as it stands there: recipe, temperature, top-p, top-k, declared intervals, and their basis."""


def specified() -> dict[str, tuple[dict[str, float], dict[str, list[float]]]]:
    rows = {}
    for line in SPECIFIED.strip().splitlines():
        name, temperature, top_p, top_k, rest = line.split(maxsplit=4)
        defaults = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": -1 if top_k == "Disabled" else int(top_k),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        found = re.findall(r"(Temperature|[Tt]op-p|[a-zA-Z]+ penalty) \[([\d.]+), ([\d.]+)\]", rest)
        ranges = {re.sub("[- ]", "_", what.lower()): [float(low), float(high)] for what, low, high in found}
        rows[name] = (defaults, ranges)
    return rows


def test_the_authors_settings_are_the_specification_s() -> None:
    rows = specified()
    assert AUTHORS.keys() == rows.keys() and sum(len(ranges) for _, ranges in rows.values()) == 10


@pytest.mark.parametrize("name", AUTHORS)
def test_an_author_s_row_becomes_a_core_that_can_be_served(name: str) -> None:
    """Whatever the model's files say: the row decides every field, and what has no range is fixed."""
    defaults, ranges = specified()[name]
    facts = gather(
        {"temperature": 0.1, "top_k": 3, "min_p": 0.5, "do_sample": False, "seed": 5}, {}, author=AUTHORS[name]
    )
    assert {field: facts["defaults"][field] for field in defaults} == defaults
    assert {facts["sources"][field] for field in defaults} == {"recipe"}
    assert facts["sources"]["seed"] == "generation_config.json"
    assert facts["ranges"] == dict.fromkeys(defaults) | ranges
    served = checked_ranges(facts["ranges"], facts["defaults"])
    model = make_model(defaults=facts["defaults"], ranges=served)
    lowest = model.resolve_sampling(SamplingRequest(**dict.fromkeys(defaults, -9)))
    highest = model.resolve_sampling(SamplingRequest(**dict.fromkeys(defaults, 9)))
    for field, default in defaults.items():
        low, high = ranges.get(field, (default, default))
        assert (lowest[field], model.sampling_default(field), highest[field]) == (low, default, high)


@pytest.mark.parametrize(("name", "value"), [("top_k", 10**10), ("repetition_penalty", 1e-6), ("presence_penalty", 3)])
def test_a_default_that_the_server_would_refuse_is_refused_at_export(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"generation_config.json: {name} is .*, must be .*from"):
        gather_sampling(generation_config={name: value}, config={})
