"""Discovery the way Ollama's clients do it."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from ollama import ListResponse, ShowResponse

from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.protocols.models import model_card
from flare.protocols.ollama import show, tags
from tests.support.live_server import make_model

ALIASED = make_model(id="alias", names=("alias", "second", "org/tiny"))
SYNTAXES = {
    "text": (OutputSyntax(), ["completion"]),
    "tools": (OutputSyntax(tools="hermes"), ["completion", "tools"]),
    "thinking": (OutputSyntax(reasoning=("<think>", "</think>")), ["completion", "thinking"]),
    "both": (OutputSyntax(tools="hermes", reasoning=("<a>", "</a>")), ["completion", "tools", "thinking"]),
}


def shown(body: Any, model: Any = ALIASED) -> dict[str, Any]:
    return show(json.dumps(body).encode(), model)


def listed(model: Any = ALIASED) -> dict[str, Any]:
    (entry,) = tags(model)["models"]
    return entry


def test_the_listing_is_exactly_this() -> None:
    entry = listed()
    digest = entry.pop("digest")
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert entry == {
        "name": "alias",
        "model": "alias",
        "modified_at": "0001-01-01T00:00:00Z",
        "size": 0,
        "details": {
            "parent_model": "",
            "format": "flare",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    assert entry["name"] == model_card(ALIASED)["id"]


def test_the_metadata_are_exactly_these() -> None:
    assert shown({"model": "alias"}) == {
        "details": listed()["details"],
        "model_info": {"general.name": "alias", "flare.context_length": 512, "flare.vocab_size": 259},
        "capabilities": ["completion"],
    }


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_capabilities_are_what_the_core_declares(syntax: str) -> None:
    output, capabilities = SYNTAXES[syntax]
    assert shown({"model": "org/tiny"}, make_model(output=output))["capabilities"] == capabilities


def test_ollamas_own_library_reads_both() -> None:
    models = ListResponse.model_validate(tags(ALIASED)).models
    assert [model.model for model in models] == ["alias"]
    assert isinstance(models[0].modified_at, datetime) and models[0].size == 0
    answer = ShowResponse.model_validate(shown({"model": "alias"}))
    assert answer.capabilities == ["completion"]
    assert answer.modelinfo is not None and answer.modelinfo["flare.context_length"] == 512


@pytest.mark.parametrize("name", ["alias", "second", "org/tiny"])
@pytest.mark.parametrize("more", [{}, {"verbose": True}, {"verbose": False}, {"verbose": None}])
def test_every_name_gets_the_same(name: str, more: dict[str, Any]) -> None:
    assert shown({"model": name, **more}) == shown({"model": "alias"})


def test_the_older_spelling_of_model() -> None:
    assert shown({"name": "second"}) == shown({"model": "alias"}) == shown({"model": "alias", "name": "alias"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"model": ["alias"]}, "model"),
        ({"model": {"name": "alias"}}, "model"),
        ({"verbose": True}, "model"),
        ({"name": ""}, "model"),
        ({"name": 5}, "name"),
        ({"model": "alias", "name": ""}, "model"),
        ({"model": "alias", "name": "second"}, "name"),
        ({"model": "alias", "verbose": 1}, "verbose"),
        ({"model": "alias", "verbose": "true"}, "verbose"),
        ({"model": "alias", "stream": False}, "stream"),
        ([], None),
        ("alias", None),
        (None, None),
    ],
)
def test_what_is_no_name_is_refused(body: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        shown(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}', b"\x1f\x8b\x08\x00"])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        show(body, ALIASED)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["other", "ALIAS", "alias:latest", "tiny", " alias", "x" * 5000, "a\nb"])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        shown({"model": name})
    assert caught.value.status == 404
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250


def test_the_digest_follows_what_is_advertised_and_nothing_else() -> None:
    digest = listed()["digest"]
    same = make_model(id="alias", names=("alias", "second", "org/tiny"), created=1_800_000_000, max_tokens_cap=5)
    assert listed(same)["digest"] == listed()["digest"] == digest
    changes: list[dict[str, Any]] = [
        {"id": "second"},
        {"root": "org/other"},
        {"fingerprint": "core-fedcba9876543210"},
        {"context_length": 513},
        {"vocabulary": 260},
        {"output": OutputSyntax(tools="hermes")},
        {"output": OutputSyntax(reasoning=("<a>", "</a>"))},
    ]
    digests = [
        listed(make_model(**({"id": "alias", "names": ("alias", "second", "org/tiny")} | change)))["digest"]
        for change in changes
    ]
    assert len({digest, *digests}) == len(changes) + 1


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_opencode_asks_of_a_listing(syntax: str) -> None:
    """Its provider drops everything unless these fields have these types; context and features come from these keys."""
    model = make_model(output=SYNTAXES[syntax][0])
    for entry in json.loads(json.dumps(tags(model)))["models"]:
        assert all(type(entry[key]) is str and entry[key] for key in ("name", "model", "modified_at", "digest"))
        assert type(entry["size"]) is int
        keys = ("format", "family", "parameter_size", "quantization_level")
        assert all(type(entry["details"][key]) is str for key in keys)
        answer = json.loads(json.dumps(shown({"model": entry["model"]}, model)))
        assert "completion" in answer["capabilities"]
        contexts = [value for key, value in answer["model_info"].items() if key.endswith(".context_length")]
        assert contexts == [model.context_length] and contexts[0] > 0
