"""Conversations through the protocols into the prompts of model families: what other servers were reported to get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from flare.api import InProcess
from flare.config import ServerSettings
from flare.loading import output_syntax
from flare.runtime import Runtime
from flare.text.template import ChatTemplate
from ignition.text_facts import _template_facts
from tests.support.fast_replay import FastReplay
from tests.support.live_server import EOS, VOCABULARY, byte_tokenizer, make_model
from tests.text import families
from tests.text.families.known import KNOWN

CHAT, MESSAGES, RESPONSES = PATHS = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}


NO_CONTROLS = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).to_str().encode()
"""A tokenizer of which no marker is a token, so that a reply in letters is read like any other."""


class Asked:
    """A family's model that ends its reply at once; `prompts` are those that it got."""

    def __init__(self, family: str) -> None:
        tokenizer = byte_tokenizer()
        special = families.SPECIAL.get(family, {})
        source = families.source(family)
        facts = _template_facts(source, "chat_template.jinja", special, NO_CONTROLS)
        self.prompts: list[str] = []

        def reply(prompt: list[int], choice: int) -> list[int]:
            self.prompts.append(b"".join(tokenizer.token_bytes(token) for token in prompt).decode())
            return [*b"</think>Fine.", EOS]

        runtime = Runtime(
            replay=FastReplay(reply, vocabulary=VOCABULARY, max_context=1 << 16, slots=4),
            tokenizer=tokenizer,
            template=ChatTemplate(source, special_tokens=special),
            model=make_model(
                context_length=1 << 16,
                output=output_syntax(facts),
                thinking=facts["thinking"],
                opens_reasoning=facts["opens_reasoning"],
                inline_system=facts["inline_system"],
                tool_arguments=facts["tools"]["arguments"],
                default_system=facts["system"]["default"],
                continuation=facts["continuation"]["tail"],
            ),
        )
        self.server = InProcess(runtime, ServerSettings())

    def post(self, path: str, **body: Any) -> Any:
        return self.server.request(
            path, {"model": "org/tiny"} | ({"max_tokens": 50} if path == MESSAGES else {}) | body
        )

    def prompt(self, path: str, **body: Any) -> str:
        answer = self.post(path, **body)
        assert answer.status == 200, answer.text
        return self.prompts[-1]


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[str], Asked]]:
    """Makes a family's model once, for all tests."""
    made: dict[str, Asked] = {}

    def asked(family: str) -> Asked:
        if family not in made:
            made[family] = Asked(family)
        return made[family]

    yield asked
    for each in made.values():
        each.server.close()


