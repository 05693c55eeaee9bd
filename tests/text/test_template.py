"""Rendering against transformers' own, and the sandbox against templates that want too much."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from flare.errors import CoreError, RequestError
from flare.text import sandbox
from flare.text.template import ChatTemplate, TemplateFailure, TemplateRefusal
from tests.text import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": {"city": "Lund", "n": [2, None]}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Finds “it” & <more>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "array"}}},
        },
    }
]
SAID = {
    "question": [{"role": "user", "content": '  Hi <b>there</b> & "you", 你好\n'}],
    "instructed": [{"role": "system", "content": "Be terse. "}, {"role": "user", "content": "Hi"}],
    "dialogue": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": " Two ", "reasoning_content": "Hm"},
        {"role": "user", "content": "Three"},
    ],
    "called": [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "here", "tool_call_id": "c1", "name": "lookup"},
    ],
}
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"reasoning_effort": "brief"}]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("name", ["CHATML", "STRICT", "SWITCHED", "EFFORTS", "MAPPED", "DATED", "MARKED"])
@pytest.mark.parametrize("conversation", SAID)
def test_renders_what_transformers_renders(name: str, conversation: str) -> None:
    source = getattr(templates, name)
    messages = SAID[conversation] if name != "MARKED" else in_parts(SAID[conversation])
    template = ChatTemplate(source, **SPECIAL)
    compared = 0
    for tools in (None, TOOLS):
        for reply in (True, False):
            for variables in [*VARIABLES, {"date_string": "1 May 2025"}]:
                if name == "DATED" and "date_string" not in variables:
                    continue  # transformers reads the clock there
                try:
                    [expected], _ = render_jinja_template(
                        [messages],
                        tools=tools,
                        chat_template=source,
                        add_generation_prompt=reply,
                        **SPECIAL,
                        **variables,
                    )
                except Exception:
                    with pytest.raises(RequestError):
                        template.render(messages, tools=tools, add_generation_prompt=reply, **variables)
                    continue
                assert template.render(messages, tools=tools, add_generation_prompt=reply, **variables) == expected
                compared += 1
    assert compared or (name, conversation) == ("STRICT", "called")


@pytest.mark.parametrize(
    "expression",
    [
        "x | tojson",
        "x | tojson(indent=2)",
        "x | tojson(ensure_ascii=True)",
        "x | tojson(separators=(',', ':'), sort_keys=True)",
        "x.b ~ x.a ~ none ~ undefined_name ~ 1.5",
        "'%s-%05d' % (x.b, 42)",
        "'{}|{:>8}'.format(x.b, 3)",
        "x | dictsort | map('first') | join('+')",
        "namespace(n=1).n + dict(a=2).a",
        "range(3) | list + [1] * 3",
        "x.b.split('e') | reverse | join(' ', attribute='x') if false else x.b.split('e') | join('-')",
        "x.b | replace('e', 'EE') | indent(4, true) | upper",
    ],
)
def test_expressions_agree_with_transformers(expression: str) -> None:
    source = "{{ " + expression + " }}"
    x = {"b": 'hello é <&>\n"q" 😀', "a": [1, {"z": None, "y": True}], "c": {"d": 1e-7}}
    [expected], _ = render_jinja_template([[]], chat_template=source, x=x)
    assert ChatTemplate(source).render([], x=x) == expected


def test_escaped_json_keeps_the_mark() -> None:
    assert ChatTemplate("{{ x | tojson(ensure_ascii=True) }}").render([], mark="\ue000", x="é<\ue000s>😀") == (
        '"\\u00e9<\ue000s>\\ud83d\\ude00"'
    )


def test_the_date_is_fixed_unless_given() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    assert template.render([]) == "2025-01-01"
    assert template.render([], clock=lambda: datetime(2031, 2, 3)) == "2031-02-03"
    assert ChatTemplate("{{ strftime_now('%Y') }}", clock=lambda: datetime(1999, 1, 1)).render([]) == "1999"


def test_a_request_cannot_replace_the_conversation_or_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ documents }}", bos_token="<s>")
    assert template.render([{"content": "x"}], bos_token="evil", documents="evil") == "<s>xNone"


def test_the_authors_words_reach_the_client_shortened_on_one_line() -> None:
    with pytest.raises(TemplateRefusal) as caught:
        ChatTemplate("{{ raise_exception('No\\nsystem ' ~ 'x' * 5000) }}").render([])
    assert caught.value.status == 400
    assert str(caught.value).startswith("the chat template refuses this conversation: No system xxx")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "\n\n{{ 1 / 0 }}",
        "\n\n{{ messages.append(1) }}",
        "\n\n{{ messages[0].update({}) }}",
        "\n\n{{ missing.attribute.other }}",
        "\n\n{{ ().__class__.__base__.__subclasses__() }}",
        "\n\n{{ namespace(__class__=1) }}",
        "\n\n{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "\n\n{{ 'secret' | int(base=99) + {} }}",
    ],
)
def test_failures_name_the_line_and_nothing_of_the_library(source: str) -> None:
    with pytest.raises(TemplateFailure) as caught:
        ChatTemplate(source).render([{"content": "secret"}])
    assert caught.value.line == 3
    assert str(caught.value) == "the chat template cannot render this conversation (chat_template.jinja line 3)"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "{% set s = namespace(s='x' * 1000) %}{% for a in range(99) %}{% set s.s = s.s ~ s.s %}{% endfor %}",
    "{% set s = namespace(s='x' * 1000) %}{% for a in range(99) %}{% set s.s = s.s + s.s %}{% endfor %}",
    "{% set s = namespace(s=[1]) %}{% for a in range(99) %}{% set s.s = s.s + s.s %}{% endfor %}",
    "{% set s = namespace(s=9) %}{% for a in range(99) %}{% set s.s = s.s * s.s %}{% endfor %}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 10 ** 12 * [1] }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'x' | center(10 ** 11) }}",
    "{{ 'x'.ljust(10 ** 11) }}",
    "{{ '%100000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 11, 1) }}",
    "{{ '{:100000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10 ** 11) }}",
    "{{ '%100000000000d' | format(1) }}",
    "{{ 'x' | indent(10 ** 11) }}",
    "{{ [1] | tojson(indent=10 ** 11) }}",
    "{{ [1] | slice(10 ** 11) | list }}",
    "{{ 1.5 | round(10 ** 11) }}",
    "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
    "{{ ('x' * 10 ** 6) | replace('', 'y' * 10 ** 6) }}",
    "{{ (['x' * 10 ** 6] * 10 ** 5) | join }}",
    "{{ ''.join(['x' * 10 ** 6] * 10 ** 5) }}",
    "{{ strftime_now('%10000000000d') }}",
    "{% macro m(n) %}{% for a in range(50) %}{{ m(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ m(50) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_ends_early(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    with pytest.raises(TemplateFailure, match="rendering this conversation takes"):
        ChatTemplate(source).render([])


@pytest.mark.parametrize("value", [10**6 + 1, -(10**9), 1_793_000_000_000])
def test_a_great_number_is_no_width_where_it_is_the_value(value: int) -> None:
    source = "{{ x | tojson }} {{ {'x': x} | tojson }} {{ x | round | int }} {{ x | string | center(20) | trim }}"
    assert ChatTemplate(source).render([], x=value) == f'{value} {{"x": {value}}} {value} {value}'


def test_a_loop_over_content_counts_and_a_long_conversation_passes() -> None:
    source = (
        "{% for m in messages %}{% for c in m.content %}{% for d in m.content %}{% endfor %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateFailure, match="2000000 steps"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 5000}])
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": "word " * 200} for n in range(2001)]
    assert len(ChatTemplate(templates.SWITCHED).render(messages)) > 2_000_000


def test_a_rendering_spends_only_its_own_budget() -> None:
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}ok")
    assert [template.render([]) for _ in range(30)] == ["ok"] * 30


def test_threads_render_at_once() -> None:
    template = ChatTemplate(templates.CHATML)
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = "".join(template.render([{"role": "user", "content": f"{number}"}]) for _ in range(50))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[n] == template.render([{"role": "user", "content": f"{n}"}]) * 50 for n in range(4))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% foo %}", "line 2: .*foo"),
        ("{% for x in y %}", "line 1: .*endfor"),
        ("a\n\n{{ x | nofilter }}", "line 3: .*nofilter"),
        ("{{ [1, 2] | random }}", "line 1: .*random"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested or repeated too deeply"),
        ("x" * (1024 * 1024 + 1), "1048577 characters"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(source: str, words: str) -> None:
    with pytest.raises(CoreError, match=r"^my\.jinja.*" + words):
        ChatTemplate(source, name="my.jinja")
