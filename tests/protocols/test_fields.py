"""Fields without an effect and fields without an engine part: the tables are complete, and mean what they say."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from flare.errors import RequestError
from flare.protocols import chat, completions, fields
from tests.support.live_server import make_model

ENDPOINTS = {
    "chat": (chat.ChatCompletions(), chat.ChatRequest, chat.UNBUILT, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (completions.Completions(), completions.CompletionRequest, completions.UNBUILT, {"prompt": "hi"}),
}
THINKING = {"reasoning_effort", "thinking_level", "reasoning", "enable_thinking", "thinking", "chat_template_kwargs"}
MEANINGS = [5, 0.5, "x", True, [1], {"a": 1}]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_untyped_field_is_in_one_of_the_tables(name: str) -> None:
    _, struct, unbuilt, _ = ENDPOINTS[name]
    untyped = {field for field, hint in get_type_hints(struct).items() if hint is Any}
    assert untyped == set(unbuilt) | THINKING
    assert set(fields.INERT) <= set(struct.__struct_fields__)
    assert not set(fields.INERT) & set(unbuilt)


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, (_, _, table, _) in ENDPOINTS.items() for f in table])
def test_an_unbuilt_field_is_refused_by_name_and_its_neutral_values_pass(name: str, field: str) -> None:
    endpoint, _, unbuilt, minimal = ENDPOINTS[name]

    def decode(value: Any) -> None:
        endpoint.decode(json.dumps({**minimal, field: value}).encode(), make_model())

    for neutral in (None, *unbuilt[field]):
        decode(neutral)
    refused = 0
    for value in MEANINGS:
        if any(type(value) is type(neutral) and value == neutral for neutral in unbuilt[field]):
            continue
        with pytest.raises(RequestError) as caught:
            decode(value)
        assert caught.value.param == field and caught.value.code == "unsupported_parameter"
        assert str(caught.value).startswith(f"{field}: ")
        refused += 1
    assert refused >= 4


@pytest.mark.parametrize("name", ENDPOINTS)
def test_inert_fields_pass(name: str) -> None:
    endpoint, _, _, minimal = ENDPOINTS[name]
    values = {
        "model": "another",
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "parallel_tool_calls": False,
    }
    assert set(values) == set(fields.INERT)
    plain = endpoint.decode(json.dumps(minimal).encode(), make_model())
    assert endpoint.decode(json.dumps(minimal | values).encode(), make_model()) == plain


@pytest.mark.parametrize("field", chat.UNBUILT_PART)
def test_a_text_part_carries_nothing_else(field: str) -> None:
    endpoint = ENDPOINTS["chat"][0]

    def decode(value: Any) -> None:
        part = {"type": "text", "text": "hi", field: value}
        body = {"messages": [{"role": "user", "content": [part]}]}
        endpoint.decode(json.dumps(body).encode(), make_model())

    decode(None)
    for value in MEANINGS:
        with pytest.raises(RequestError) as caught:
            decode(value)
        assert caught.value.param == f"messages[0].content[0].{field}"


def test_true_is_not_one() -> None:
    endpoint, _, _, minimal = ENDPOINTS["chat"]
    for field, value in (("length_penalty", True), ("echo", 0), ("min_tokens", False)):
        with pytest.raises(RequestError) as caught:
            endpoint.decode(json.dumps({**minimal, field: value}).encode(), make_model())
        assert caught.value.param == field
