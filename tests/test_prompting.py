"""From a conversation to what the template gets: results in call order, tools, the instruction to call one, arguments."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest

from flare.conversation import Conversation, Message, Tool, ToolCall, Tools
from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.prompting import (
    CALL_A_TOOL,
    check_tools,
    in_call_order,
    render_conversation,
    template_messages,
    template_tools,
)
from flare.text.template import ChatTemplate
from tests.support.live_server import byte_tokenizer, make_model

ASK = Message("user", "ask")
SPEC = Tool("weather", "Says the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
REQUIRED = Tools((SPEC,), "required")


def calls(*ids: str) -> Message:
    return Message("assistant", "", calls=tuple(ToolCall(id, "f", "{}") for id in ids))


def result(id: str | None, text: str = "") -> Message:
    return Message("tool", text or f"result of {id}", call_id=id)


def said(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_results_come_in_call_order() -> None:
    between = Message("user", "between")
    wanted = [ASK, calls("a", "b", "c"), result("a"), between, result("b"), result("c"), ASK]
    for order in permutations("abc"):
        given = [result(id) for id in order]
        assert in_call_order([ASK, calls("a", "b", "c"), given[0], between, *given[1:], ASK]) == wanted
    assert in_call_order(wanted) == wanted


@pytest.mark.parametrize(
    "group",
    [
        [calls("a", "b"), result("b")],  # one is missing
        [calls("a", "b"), result("b"), result("b", "again")],
        [calls("a", "b"), result("b"), result("a"), result("a", "again")],
        [calls("a", "b"), result("b"), result("x")],
        [calls("a", "b"), result("b"), result(None)],
        [calls("a", "b"), result("b"), result("a"), result("x")],
        [calls("a", "a"), result("a"), result("a", "again")],
        [calls("a", "b"), result("b"), Message("assistant", "so"), result("a")],
        [Message("assistant", "none"), result("b"), result("a")],
        [result("b"), result("a")],
    ],
)
def test_groups_that_are_left_alone(group: list[Message]) -> None:
    later = [calls("a", "b"), result("a"), result("b")]
    assert in_call_order([*group, *later]) == [*group, *later]
    swapped = [*group, calls("a", "b"), result("b"), result("a")]
    assert in_call_order(swapped) == [*group, *later]  # each group by itself


def test_results_do_not_cross_an_assistant_message() -> None:
    given = [calls("a", "b"), result("b"), result("a"), calls("c", "d"), result("d"), result("c")]
    assert in_call_order(given) == [
        calls("a", "b"),
        result("a"),
        result("b"),
        calls("c", "d"),
        result("c"),
        result("d"),
    ]


def test_system_messages_and_their_places() -> None:
    empty, late = Message("system", ""), Message("system", "late")
    for inline, place in ((True, ("system", "late")), (False, ("user", "<system>\nlate\n</system>"))):
        assert said(template_messages([empty, ASK, empty, late], inline_system=inline)) == [("user", "ask"), place]
    assert said(template_messages([late, late, ASK], inline_system=False)) == [
        ("system", "late"),
        ("user", "<system>\nlate\n</system>"),
        ("user", "ask"),
    ]
    developers = [ASK, Message("developer", "D"), empty, late]
    assert said(template_messages(developers, inline_system=True)) == [
        ("system", "<developer>\nD\n</developer>\n\n<system>\nlate\n</system>"),
        ("user", "ask"),
    ]


@pytest.mark.parametrize("inline", [True, False])
def test_the_instruction_to_call_a_tool(inline: bool) -> None:
    def messages(given: list[Message], tools: Tools = REQUIRED, default: str | None = None) -> list[tuple[str, str]]:
        return said(template_messages(given, inline_system=inline, tools=tools, default_system=default))

    system = Message("system", "S")
    assert messages([system, ASK]) == [("system", f"S\n\n{CALL_A_TOOL}"), ("user", "ask")]
    assert messages([ASK]) == [("system", CALL_A_TOOL), ("user", "ask")]
    assert messages([ASK], default="Be kind.") == [("system", f"Be kind.\n\n{CALL_A_TOOL}"), ("user", "ask")]
    assert messages([system, ASK], default="Be kind.")[0] == ("system", f"S\n\n{CALL_A_TOOL}")
    leading, *rest = messages([ASK, Message("developer", "D")])
    assert leading == ("system", f"<developer>\nD\n</developer>\n\n{CALL_A_TOOL}") and rest == [("user", "ask")]
    later = messages([ASK, system])
    assert later[0] == ("system", CALL_A_TOOL) and "S" in later[2][1] and len(later) == 3
    for choice in ("auto", "none", "named"):
        tools = Tools((SPEC,), choice, "weather")  # type: ignore[arg-type]
        assert messages([ASK], tools, "Be kind.") == [("user", "ask")]
    assert ASK.text == "ask" and system.text == "S"


def test_what_the_template_shows_of_the_tools() -> None:
    custom, spaced = Tool("patch", custom=True), Tool("spawn", "Starts one.", namespace="agents")
    offered = (SPEC, custom, spaced, Tool("spawn"))
    shown = template_tools(Tools(offered))
    assert shown is not None and {item["type"] for item in shown} == {"function"}
    functions = [item["function"] for item in shown]
    assert functions[0] == {"name": "weather", "description": "Says the weather.", "parameters": SPEC.parameters}
    assert [function["name"] for function in functions] == ["weather", "patch", "agents__spawn", "spawn"]
    assert functions[1]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert functions[3] == {"name": "spawn", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert template_tools(Tools(offered, "required")) == shown
    assert template_tools(Tools(offered, "none")) is None and template_tools(Tools()) is None
    assert template_tools(Tools(offered, "named", "spawn")) == [shown[3]]
    assert template_tools(Tools(offered, "named", "spawn", "agents")) == [shown[2]]


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        (Tools((SPEC, SPEC)), "weather"),
        (Tools((Tool("b", namespace="a"), Tool("a__b"))), "a__b"),
        (Tools((Tool("b__c", namespace="a"), Tool("c", namespace="a__b"))), "a__b__c"),
        (Tools((Tool("x" * 5000), Tool("x" * 5000))), "xxx"),
    ],
)
def test_tools_that_cannot_be_told_apart(tools: Tools, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools(tools)
    message = str(caught.value)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert word in message and message.startswith("tools: ") and len(message) < 300 and "\n" not in message


def test_tools_that_can() -> None:
    check_tools(Tools())
    check_tools(Tools((SPEC, Tool("weather", namespace="n")), "named", "weather", "n"))
    check_tools(REQUIRED)


def test_calls_of_a_history() -> None:
    written = '{"n": 1.50, "s": "é"}'
    message = Message(
        "assistant",
        "",
        "why",
        (ToolCall("1", "f", written), ToolCall("2", "patch", 'text "x"\n', "n", custom=True)),
    )
    for form in ("mapping", "string"):
        ((plain),) = template_messages([message], inline_system=True, arguments=form)
        assert plain["role"] == "assistant" and plain["reasoning_content"] == "why" and plain["content"] == ""
        first, second = plain["tool_calls"]
        assert (first["id"], first["type"], first["function"]["name"]) == ("1", "function", "f")
        assert second["function"]["name"] == "n__patch"
        given, custom = first["function"]["arguments"], second["function"]["arguments"]
        if form == "string":
            assert given == written
            custom = json.loads(custom)
        else:
            assert given == {"n": 1.5, "s": "é"}
        assert custom == {"input": 'text "x"\n'}
    answered = template_messages([Message("tool", "rain", call_id="1", name="f")], inline_system=True)
    assert answered == [{"role": "tool", "content": "rain", "tool_call_id": "1", "name": "f"}]


def test_a_result_has_the_name_of_the_call_that_it_answers() -> None:
    called = Message("assistant", "", calls=(ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}", "n")))
    again = Message("assistant", "", calls=(ToolCall("1", "h", "{}"),))
    own = Message("tool", "", call_id="1", name="own")
    given = [called, result("1"), result("2"), own, again, result("1"), result("3"), result(None)]
    names = [plain.get("name") for plain in template_messages(given, inline_system=True) if plain["role"] == "tool"]
    assert names == ["f", "n__g", "own", "h", None, None]


@pytest.mark.parametrize("inline", [True, False])
def test_system_text_where_the_template_has_no_leading_system_message(inline: bool) -> None:
    def messages(*given: Message, tools: Tools | None = None) -> list[tuple[str, str]]:
        return said(template_messages(given, inline_system=inline, leading_system=False, tools=tools))

    system, developer, reply = Message("system", "S"), Message("developer", "D"), Message("assistant", "A")
    assert messages(system, ASK, reply) == [("user", "<system>\nS\n</system>\n\nask"), ("assistant", "A")]
    assert messages(system, reply) == [("user", "<system>\nS\n</system>"), ("assistant", "A")]
    assert messages(system) == [("user", "<system>\nS\n</system>")]
    assert messages(ASK) == [("user", "ask")] and messages() == []
    both = "<system>\nS\n</system>\n\n<developer>\nD\n</developer>"
    assert messages(system, developer, ASK) == [("user", f"{both}\n\nask")]
    assert messages(ASK, tools=REQUIRED) == [("user", f"<system>\n{CALL_A_TOOL}\n</system>\n\nask")]
    assert messages(developer, ASK, tools=REQUIRED) == [
        ("user", f"<developer>\nD\n</developer>\n\n{CALL_A_TOOL}\n\nask")
    ]


def test_content_in_parts() -> None:
    called = Message("assistant", "", calls=(ToolCall("1", "f", "{}"),))
    given = [Message("system", "S"), ASK, called, result("1", "rain")]
    shown = template_messages(given, inline_system=True, parts=True)
    assert [plain["content"] for plain in shown] == [
        [{"type": "text", "text": text}] for text in ("S", "ask", "", "rain")
    ]


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content CHANGED }}</e>\n{% endfor %}"


def prompt(conversation: Conversation, source: str, **model: Any) -> str:
    template = ChatTemplate(source)
    tokens = render_conversation(conversation, "messages", make_model(**model), byte_tokenizer(), template).tokens
    assert all(token < 256 for token in tokens)
    return bytes(tokens).decode()


@pytest.mark.parametrize("changed", ["", "| trim"])
@pytest.mark.parametrize("text", ["def f():\n    ", "a", " a\t\n", "<|im_end|> \n", "a\n \u00a0", "</e>\n"])
def test_a_continued_message_ends_as_it_was_sent(changed: str, text: str) -> None:
    conversation = Conversation([ASK, Message("assistant", text)], continue_final=True)
    found = prompt(conversation, TURNS.replace("CHANGED", changed), continuation="</e>\n")
    assert found == "<user>ask</e>\n<assistant>" + (text.lstrip() if changed else text)


@pytest.mark.parametrize(
    ("text", "continuation", "says"),
    [
        ("", "</e>\n", "messages: the last one is to be continued and has no text; "),
        (" \n", "</e>\n", "messages: the last one is to be continued and has no text; "),
        (
            "b",
            "</other>",
            "messages: this model's chat template cannot continue this message; end with a user's message",
        ),
        (
            "gone",
            "</e>\n",
            "messages: this model's chat template cannot continue this message; end with a user's message",
        ),
        ("b", None, "messages: this model's chat template cannot continue this message; end with a user's message"),
    ],
)
def test_messages_that_cannot_be_continued(text: str, continuation: str | None, says: str) -> None:
    source = "{% for m in messages if m.content and m.content != 'gone' %}" + TURNS[24:].replace("CHANGED", "")
    conversation = Conversation([ASK, Message("assistant", text)], continue_final=True)
    with pytest.raises(RequestError) as caught:
        prompt(conversation, source, continuation=continuation)
    assert str(caught.value).startswith(says) and caught.value.param == "messages"


def test_a_template_that_takes_parts_alone_gets_them() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert prompt(Conversation([ASK]), source) == "<user>"
    assert prompt(Conversation([ASK]), source, content_parts=True) == "<user>ask"


@pytest.mark.parametrize("variables", [{}, {"persona": "sage"}])
@pytest.mark.parametrize("asked", [True, False])
def test_a_template_that_opens_every_reply(asked: bool, variables: dict[str, Any]) -> None:
    source = "{% for m in messages %}{{ m.content }}</e>{% endfor %}{{ persona }}<think>"
    model = make_model(
        output=OutputSyntax(reasoning=("<think>", "</think>")),
        opens_reasoning=True,
        generation_prompt_switch=False,
        continuation="</e><think>",
    )

    def opens(conversation: Conversation) -> bool:
        return render_conversation(
            conversation, "messages", model, byte_tokenizer(), ChatTemplate(source)
        ).opens_reasoning

    assert opens(Conversation([ASK], add_generation_prompt=asked, variables=variables))
    assert not opens(Conversation([ASK, Message("assistant", "a")], continue_final=True))


@pytest.mark.parametrize(
    ("variables", "text", "param", "says"),
    [
        (
            {"mood": 5, "other": 1},
            "ask",
            "chat_template_kwargs",
            "cannot render this conversation (chat_template.jinja line 1)",
        ),
        ({"mood": "bad"}, "ask", "chat_template_kwargs", "refuses this conversation: no such mood"),
        ({"mood": "good"}, "refuse", "input", "refuses this conversation: no such text"),
        ({}, "refuse", "input", "refuses this conversation: no such text"),
        (
            {"mark": "x"},
            "ask",
            "chat_template_kwargs.mark",
            "chat_template_kwargs.mark: not a variable that a request can set",
        ),
    ],
)
def test_who_is_to_blame_where_the_template_does_not_render(
    variables: dict[str, Any], text: str, param: str, says: str
) -> None:
    source = (
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such text') }}{% endif %}{{ mood and mood.upper() }}"
        "{% if mood == 'bad' %}{{ raise_exception('no such mood') }}{% endif %}{{ messages[0].content }}"
    )
    conversation = Conversation([Message("user", text)], variables=variables)
    with pytest.raises(RequestError) as caught:
        render_conversation(conversation, "input", make_model(), byte_tokenizer(), ChatTemplate(source))
    error = caught.value
    assert (error.param, error.status) == (param, 400) and says in str(error)
    if param == "chat_template_kwargs":
        assert str(error).startswith("chat_template_kwargs: ") and f"it does without {', '.join(variables)}" in str(
            error
        )