def turns(path: str, *messages: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """A body of text messages (role, text); Messages has the leading system text in a field of its own."""
    listed = [{"role": role, "content": text} for role, text in messages]
    if path == MESSAGES and listed[0]["role"] == "system":
        return {"system": listed[0]["content"], "messages": listed[1:], **more}
    return {"input" if path == RESPONSES else "messages": listed, **more}


def tools(path: str, *names: str) -> list[dict[str, Any]]:
    if path == MESSAGES:
        return [{"name": name, "input_schema": PARAMETERS} for name in names]
    functions = [{"name": name, "parameters": PARAMETERS} for name in names]
    if path == RESPONSES:
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


def called(path: str, calls: list[tuple[str, str, Any]], results: list[tuple[str, str]]) -> dict[str, Any]:
    """A body: a question, calls (id, name, arguments), and results (id, text) in their order."""
    ask = {"role": "user", "content": "x"}
    if path == MESSAGES:
        used = [{"type": "tool_use", "id": id, "name": name, "input": value} for id, name, value in calls]
        given = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        return {"messages": [ask, {"role": "assistant", "content": used}, {"role": "user", "content": given}]}
    written = [(id, name, value if isinstance(value, str) else json.dumps(value)) for id, name, value in calls]
    if path == RESPONSES:
        items = [
            {"type": "function_call", "call_id": id, "name": name, "arguments": value} for id, name, value in written
        ]
        outputs = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
        return {"input": [ask, *items, *outputs]}
    functions = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": value}} for id, name, value in written
    ]
    replies = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
    return {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": functions}, *replies]}


WRITTEN = {
    "deepseek4": '"city" string="true">Lund<',
    "deepseek41": '"city" string="true">Lund<',
    "gemma4": '{city:<|"|>Lund<|"|>,n:2}',
    "gemma4_edge": '{city:<|"|>Lund<|"|>,n:2}',
    "glm53": "<arg_key>city</arg_key><arg_value>Lund</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>",
    "kimi3": '<|open|>argument key="city" type="string"<|sep|>Lund<|close|>argument<|sep|>',
    "kimi31": '<|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|>',
    "llama3": '{"name": "lookup", "parameters": {"city": "Lund", "n": 2}}',
    "mimo_v2": "<function=lookup><parameter=city>Lund</parameter><parameter=n>2</parameter></function>",
    "minimax_m3": "]<]minimax[>[<city>Lund]<]minimax[>[</city>",
    "mistral": '{"name": "lookup", "arguments": {"city": "Lund", "n": 2}, "id": "callcall1"}',
    "muse_spark": '<atem:parameter name="city">Lund</atem:parameter>\n<atem:parameter name="n">2</atem:parameter>',
    "nemotron_h": "<parameter=city>\nLund\n</parameter>\n<parameter=n>\n2\n</parameter>",
    "qwen25": '{"name": "lookup", "arguments": {"city": "Lund", "n": 2}}',
    "qwen3": '{"name": "lookup", "arguments": {"city": "Lund", "n": 2}}',
    "qwen38": "<parameter=city>\nLund\n</parameter>\n<parameter=n>\n2\n</parameter>",
    "qwen38_dense": "<parameter=city>\nLund\n</parameter>\n<parameter=n>\n2\n</parameter>",
    "step5": "<parameter=city>\nLund\n</parameter>\n<parameter=n>\n2\n</parameter>",
}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_arguments_of_a_history_reach_every_template_as_it_writes_them(
    ask: Callable[[str], Asked], family: str
) -> None:
    """B60: clients send a JSON text, templates want a mapping. A great number is one among others."""
    asked = ask(family)
    for path in PATHS:
        for number in ("2", "1793000000000"):
            value: Any = '{"city": "Lund", "n": ' + number + "}"
            value = json.loads(value) if path == MESSAGES else value
            body = called(path, [("callcall1", "lookup", value)], [("callcall1", "dry")])
            prompt = asked.prompt(path, tools=tools(path, "lookup"), **body)
            assert (WRITTEN[family] in prompt) if number == "2" else (number in prompt)
            assert '\\"city' not in prompt and "'city'" not in prompt and prompt.count("dry") == 1


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"'])
def test_arguments_that_are_no_object_are_refused(ask: Callable[[str], Asked], arguments: str) -> None:
    for path in (CHAT, RESPONSES):
        body = called(path, [("c1", "lookup", arguments)], [("c1", "dry")])
        assert ask("qwen38").post(path, tools=tools(path, "lookup"), **body).status == 400


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("path", PATHS)
def test_a_later_system_message_keeps_its_place(ask: Callable[[str], Asked], family: str, path: str) -> None:
    """B61: natively where the template has such messages, as a user's in tags elsewhere; the leading one is unchanged."""
    said = [("system", "Be terse."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Yes?"), ("assistant", "So?")]
    said += [("system", "Answer BLUE."), ("user", "Sky?")]
    if family == "mistral":  # whose turns alternate
        said = said[:-1]
    asked = ask(family)
    prompt = asked.prompt(path, **turns(path, *said))
    places = [prompt.index(text) for text in ("Hi", "Hello.", "Yes?", "So?", "Answer BLUE.")]
    assert places == sorted(places) and prompt.count("Be terse.") == prompt.count("Answer BLUE.") == 1
    native = KNOWN[family].inline == "renders"
    assert ("<system>\nAnswer BLUE.\n</system>" in prompt) == (not native)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_developer_and_system_texts_become_one_leading_message(
    ask: Callable[[str], Asked], family: str, path: str
) -> None:
    """B63: in their order, each under its role."""
    said = [
        ("system", "S1"),
        ("user", "u1"),
        ("developer", "D1"),
        ("assistant", "a1"),
        ("user", "u2"),
        ("system", "S2"),
    ]
    body = turns(path, *said)
    if path == RESPONSES:
        body = turns(path, *said[1:], instructions="S1")
    asked = ask(family)
    prompt = asked.prompt(path, **body)
    sections = "<system>\nS1\n</system>\n\n<developer>\nD1\n</developer>\n\n<system>\nS2\n</system>"
    assert prompt.count(sections) == 1 and prompt.count("<developer>") == 1
    if family != "mistral":  # which puts it before the last question
        assert prompt.index(sections) < prompt.index("u1") < prompt.index("a1") < prompt.index("u2")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_content_in_all_its_forms_beside_calls(ask: Callable[[str], Asked], family: str) -> None:
    """B64: absent, null, empty and no parts are one thing; so are a text and its one part."""
    body = called(CHAT, [("callcall1", "lookup", "{}")], [("callcall1", "dry")])
    question, assistant, result = body["messages"]
    bare = {key: value for key, value in assistant.items() if key != "content"}
    asked = ask(family)

    def prompt(message: dict[str, Any], *more: dict[str, Any]) -> str:
        return asked.prompt(CHAT, messages=[question, message, *more], tools=tools(CHAT, "lookup"))

    empty = {prompt(message, result) for message in (bare, *(bare | {"content": c} for c in (None, "", [])))}
    assert len(empty) == 1
    assert not any(word in text for text in empty for word in ("None", "null"))
    asked_again = {"role": "user", "content": "y"}
    plain = {"role": "assistant", "content": "hi"}
    parts = plain | {"content": [{"type": "text", "text": "hi"}]}
    assert len({prompt(m, asked_again) for m in (plain, parts, plain | {"tool_calls": []})}) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_results_come_in_the_order_of_their_calls(ask: Callable[[str], Asked], family: str, path: str) -> None:
    """B65: where ids are unique and known, and as they were sent where not."""
    calls = [("callcall1", "lookup", {"city": "A"}), ("callcall2", "note", {"city": "B"})]
    groups = {
        (("callcall2", "result vb"), ("callcall1", "result va")): ["result va", "result vb"],
        (("callcall1", "result va"), ("callcall2", "result vb")): ["result va", "result vb"],
    }
    if path == CHAT:
        groups |= {
            (("callcall1", "result v1"), ("callcall1", "result v2")): ["result v1", "result v2"],
            (("callcall9", "result vz"), ("callcall1", "result va")): ["result vz", "result va"],
        }
    asked = ask(family)
    for results, order in groups.items():
        body = called(path, calls, list(results)) | {"tools": tools(path, "lookup", "note")}
        answer = asked.post(path, **body)
        if answer.status == 400 and family in ("llama3", "kimi3", "kimi31", "muse_spark"):
            # One call a message, or a result whose call is unknown: the template refuses.
            assert family == "llama3" or "callcall9" in str(results)
            continue
        assert answer.status == 200, answer.text
        places = [asked.prompts[-1].index(text) for text in order]
        assert places == sorted(places)


def test_spellings_of_an_effort_are_one_and_unknown_ones_are_refused(ask: Callable[[str], Asked]) -> None:
    """B67."""
    question = turns(CHAT, ("user", "x"))
    spelled: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"thinking_level": "low"},
    ]
    prompts = {ask("qwen38").prompt(CHAT, **question, **fields) for fields in spelled}
    assert len(prompts) == 1 and "Reasoning effort is set to low." in prompts.pop()
    for name in ("thinking_level", "reasoning_effort"):
        refused = ask("qwen38").post(CHAT, **question, **{name: "minimal"})
        assert refused.status == 400 and refused.json()["error"]["code"] == "unsupported_reasoning_effort"
        assert sorted(refused.json()["error"]["levels"]) == ["low", "medium", "none", "xhigh"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_level_opens_the_reply_as_it_is_known_to(ask: Callable[[str], Asked], family: str) -> None:
    known = KNOWN[family]
    asked = ask(family)
    question = turns(CHAT, ("user", "x"))
    assert asked.prompt(CHAT, **question).endswith(known.opening + known.unnamed)
    for level in known.levels:
        prompt = asked.prompt(CHAT, **question, reasoning_effort=level.id)
        assert prompt.endswith(known.opening + level.prompt)
        assert level.instruction is None or level.instruction in prompt


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_last_assistant_message_is_continued(ask: Callable[[str], Asked], family: str) -> None:
    asked = ask(family)
    for path in (CHAT, MESSAGES):
        more = {"continue_final_message": True, "add_generation_prompt": False} if path == CHAT else {}
        body = turns(path, ("user", "Count."), ("assistant", "One, two,"), **more)
        assert asked.prompt(path, **body).endswith("One, two,")
