"""The manifest's open tables: a wrong entry is one line when the core is loaded, not a failure of every request."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flare.config import RuntimeSettings
from flare.conversation import SamplingRequest
from flare.core.manifest import Template
from flare.core.sampling import NEUTRAL, VALID
from flare.engine import SamplingParams
from flare.errors import CoreError, InputError, SettingError
from flare.loading import load_text, served_model
from flare.output import OutputSyntax
from flare.protocols.models import model_card
from flare.thinking import NO_THINKING
from tests.support.live_server import byte_tokenizer
from tests.test_runtime import make_core

LEVEL = {
    "id": "none",
    "default": True,
    "enable_thinking": False,
    "reasoning_effort": None,
    "instruction": None,
    "opens_reasoning": False,
}
TAGS = ["<think>", "</think>"]
SETTINGS = RuntimeSettings(core="c", threads=1)


def refused(core: Any, field: str) -> None:
    with pytest.raises(CoreError) as caught:
        served_model(core, SETTINGS, kv_pages=5, decode_weight_bytes=77)
    assert f"core.json: {field}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 20.0),
        ("top_k", 10**10),
        ("top_k", True),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", math.nan),
        ("temperature", 1e5),
        ("top_p", 1.01),
        ("min_p", [0.1]),
        ("repetition_penalty", 1e-6),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", 2**63),
        ("max_new_tokens", 0),
        ("max_new_tokens", 20.0),
        ("max_length", {}),
    ],
)
def test_wrong_defaults(name: str, value: Any) -> None:
    refused(make_core(defaults={name: value}), f"sampling.defaults.{name}")


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("name", NEUTRAL)
def test_defaults_at_their_bounds_can_be_served(name: str, end: int) -> None:
    model = served_model(make_core(defaults={name: VALID[name][end]}), SETTINGS, kv_pages=5, decode_weight_bytes=77)
    SamplingParams(**{key: model.sampling_default(key) for key in NEUTRAL})


@pytest.mark.parametrize(
    "ranges",
    [
        {"top_p": 1},
        {"top_p": [0.1]},
        {"top_p": [0.1, 0.5, 0.9]},
        {"top_p": [0.9, 0.1]},
        {"top_p": [0.5, "1"]},
        {"top_p": [0.5, 1.5]},
        {"top_p": {"min": 0, "max": 1}},
        {"top_k": [1, 50.0]},
        {"top_q": None},
        {"temperature": [0, 1]},
        {"temperature": [-1, 1.0]},
        {"temperature": [0.5, 0.9]},
        {"top_p": [0.5, 0.95]},
    ],
)
def test_wrong_ranges(ranges: dict[str, Any]) -> None:
    refused(make_core(ranges=ranges), f"sampling.ranges.{next(iter(ranges))}")


def test_ranges_hold_the_default_that_the_core_has() -> None:
    bounds = {"temperature": [0.7, 0.9]}
    core = make_core(defaults={"temperature": 0.8}, ranges=bounds)
    assert served_model(core, SETTINGS, kv_pages=5, decode_weight_bytes=77).ranges == {"temperature": (0.7, 0.9)}
    refused(make_core(defaults={"temperature": 0.95}, ranges=bounds), "sampling.ranges.temperature")


@pytest.mark.parametrize("chosen", [0.7, 0.0, -1.0, 1e4])
def test_the_operator_s_temperature_is_a_default_with_its_source(chosen: float) -> None:
    """As the core's own: 0 and less are greedy, and a request goes before it."""
    core = make_core(defaults={"temperature": 0.6, "top_k": 4}, sources={"temperature": "config.json", "top_k": "x"})
    model = served_model(core, replace(SETTINGS, temperature=chosen), kv_pages=5, decode_weight_bytes=77)
    assert model.defaults == {"temperature": chosen, "top_k": 4}
    assert model.sources == {"temperature": "server_option", "top_k": "x"}
    shown = model_card(model)["generation_defaults"]
    assert (shown["temperature"], shown["sources"]["temperature"]) == (chosen, "server_option")
    assert model.resolve_sampling(SamplingRequest())["temperature"] == max(chosen, 0.0)
    assert model.resolve_sampling(SamplingRequest(temperature=0.3))["temperature"] == 0.3
    assert core.manifest.sampling.defaults["temperature"] == 0.6


