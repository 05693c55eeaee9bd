"""The model's card."""

from __future__ import annotations

import json

import pytest

from flare.errors import RequestError
from flare.protocols.models import find_model, model_card, model_list
from tests.support.live_server import make_model


def test_the_card_of_a_core_with_open_ranges() -> None:
    model = make_model(
        id="alias",
        names=("alias", "org/tiny"),
        defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 90},
        sources={"temperature": "generation_config.json", "top_k": "config.json"},
    )
    card = model_card(model)
    assert json.loads(json.dumps(card)) == card
    assert (card["id"], card["root"], card["parent"], card["owned_by"]) == ("alias", "org/tiny", None, "local")
    assert card["max_model_len"] == card["context_length"] == 512
    assert card["permission"][0]["allow_sampling"] is True
    assert card["permission"][0]["allow_logprobs"] is False
    assert card["flare"]["max_top_logprobs"] == 0
    assert card["flare"]["default_max_tokens"] == 90
    assert set(card["flare"]["sampling_ranges"].values()) == {"open"}
    defaults = card["generation_defaults"]
    assert (defaults["temperature"], defaults["top_k"], defaults["top_p"]) == (0.6, 20, 1.0)
    assert defaults["sources"]["temperature"] == "generation_config.json"
    assert defaults["sources"]["top_p"] == "flare_default"
    assert card["thinking"]["supported"] is False


def test_ranges_of_an_author() -> None:
    card = model_card(make_model(ranges={"temperature": (0.7, 1.0), "top_k": None}))
    assert card["flare"]["sampling_ranges"]["temperature"] == {"min": 0.7, "max": 1.0}
    assert card["flare"]["sampling_ranges"]["top_k"] is None
    assert card["flare"]["sampling_ranges"]["min_p"] is None


def test_only_its_own_names_find_it() -> None:
    model = make_model(id="alias", names=("alias", "org/tiny"))
    assert find_model("alias", model) == find_model("org/tiny", model) == model_list(model)["data"][0]
    for name in ("", "tiny", "ALIAS", "x" * 1000, "a\nb"):
        with pytest.raises(RequestError) as caught:
            find_model(name, model)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
