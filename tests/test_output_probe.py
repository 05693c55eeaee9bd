"""What the exporter finds out about a model's writing: formats of calls, delimiters of reasoning, tokens to be spelled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from flare.core.manifest import Template
from flare.errors import InputError
from flare.output import OutputSyntax
from flare.tables import check_facts
from ignition.text_facts import TextFacts, _template_facts
from tests.text import templates

HERMES = """{%- macro called(call) %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
    {{- "}\\n</tool_call>" }}
{%- endmacro %}
{%- if tools %}
    {{- "<|im_start|>system\\n" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}{{- "\\n" }}{{- called(call) }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n<think>\\n" }}{%- endif %}
"""


def tokenizer(*special: str, plain: tuple[str, ...] = ()) -> bytes:
    """A tokenizer of single letters with added tokens, special and plain ones; ids go on from 1 in that order."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    made.add_tokens([AddedToken(text, special=False) for text in plain])
    return made.to_str().encode()


def output(source: str | None, tokenizer_json: bytes) -> dict[str, Any]:
    facts = _template_facts(source, source and "chat_template.jinja", {}, tokenizer_json)
    assert json.loads(json.dumps(facts)) == facts
    check_facts(facts, 100)
    assert facts["output"].keys() == set(OutputSyntax.__struct_fields__)
    return facts["output"]


def test_calls_as_json_objects_between_tags() -> None:
    found = output(HERMES, tokenizer("<|im_start|>", "<|im_end|>", plain=("<think>", "</think>", "<tool_call>")))
    assert found == {
        "tools": "hermes",
        "reasoning": ["<think>", "</think>"],
        "open_token": 3,
        "close_token": 4,
        "spelled": [],
    }


def test_a_package_that_one_format_needs_is_missing_for_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base install has no reader of DeepSeek's calls: other templates are probed all the same."""
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    assert output(HERMES, tokenizer("<|im_start|>", "<|im_end|>"))["tools"] == "hermes"
    with pytest.raises(InputError, match=r"deepseek_dsml is read by the package deepseek-recipe .*\[deepseek\]"):
        output((Path(__file__).parent / "text/families/deepseek.jinja").read_text(), tokenizer())


def test_special_tokens_of_the_format_are_spelled_and_those_around_it_are_not() -> None:
    found = output(HERMES, tokenizer("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<other>"))
    assert found["spelled"] == [3, 4]
    assert (found["open_token"], found["close_token"]) == (None, None)


def test_calls_as_bare_json_objects_one_a_message() -> None:
    found = output(templates.DATED, tokenizer("<|start|>", "<|sep|>", "<|eot|>"))
    assert (found["tools"], found["spelled"]) == ("llama", [])


def test_a_template_that_shows_no_tools() -> None:
    found = output(templates.CHATML, tokenizer("<|im_start|>", "<|im_end|>"))
    assert found == {"tools": None, "reasoning": None, "open_token": None, "close_token": None, "spelled": []}


def test_a_form_of_calls_that_no_format_reads() -> None:
    found = output(HERMES.replace("tool_call>", "act>"), tokenizer())
    assert found["tools"] is None


@pytest.mark.parametrize(("name", "format"), [("DATED", "llama"), ("SWITCHED", "qwen")])
def test_formats_of_other_templates(name: str, format: str) -> None:
    assert output(getattr(templates, name), tokenizer())["tools"] == format


def test_without_a_template_nothing_is_known() -> None:
    assert output(None, tokenizer())["tools"] is None


def test_a_special_token_that_the_format_leaves_as_text_is_not_spelled() -> None:
    """Such as one that asks for results: shown, it would become answer text."""
    waiting = HERMES.replace(
        '{{- "<|im_end|>\\n" }}\n{%- endfor %}',
        '{{- "<|wait|>" if message.tool_calls else "<|im_end|>\\n" }}\n{%- endfor %}',
    )
    assert waiting != HERMES
    found = output(waiting, tokenizer("<|im_start|>", "<|im_end|>", "<|wait|>", "<tool_call>", "</tool_call>"))
    assert (found["tools"], found["spelled"]) == ("hermes", [4, 5])


def test_delimiters_of_reasoning_that_only_a_rendering_shows() -> None:
    """A template may put them together from parts."""
    source = HERMES.replace(
        '"<think>\\n\\n</think>\\n\\n"', '"<" ~ "think>" ~ message.reasoning_content ~ "</" ~ "think>"'
    )
    source = source.replace("<think>\\n", "")
    assert "<think>" not in source
    assert output(source, tokenizer())["reasoning"] == ["<think>", "</think>"]


def test_markers_of_a_format_of_replies_are_spelled_wherever_the_template_has_them() -> None:
    source = (
        "{% macro turn(role, text) %}<|start|>{{ role }}<|message|>{{ text }}{% endmacro %}"
        "{% for tool in tools or [] %}{{ turn('system', tool | tojson) }}<|eot|>{% endfor %}"
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "<|start|>assistant to={{ c.function.name }}<|message|><atem:function_calls>\n"
        '<atem:invoke name="{{ c.function.name }}">\n'
        '{% for k, v in c.function.arguments | items %}<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n{% endfor %}'
        "</atem:invoke>\n</atem:function_calls>{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}"
        "{% else %}{{ turn(m.role, m.content) }}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    found = output(source, tokenizer("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|other|>"))
    assert (found["tools"], found["spelled"]) == ("muse_atem", [1, 2, 3, 4])


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
STRIPS = PLAIN.replace("m.content", "m.content.split('</think>')[-1] | replace('<think>', '')")


@pytest.mark.parametrize(
    ("source", "reasoning", "opens"),
    [
        # What closes the reasoning that the prompt opens may stand nowhere.
        (PLAIN + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}", "<think>", True),
        (PLAIN + "{% if add_generation_prompt %}<|assistant|>[THINK]{% endif %}", "[THINK]", True),
        (STRIPS + "{% if add_generation_prompt %}<|assistant|>[THINK]\n{% endif %}", "[THINK]", True),
        (STRIPS + "<|assistant|><think>\n", "<think>", True),  # whatever add_generation_prompt says
        (
            STRIPS
            + "{% for m in messages if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endfor %}",
            "[THINK]",
            False,
        ),
        (STRIPS + "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<think>", False),
        (
            STRIPS + "{% if add_generation_prompt %}<|assistant|>{{ '[THINK]' if enable_thinking else '' }}{% endif %}",
            "[THINK]",
            False,
        ),
        (PLAIN + "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>{% endif %}", "<think>", False),
        (PLAIN + "{% if add_generation_prompt %}<|assistant|>{% endif %}", None, False),
        # The question may mention what it does not open.
        (PLAIN + " Use <think> and </think>.{% if add_generation_prompt %}<|assistant|>{% endif %}", "<think>", False),
    ],
)
def test_which_delimiters_of_reasoning_are_the_models(source: str, reasoning: str | None, opens: bool) -> None:
    facts = _template_facts(source, "t", {}, tokenizer())
    found = facts["output"]["reasoning"]
    assert (found and found[0], facts["opens_reasoning"]) == (reasoning, opens)


def test_a_template_that_takes_contents_in_parts_alone() -> None:
    source = HERMES.replace(
        "{{- message.content }}", "{%- for part in message.content %}{{- part.text }}{%- endfor %}"
    ).replace("<think>\\n\\n</think>\\n\\n", "<think>{{ message.reasoning_content }}</think>")
    facts = _template_facts(source, "t", {}, tokenizer())
    assert (facts["content"], facts["output"]["tools"]) == ({"string": False, "parts": True}, "hermes")
    assert facts["output"]["reasoning"] == ["<think>", "</think>"]


@pytest.mark.parametrize(
    ("template", "notices"),
    [
        ("{{ 'x' if 'low' in [reasoning_effort ~ ''] }}", ["the chat template reads reasoning_effort, but no effort "]),
        ("{{ 'x' if reasoning_effort == 'low' }}", []),
        ("", []),
    ],
)
def test_an_effort_that_is_read_and_not_understood_is_told(template: str, notices: list[str]) -> None:
    facts = _template_facts(PLAIN + template, "t", {}, tokenizer())
    text = TextFacts(tokens=None, template=Template("t", "t", facts), sampling=None)  # type: ignore[arg-type]
    assert len(text.notices) == len(notices)
    assert all(line.startswith(begins) and "\n" not in line for line, begins in zip(text.notices, notices, strict=True))