@pytest.mark.parametrize(
    ("ranges", "good", "bad", "says"),
    [
        ({"temperature": [0.7, 1.0]}, (0.7, 0.85, 1.0), (0.0, 0.69, 1.01), "0.7 to 1"),
        ({"temperature": None}, (0.8,), (0.0, 0.79, 1.0), "0.8 alone"),
        ({}, (0.8,), (0.0, 1.0), "0.8 alone"),
    ],
)
def test_a_temperature_that_the_author_s_ranges_do_not_allow_is_one_line_at_the_start(
    ranges: dict[str, Any], good: tuple[float, ...], bad: tuple[float, ...], says: str
) -> None:
    core = make_core(defaults={"temperature": 0.8}, ranges=ranges)
    for chosen in good:
        model = served_model(core, replace(SETTINGS, temperature=chosen), kv_pages=5, decode_weight_bytes=77)
        assert model.resolve_sampling(SamplingRequest())["temperature"] == chosen
    for chosen in bad:
        with pytest.raises(SettingError) as caught:
            served_model(core, replace(SETTINGS, temperature=chosen), kv_pages=5, decode_weight_bytes=77)
        assert caught.value.setting == "temperature" and "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{chosen:g}: the author's range of this core is {says}; ")


def with_facts(facts: dict[str, Any]) -> Any:
    core = make_core()
    core.manifest.template = Template(file="t.jinja", source="t", facts=facts)
    return core


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"thinking": {"supported": True}}, "thinking"),
        ({"thinking": {key: value for key, value in NO_THINKING.items() if key != "levels"}}, "thinking"),
        ({"thinking": []}, "thinking"),
        ({"thinking": NO_THINKING | {"levels": {}}}, "thinking.levels"),
        ({"thinking": NO_THINKING | {"levels": [LEVEL, "low"]}}, "thinking.levels[1]"),
        ({"thinking": NO_THINKING | {"levels": [LEVEL | {"id": 3}]}}, "thinking.levels[0].id"),
        ({"thinking": NO_THINKING | {"levels": [{"id": "none"}]}}, "thinking.levels[0]"),
        ({"thinking": NO_THINKING | {"supported": "yes"}}, "thinking.supported"),
        ({"thinking": NO_THINKING | {"toggle": 1}}, "thinking.toggle"),
        (
            {"thinking": NO_THINKING | {"levels": [LEVEL | {"opens_reasoning": None}]}},
            "thinking.levels[0].opens_reasoning",
        ),
        ({"inline_system": "yes"}, "inline_system"),
        ({"generation_prompt_switch": 1}, "generation_prompt_switch"),
        ({"system": "You are"}, "system"),
        ({"system": {"default": 1}}, "system.default"),
        ({"system": {"leading": True}}, "system.leading"),
        ({"content": "string"}, "content"),
        ({"content": {"parts": "yes"}}, "content.parts"),
        ({"tools": True}, "tools"),
        ({"tools": {"declared": "yes"}}, "tools.declared"),
        ({"tools": {"arguments": "json"}}, "tools.arguments"),
        ({"tools": {"arguments": []}}, "tools.arguments"),
        ({"output": "hermes"}, "output"),
        ({"output": {"calls": "hermes"}}, "output"),
        ({"output": {"tools": "Hermes"}}, "output.tools"),
        ({"output": {"tools": []}}, "output.tools"),
        ({"output": {"reasoning": "<think>"}}, "output.reasoning"),
        ({"output": {"reasoning": ["<think>"]}}, "output.reasoning"),
        ({"output": {"reasoning": ["<think>", ""]}}, "output.reasoning"),
        ({"output": {"reasoning": ["<think>", 1, "</think>"]}}, "output.reasoning"),
        ({"output": {"reasoning": ["|", "|"]}}, "output.reasoning"),
        ({"output": {"reasoning": TAGS, "open_token": 99}}, "output.open_token"),
        ({"output": {"reasoning": TAGS, "close_token": True}}, "output.close_token"),
        ({"output": {"reasoning": TAGS, "open_token": 4, "close_token": 4}}, "output.close_token"),
        ({"output": {"close_token": 4}}, "output.close_token"),
        ({"special_tokens": {"pad_token": 1}}, "special_tokens"),
        ({"special_tokens": ["<s>"]}, "special_tokens"),
        ({"variables": "today"}, "variables"),
        ({"variables": ["today", 1]}, "variables"),
    ],
)
def test_wrong_facts(facts: dict[str, Any], field: str) -> None:
    refused(with_facts(facts), f"template.facts.{field}")


