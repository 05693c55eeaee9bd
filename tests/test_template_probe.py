"""Facts about templates whose abilities are known because they were written for this."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.errors import InputError
from ignition.template_probe import probe_template
from tests.text import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def probe(source: str | None) -> dict[str, Any]:
    facts = probe_template(source, file=None if source is None else "chat_template.jinja", special_tokens=SPECIAL)
    assert json.loads(json.dumps(facts)) == facts
    return facts


def level(
    id: str, thinks: bool | None, effort: str | None, instruction: str | None, opens: bool, default: bool
) -> dict:
    return {
        "id": id,
        "enable_thinking": thinks,
        "reasoning_effort": effort,
        "instruction": instruction,
        "opens_reasoning": opens,
        "default": default,
    }


NOTHING = {"supported": False, "source": None, "toggle": None, "effort": None, "default_level": None, "levels": []}


def test_a_switch_and_efforts() -> None:
    facts = probe(templates.EFFORTS)
    assert facts["thinking"] == {
        "supported": True,
        "source": "chat_template.jinja",
        "toggle": "enable_thinking",
        "effort": "reasoning_effort",
        "default_level": "deep",
        "levels": [
            level("none", False, None, None, False, False),
            level("deep", True, "deep", "Effort is deep. Check every step.", True, True),
            level("usual", True, "usual", None, True, False),
            level("brief", True, "brief", "Effort is brief. Answer soon.", True, False),
        ],
    }
    assert facts["generation_prompts"] == {
        "": "<|im_start|>assistant\n<think>\n",
        "none": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "deep": "<|im_start|>assistant\n<think>\n",
        "usual": "<|im_start|>assistant\n<think>\n",
        "brief": "<|im_start|>assistant\n<think>\n",
    }
    assert facts["variables"] == ["enable_thinking", "reasoning_effort"]


def test_a_switch_alone() -> None:
    thinking = probe(templates.SWITCHED)["thinking"]
    assert (thinking["toggle"], thinking["effort"], thinking["default_level"]) == ("enable_thinking", None, "on")
    assert thinking["levels"] == [
        level("none", False, None, None, False, False),
        level("on", True, None, None, True, True),
    ]


def test_efforts_alone_that_all_say_something() -> None:
    thinking = probe(templates.MAPPED)["thinking"]
    assert (thinking["toggle"], thinking["effort"], thinking["default_level"]) == (None, "reasoning_effort", "low")
    assert thinking["levels"] == [
        level("low", None, "low", "Reasoning: low.", False, True),
        level("high", None, "high", "Reasoning: high.", False, False),
    ]


@pytest.mark.parametrize("name", ["CHATML", "STRICT", "DATED", "MARKED"])
def test_no_thinking_controls(name: str) -> None:
    assert probe(getattr(templates, name))["thinking"] == NOTHING | {"source": "chat_template.jinja"}


def test_a_variable_that_changes_nothing_is_no_control() -> None:
    source = templates.CHATML + "{% if enable_thinking %}{% endif %}{% set x = reasoning_effort %}"
    assert not probe(source)["thinking"]["supported"]


@pytest.mark.parametrize(
    ("comparison", "efforts"),
    [
        ("{% if reasoning_effort == 'a' or reasoning_effort == 'b' %}x{% endif %}", ["a", "b"]),
        ("{% if reasoning_effort not in ['b', 'a'] %}x{% endif %}", ["b", "a"]),
        ("{% set e = reasoning_effort | lower %}{% if 'a' == e %}x{% elif e == 'c' %}y{% endif %}", ["a", "c"]),
        ("{% set e = reasoning_effort or 'a' %}{{ {'a': 1, 'b': 2}[e] }}", ["a", "b"]),
        ("{% set m = {'a': 1, 'b': 2} %}{{ m.get(reasoning_effort, 0) }}", ["a", "b"]),
        (
            "{% set n = namespace(e=reasoning_effort) %}{% if n.e == 'a' %}x{% elif n['e'] == 'b' %}y{% endif %}",
            ["a", "b"],
        ),
        (
            "{% set n = namespace(e='b') %}{% if reasoning_effort is defined %}{% set n.e = reasoning_effort %}{% endif %}"
            "{% if n.e == 'a' %}x{% elif n.e == 'b' %}y{% endif %}",
            ["a", "b"],
        ),
        (
            "{% macro say(m, e, f='c') %}{% if m == 'q' %}{% elif e == 'a' %}x{% elif f == 'b' %}y{% endif %}{% endmacro %}"
            "{{ say('q' if x else '', reasoning_effort, f=reasoning_effort) }}",
            ["a", "b"],
        ),
        (
            "{% macro say(e=reasoning_effort) %}{% if e == 'a' %}x{% endif %}{% endmacro %}{{ say() }}"
            "{% set e = messages[0].role %}{% if e == 'user' %}{% endif %}",
            ["a"],
        ),
        (
            "{% macro say() %}{{ {'a': 1, 'b': 2}[reasoning_effort] }}{% endmacro %}{{ say() if reasoning_effort }}",
            ["a", "b"],
        ),
        (
            "{% if reasoning_effort is equalto 'a' %}x{% elif reasoning_effort is in ['b', 'c'] %}y{% endif %}",
            ["a", "b", "c"],
        ),
        ("{% if reasoning_effort is not eq('a') and reasoning_effort is ne 'b' %}x{% endif %}", ["a", "b"]),
        ("{% set i, e = 1, reasoning_effort %}{% if e == 'a' %}x{% endif %}{% if i == 'b' %}{% endif %}", ["a"]),
        ("{% set e %}{{ reasoning_effort }}{% endset %}{% if e == 'a' %}x{% endif %}", ["a"]),
        ("{% set e %}{% if reasoning_effort %}b{% endif %}{% endset %}{% if e == 'b' %}x{% endif %}", []),
        (
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{% if k == reasoning_effort %}{{ v }}{% endif %}{% endfor %}",
            ["a", "b"],
        ),
        ("{% for k in ['a', 'b'] if reasoning_effort == k %}{{ k }}{% endfor %}", ["a", "b"]),
        ("{% set m = {'a': 1} %}{% for k, v in m | items %}{{ v if k == reasoning_effort }}{% endfor %}", ["a"]),
        ("{% if x == 'z' or messages[0].role == 'user' %}{% set y = reasoning_effort %}{% endif %}", []),
        (
            "{% if reasoning_effort == 'a' %}{{ raise_exception('no') }}{% elif reasoning_effort == 'b' %}x{% endif %}",
            ["b"],
        ),
    ],
)
def test_efforts_are_what_the_template_compares_with_in_its_order(comparison: str, efforts: list[str]) -> None:
    thinking = probe(templates.CHATML + comparison)["thinking"]
    assert [each["id"] for each in thinking["levels"]] == efforts
    assert thinking["effort"] == ("reasoning_effort" if efforts else None)


@pytest.mark.parametrize("variable", ["reasoning_effort", "thinking_effort", "reasoning_strength"])
def test_efforts_by_other_names(variable: str) -> None:
    thinking = probe(templates.MAPPED.replace("reasoning_effort", variable))["thinking"]
    assert (thinking["toggle"], thinking["effort"]) == (None, variable)
    assert [level["reasoning_effort"] for level in thinking["levels"]] == ["low", "high"]


def test_a_switch_by_another_name() -> None:
    thinking = probe(templates.SWITCHED.replace("enable_thinking", "thinking"))["thinking"]
    assert (thinking["toggle"], thinking["default_level"]) == ("thinking", "on")


def test_a_switch_that_refuses_one_position_is_none() -> None:
    source = (
        templates.SWITCHED
        + "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('no') }}{% endif %}"
    )
    thinking = probe(source)["thinking"]
    assert (thinking["toggle"], thinking["levels"]) == (None, [])


UNNAMED = (
    "{% set effort = {'low': 'Low', 'medium': 'Medium'}.get(reasoning_effort, 'Maximal') %}"
    "<|system|>Effort: {{ effort }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)


def test_the_effort_of_all_other_names_is_called_what_the_template_calls_it() -> None:
    thinking = probe(UNNAMED)["thinking"]
    assert [level["id"] for level in thinking["levels"]] == ["low", "medium", "maximal"]
    assert thinking["default_level"] == "maximal"


@pytest.mark.parametrize(
    "source",
    [
        UNNAMED.replace("'Maximal'", "'as you like'"),  # no name
        UNNAMED.replace("'Low'", "'Little'").replace("'Medium'", "'Half'"),  # not by names at all
        UNNAMED.replace(
            ".get(reasoning_effort, 'Maximal')", "[reasoning_effort if reasoning_effort is defined else 'low']"
        ),
    ],
)
def test_no_effort_is_made_up(source: str) -> None:
    assert [level["id"] for level in probe(source)["thinking"]["levels"]] == ["low", "medium"]


def test_a_template_that_prints_any_effort_has_those_of_the_api() -> None:
    source = templates.CHATML + "Effort: {{ reasoning_effort | default('high') }}"
    thinking = probe(source)["thinking"]
    assert [level["id"] for level in thinking["levels"]] == ["minimal", "low", "medium", "high", "xhigh"]
    assert (thinking["effort"], thinking["default_level"]) == ("reasoning_effort", "high")
    cut = templates.CHATML + "{{ (reasoning_effort | default('high'))[:1] }}"
    assert not probe(cut)["thinking"]["supported"]


def test_what_a_level_says_is_told_from_the_messages_around_it() -> None:
    source = (
        "{% set effort = reasoning_effort | default('high') %}{% if effort not in ('none', 'low', 'high') %}"
        "{{ raise_exception('no') }}{% endif %}"
        "{% if effort != 'none' %}<|open|>system kind=effort<|sep|>Think this much:\n{{ effort }}.<|close|>{% endif %}"
        "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>{% endfor %}"
    )
    facts = probe_template(source, file="t", special_tokens={}, controls=["<|open|>", "<|sep|>", "<|close|>"])
    assert [(level["id"], level["instruction"]) for level in facts["thinking"]["levels"]] == [
        ("none", None),
        ("low", "Think this much:\nlow."),
        ("high", "Think this much:\nhigh."),
    ]


def test_lines_that_follow_what_every_level_says_are_no_part_of_it() -> None:
    source = (
        "<|system|>{{ {'low': 'Be brief.', 'high': 'Be long.'}[reasoning_effort | default('low')] }}\n</effort>\n[end]"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert [level["instruction"] for level in probe(source)["thinking"]["levels"]] == ["Be brief.", "Be long."]


def test_a_mode_is_an_effort_whose_extremes_are_none_and_on() -> None:
    source = templates.CHATML + (
        "{% set mode = thinking_mode or 'adaptive' %}{% if mode not in ('adaptive', 'enabled', 'disabled') %}"
        "{{ raise_exception('mode') }}{% endif %}"
        "{% if add_generation_prompt and mode == 'enabled' %}<think>{% elif add_generation_prompt and mode == 'disabled' %}"
        "</think>{% endif %}"
    )
    thinking = probe(source)["thinking"]
    assert (thinking["toggle"], thinking["effort"], thinking["default_level"]) == (None, "thinking_mode", "adaptive")
    assert thinking["levels"] == [
        level("none", False, "disabled", None, False, False),
        level("adaptive", None, "adaptive", None, False, True),
        level("on", True, "enabled", None, True, False),
    ]


def test_a_template_that_always_opens_reasoning() -> None:
    always = templates.CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
    facts = probe(always)
    assert (facts["opens_reasoning"], facts["thinking"]["supported"]) == (True, False)
    unasked = probe(templates.CHATML.split("{% if add_generation_prompt")[0] + "<|im_start|>assistant\n<think>\n")
    assert (unasked["opens_reasoning"], unasked["generation_prompt_switch"]) == (True, False)
    assert unasked["generation_prompts"] == {"": "<|im_end|>\n<|im_start|>assistant\n<think>"}
    assert probe(templates.CHATML)["opens_reasoning"] is False and probe(None)["opens_reasoning"] is False


@pytest.mark.parametrize(
    ("name", "system", "developer"),
    [
        ("CHATML", {"leading": "renders", "inline": "renders", "default": "Be helpful."}, "renders"),
        ("STRICT", {"leading": "renders", "inline": "raises", "default": None}, "raises"),
        ("SWITCHED", {"leading": "renders", "inline": "raises", "default": None}, "raises"),
        ("EFFORTS", {"leading": "renders", "inline": "omits", "default": None}, "renders"),
        ("MARKED", {"leading": "omits", "inline": "omits", "default": None}, "renders"),
    ],
)
def test_system_and_developer_messages(name: str, system: dict[str, Any], developer: str) -> None:
    facts = probe(getattr(templates, name))
    assert facts["system"] == system
    assert facts["developer"] == developer
    assert facts["inline_system"] is (system["inline"] == "renders")


def test_a_system_message_that_is_hoisted() -> None:
    source = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    facts = probe(source)
    assert facts["system"]["inline"] == "moves"
    assert not facts["inline_system"]
    assert facts["generation_prompt_switch"] is False


@pytest.mark.parametrize(
    ("name", "continuation"),
    [
        ("CHATML", {"supported": True, "tail": "<|im_end|>\n", "trims": False}),
        ("STRICT", {"supported": True, "tail": "</s>", "trims": True}),
        ("SWITCHED", {"supported": True, "tail": "<|im_end|>\n", "trims": True}),
        ("DATED", {"supported": True, "tail": "<|eot|>", "trims": True}),
    ],
)
def test_continuing_a_final_assistant_message(name: str, continuation: dict[str, Any]) -> None:
    assert probe(getattr(templates, name))["continuation"] == continuation


def test_a_final_assistant_message_that_is_refused() -> None:
    source = templates.CHATML + "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    assert probe(source)["continuation"] == {"supported": False, "tail": None, "trims": False}


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("CHATML", {"declared": False, "calls": False, "results": False, "arguments": None}),
        ("SWITCHED", {"declared": True, "calls": True, "results": True, "arguments": "mapping"}),
        ("DATED", {"declared": True, "calls": True, "results": True, "arguments": "mapping"}),
        ("MARKED", {"declared": False, "calls": True, "results": True, "arguments": "string"}),
    ],
)
def test_tools(name: str, tools: dict[str, Any]) -> None:
    assert probe(getattr(templates, name))["tools"] == tools


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("CHATML", {"string": True, "parts": False}),
        ("SWITCHED", {"string": True, "parts": True}),
        ("MARKED", {"string": False, "parts": True}),
        ("MAPPED", {"string": True, "parts": False}),
    ],
)
def test_forms_of_content(name: str, content: dict[str, bool]) -> None:
    assert probe(getattr(templates, name))["content"] == content


def test_variables_are_those_that_a_request_could_set() -> None:
    assert probe(templates.DATED)["variables"] == ["date_string"]
    assert probe(templates.CHATML)["variables"] == []
    macros = "{% if tools %}{% macro shown() %}{% endmacro %}{{ shown() }}{% endif %}"  # known to Jinja within the branch only
    assert probe(templates.CHATML + macros)["variables"] == []


def test_a_model_without_a_template() -> None:
    facts = probe(None)
    assert facts["thinking"] == NOTHING
    assert facts.keys() == probe(templates.CHATML).keys()
    assert not facts["inline_system"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% frobnicate %}", r"^chat_template\.jinja line 2: .*frobnicate"),
        ("a\n\n{{ messages[0].missing.content }}", r"^chat_template\.jinja line 3: .*messages\[0\]\.missing\.content"),
        ("{{ raise_exception('never') }}", r"^chat_template\.jinja: .*never"),
        ("nothing of the conversation", r"^chat_template\.jinja: .*left out"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            r"^chat_template\.jinja: .*steps",
        ),
    ],
)
def test_an_unusable_template_is_named_with_line_and_construct(source: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        probe(source)
