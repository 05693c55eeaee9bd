"""Every field is built, without an effect for a stated reason, or refused by name; the tables mean what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as SdkChat
from openai.types.completion_create_params import CompletionCreateParamsBase as SdkCompletions

from flare.errors import RequestError
from flare.protocols import chat, chat_messages, completions, fields
from tests.support.live_server import make_model

ENDPOINTS = {
    "chat": (chat.ChatCompletions(), chat.ChatRequest, chat.UNBUILT, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (completions.Completions(), completions.CompletionRequest, completions.UNBUILT, {"prompt": "hi"}),
}
THINKING = {"reasoning_effort", "thinking_level", "reasoning", "enable_thinking", "thinking", "chat_template_kwargs"}
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed", "n"}
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
ENDS = {"max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "stop_token_sequences", "ignore_eos"}
FORMS = {"response_format", "grammar", "structured_outputs"}
SHOWN = {"stream", "stream_options", "return_token_ids"}
RATED = {"logprobs", "logprob_token_ids", "prompt_logprobs", "return_tokens_as_token_ids"}
BUILT = {
    "chat": SAMPLING
    | PENALTIES
    | ENDS
    | FORMS
    | SHOWN
    | THINKING
    | RATED
    | {"messages", "tools", "tool_choice", "parallel_tool_calls", "return_token_timestamps", "top_logprobs"}
    | {"add_generation_prompt", "continue_final_message", "thinking_token_budget"},
    "completions": SAMPLING | PENALTIES | ENDS | FORMS | SHOWN | RATED | THINKING | {"prompt", "best_of", "echo"},
}
SDK = {"chat": set(SdkChat.__annotations__), "completions": set(SdkCompletions.__annotations__)}
VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ignore_eos include_stop_str_in_output kv_transfer_params
    length_penalty logits_processors min_p min_tokens priority prompt_logprobs repetition_detection repetition_penalty
    request_id return_token_ids return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens
    stop_token_ids structured_outputs top_k truncate_prompt_tokens use_beam_search vllm_xargs
"""
VLLM = {
    "chat": VLLM_BOTH
    + """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
    media_io_kwargs mm_processor_kwargs thinking_token_budget
""",
    "completions": VLLM_BOTH + " prompt_embeds",
}
MEANINGS = [5, 0.5, "x", True, [1], {"a": 1}]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_untyped_field_is_in_one_of_the_tables(name: str) -> None:
    _, struct, unbuilt, _ = ENDPOINTS[name]
    untyped = {field for field, hint in get_type_hints(struct).items() if hint is Any}
    assert untyped == set(unbuilt) | THINKING
    assert set(fields.INERT) <= set(struct.__struct_fields__)
    assert not set(fields.INERT) & set(unbuilt)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_field_has_one_fate(name: str) -> None:
    _, struct, unbuilt, _ = ENDPOINTS[name]
    assert sorted([*BUILT[name], *fields.INERT, *(set(unbuilt) - BUILT[name])]) == sorted(struct.__struct_fields__)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_field_of_the_sdk_and_of_vllm_is_known(name: str) -> None:
    _, struct, _, _ = ENDPOINTS[name]
    known = set(struct.__struct_fields__)
    assert SDK[name] <= known and "temperature" in SDK[name]
    assert set(VLLM[name].split()) <= known


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_documents_list_the_fields(name: str, repository: Path) -> None:
    """The table of built fields in the endpoint's section, and that of refused ones with the values that pass."""
    _, _, unbuilt, _ = ENDPOINTS[name]
    text = (repository / "docs/api.md").read_text()
    title = {"chat": "Chat Completions", "completions": "Completions"}[name]
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    refused = re.search(r"^## Fields that are not served yet$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section and refused
    listed = {field for line in section[1].splitlines() if line.startswith("| `") for field in ticked(line)}
    assert listed == BUILT[name]
    rows = [line for line in refused[1].splitlines() if line.startswith("| `")]
    column = 1 if name == "chat" else 2
    passing = {ticked(row)[0]: row.strip("|").split(" | ")[column].strip() for row in rows}
    shown = {
        field: ", ".join(f"`{json.dumps(value)}`" for value in unbuilt[field]) if field in unbuilt else "-"
        for field in passing
    }
    assert set(unbuilt) <= set(passing) and {f: cell or "" for f, cell in passing.items()} == shown


def ticked(line: str) -> list[str]:
    """The names in the first cell of a table's row."""
    return re.findall(r"`(\w+)`", line.split(" | ")[0])


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
    }
    assert set(values) == set(fields.INERT)
    plain = endpoint.decode(json.dumps(minimal).encode(), make_model())
    assert endpoint.decode(json.dumps(minimal | values).encode(), make_model()) == plain


@pytest.mark.parametrize("field", chat_messages.UNBUILT_PART)
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