def test_facts_of_the_prober() -> None:
    table = NO_THINKING | {"supported": True, "toggle": "enable_thinking", "levels": [LEVEL], "default_level": "none"}
    assert served_model(with_facts({"thinking": table}), SETTINGS, kv_pages=5, decode_weight_bytes=77).thinking == table
    for facts in ({}, {"thinking": None}, {"thinking": NO_THINKING}):
        assert served_model(with_facts(facts), SETTINGS, kv_pages=5, decode_weight_bytes=77).thinking == NO_THINKING
    facts = {"variables": ["persona", "today"]}
    assert served_model(with_facts(facts), SETTINGS, kv_pages=5, decode_weight_bytes=77).variables == {
        "persona",
        "today",
    }


@pytest.mark.parametrize(
    ("facts", "leading", "parts"),
    [
        ({}, True, False),
        ({"system": None, "content": None}, True, False),
        ({"system": {"leading": "renders"}, "content": {"string": True, "parts": True}}, True, False),
        ({"system": {"leading": "omits"}, "content": {"string": False, "parts": True}}, False, True),
        ({"system": {"leading": "raises"}, "content": {"string": False, "parts": False}}, False, False),
    ],
)
def test_how_a_template_takes_system_texts_and_contents(facts: dict[str, Any], leading: bool, parts: bool) -> None:
    model = served_model(with_facts(facts), SETTINGS, kv_pages=5, decode_weight_bytes=77)
    assert (model.leading_system, model.content_parts) == (leading, parts)


def test_how_a_core_says_what_its_model_writes() -> None:
    for nothing in ({}, {"output": None, "tools": None, "system": None}, {"output": {}, "tools": {}, "system": {}}):
        model = served_model(with_facts(nothing), SETTINGS, kv_pages=5, decode_weight_bytes=77)
        assert model.output == OutputSyntax() and not model.takes_tools
        assert (model.tool_arguments, model.default_system) == ("mapping", None)
    output = {"tools": "hermes", "reasoning": TAGS, "open_token": 7, "close_token": 8}
    facts = {
        "output": output,
        "tools": {"declared": True, "calls": True, "arguments": "string"},
        "system": {"default": "Be brief.", "leading": "renders"},
    }
    model = served_model(with_facts(facts), SETTINGS, kv_pages=5, decode_weight_bytes=77)
    assert model.output == OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"), open_token=7, close_token=8)
    assert model.takes_tools and (model.tool_arguments, model.default_system) == ("string", "Be brief.")
    for tools, takes in (({"declared": False, "arguments": None}, False), ({"arguments": None}, True), (None, True)):
        model = served_model(
            with_facts({"output": {"tools": "hermes"}, "tools": tools}), SETTINGS, kv_pages=5, decode_weight_bytes=77
        )
        assert model.takes_tools is takes and model.tool_arguments == "mapping"


def test_a_core_whose_output_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    core = with_facts({"output": {"tools": "deepseek_dsml"}})
    assert served_model(core, SETTINGS, kv_pages=5, decode_weight_bytes=77).output.tools == "deepseek_dsml"
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(InputError, match=r"pip install 'flare-ignition\[deepseek\]'"):
        served_model(core, SETTINGS, kv_pages=5, decode_weight_bytes=77)


def test_a_template_that_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.text.tokenizer.Tokenizer.load", lambda *args, **options: byte_tokenizer())
    core = make_core()
    core.file = lambda name: name
    core.read = lambda name: b"{{ messages }}\xff"
    with pytest.raises(CoreError, match="t.jinja: byte 14 is not UTF-8"):
        load_text(SimpleNamespace(manifest=core.manifest, file=core.file, read=core.read))
