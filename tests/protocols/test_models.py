"""The model's card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import Model

from flare import __version__
from flare.conversation import GenerationRequest
from flare.core.sampling import NEUTRAL, VALID
from flare.errors import RequestError
from flare.protocols.models import find_model, model_card, model_info, model_list
from tests.support.live_server import make_model

SPECIFIED = {
    "vocab_size": int,
    "max_top_logprobs": int,
    "max_concurrency": int,
    "prefill_chunk_size": int,
    "default_max_tokens": int,
    "sampling_defaults": dict,
    "thinking_token_budget": type(None),
    "sampling_ranges": dict,
    "max_images_per_prompt": int,
    "max_image_tokens_per_prompt": int,
    "image_feature_window_tokens": int,
    "max_image_tokens_per_image": int,
    "max_image_pixels": int,
    "max_image_bytes": int,
    "input_modalities": list,
    "output_modalities": list,
}
"""Every field of the `flare` object that readers of cards know, and its type here."""

MODEL = make_model(
    id="alias",
    names=("alias", "org/tiny"),
    defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 90},
    sources={"temperature": "generation_config.json", "top_k": "config.json"},
)


def test_the_card_of_a_core_with_open_ranges() -> None:
    card = model_card(MODEL)
    assert json.loads(json.dumps(card)) == card
    assert (card["id"], card["root"], card["parent"], card["owned_by"]) == ("alias", "org/tiny", None, "local")
    assert card["max_model_len"] == card["context_length"] == 512
    assert card["flare"]["max_top_logprobs"] == 0
    assert card["flare"]["default_max_tokens"] == 90
    assert card["flare"]["sampling_ranges"] == {name: {"min": low, "max": high} for name, (low, high) in VALID.items()}
    assert card["flare"]["sampling_policy"] == "open"
    defaults = card["generation_defaults"]
    assert (defaults["temperature"], defaults["top_k"], defaults["top_p"]) == (0.6, 20, 1.0)
    assert defaults["sources"]["temperature"] == "generation_config.json"
    assert defaults["sources"]["top_p"] == "flare_default"
    assert card["thinking"]["supported"] is False


def test_the_fields_that_vllms_clients_read() -> None:
    card = model_card(MODEL)
    (permission,) = card["permission"]
    assert {name: value for name, value in permission.items() if name not in ("id", "created")} == {
        "object": "model_permission",
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": False,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    assert re.fullmatch(r"modelperm-\S+", permission["id"])
    assert permission["created"] == card["created"] == MODEL.created
    assert Model.model_validate(card, strict=True).id == "alias"


@pytest.mark.parametrize("most", [0, 1, 20])
def test_log_probabilities_are_advertised_as_the_core_has_them(most: int) -> None:
    card = model_card(make_model(max_top_logprobs=most))
    assert card["flare"]["max_top_logprobs"] == most
    assert card["permission"][0]["allow_logprobs"] is (most > 0)


def test_every_specified_field_has_its_type() -> None:
    flare = model_card(MODEL)["flare"]
    assert {name: type(flare[name]) for name in SPECIFIED} == SPECIFIED
    assert set(flare) - set(SPECIFIED) == {"max_tokens_cap", "sampling_policy", "target", "device"}
    served = model_card(make_model(target="cuda", device="NVIDIA H200 (sm_90a)"))["flare"]
    assert (served["target"], served["device"]) == ("cuda", "NVIDIA H200 (sm_90a)")
    assert set(flare["sampling_defaults"]) == {*NEUTRAL, "seed"}
    for bounds in flare["sampling_ranges"].values():
        assert set(bounds) == {"min", "max"} and bounds["min"] <= bounds["max"]


def test_ranges_of_an_author() -> None:
    flare = model_card(make_model(ranges={"temperature": (0.7, 1.0), "top_k": None}))["flare"]
    assert flare["sampling_ranges"] == dict.fromkeys(NEUTRAL) | {"temperature": {"min": 0.7, "max": 1.0}}
    assert flare["sampling_policy"] == "author"


@pytest.mark.parametrize(
    ("defaults", "cap", "wanted"),
    [
        ({}, None, 512),
        ({}, 40, 40),
        ({"max_new_tokens": 90}, None, 90),
        ({"max_new_tokens": 90}, 40, 40),
        ({"max_new_tokens": 20}, 40, 40),  # the operator's cap takes the place of the files' number
        ({"max_new_tokens": 9000}, None, 512),
        ({"max_length": 100}, None, 100),
        ({"max_length": 100, "max_new_tokens": 90}, None, 90),
        ({"max_length": 100}, 400, 100),
    ],
)
def test_the_default_budget(defaults: dict[str, Any], cap: int | None, wanted: int) -> None:
    """It is what an omitted limit comes to with an empty prompt, and the card says so."""
    model = make_model(defaults=defaults, max_tokens_cap=cap)
    card = model_card(model)["flare"]
    assert (card["default_max_tokens"], card["max_tokens_cap"]) == (wanted, cap)
    resolved = model.resolve_limit(GenerationRequest(prompts=[], prompt_field="prompt"), 0)
    assert min(model.context_length, model.context_length if resolved is None else resolved) == wanted


def test_only_its_own_names_find_it() -> None:
    model = make_model(id="alias", names=("alias", "org/tiny"))
    assert find_model("alias", model) == find_model("org/tiny", model) == model_list(model)["data"][0]
    for name in ("", "tiny", "ALIAS", "x" * 1000, "a\nb"):
        with pytest.raises(RequestError) as caught:
            find_model(name, model)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_model_info_is_what_cards_embed() -> None:
    card, info = model_card(MODEL), model_info(MODEL)
    for name in ("id", "root", "created", "context_length", "thinking", "generation_defaults", "flare"):
        assert info.pop(name) == card[name]
    assert info == {"names": ["alias", "org/tiny"], "version": __version__, "core": MODEL.fingerprint}
    repeated = model_info(make_model(id="org/tiny", names=("org/tiny", "org/tiny")))
    assert repeated["names"] == ["org/tiny"]


def test_every_field_of_the_card_is_documented(repository: Path) -> None:
    page = (repository / "docs/api.md").read_text()
    section = page.partition("\n## Models\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.M)
    documented = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    card = model_card(MODEL)
    assert documented == {"context_length", "thinking", "generation_defaults", *(f"flare.{n}" for n in card["flare"])}
