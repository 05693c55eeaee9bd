"""What a request allows of calls: the choice of tools, one call only, and the client's own names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.conversation import MAX_TOOL_NAME, Tool, Tools
from tests.output.feeding import call, feed, same_for_all_splits

OFFERED = (Tool("weather"), Tool("clock"))
OSLO = ("call", "weather", '{"city":"Oslo"}')


def choosing(choice: Any, name: str | None = None, **more: Any) -> Tools:
    return Tools(OFFERED, choice, name, **more)


def test_undeclared_calls_are_returned_as_generated() -> None:
    found = same_for_all_splits(call("remove") + call(), tools=choosing("auto"))
    assert found.parts == [("call", "remove", '{"city":"Oslo"}'), OSLO] and found.error is None
    assert feed(call("r" * MAX_TOOL_NAME)).error is None and feed(call("r" * (MAX_TOOL_NAME + 1))).error is not None
    long = Tools((Tool("t" * MAX_TOOL_NAME, namespace="n" * MAX_TOOL_NAME),))
    (made,) = feed(call("n" * MAX_TOOL_NAME + "__" + "t" * MAX_TOOL_NAME), tools=long).calls
    assert (made.namespace, made.name) == ("n" * MAX_TOOL_NAME, "t" * MAX_TOOL_NAME)
    unprintable = feed(call("a\\nb"))
    assert unprintable.parts == [] and unprintable.error is not None and "cannot be printed" in unprintable.error


def test_choices_share_the_names_of_the_tools() -> None:
    """128 choices of a request with many tools must not hold 128 tables of them."""
    tools = choosing("auto")
    assert tools.declared is tools.declared and list(tools.declared) == ["weather", "clock"]


@pytest.mark.parametrize("natural", [True, False])
def test_a_required_call(natural: bool) -> None:
    def answer(text: str) -> Any:
        return same_for_all_splits(text, tools=choosing("required"), natural=natural)

    found = answer("I look. " + call())
    assert found.parts == [("text", "I look. "), OSLO] and found.error is None
    found = answer("I would rather talk.")
    assert found.parts == [("text", "I would rather talk.")] and found.error is not None
    assert answer("").error is not None and answer("<think>Hm").error is not None
    assert answer(call()[:40]).error is not None
    undeclared = answer(call("remove"))
    assert undeclared.parts == [("call", "remove", '{"city":"Oslo"}')] and undeclared.error is not None
    assert answer(call("remove") + call()).error is None
    assert (answer(call() + call("clock")[:40]).error is None) is not natural


@pytest.mark.parametrize("natural", [True, False])
def test_a_selected_tool(natural: bool) -> None:
    def answer(text: str) -> Any:
        return same_for_all_splits(text, tools=choosing("named", "weather"), natural=natural)

    found = answer(f"<think>Hm.</think>Sure!\n{call()}\n{call()} Done.")
    assert found.parts == [("reasoning", "Hm."), OSLO, OSLO] and found.error is None
    found = answer(call() + call("clock", "{}"))
    assert found.parts == [OSLO] and found.error is not None and "clock" in found.error
    for text in ("Sure!", "", call("remove"), call()[:40]):
        found = answer(text)
        assert found.parts == [] and found.error is not None


def test_one_call_only() -> None:
    for choice, name in (("auto", None), ("required", None), ("named", "weather")):
        tools = choosing(choice, name, parallel=False)
        assert same_for_all_splits(call(), tools=tools).error is None
        for second in (call(), call()[:30], '<tool_call>{"name": "'):
            for natural in (True, False):
                found = same_for_all_splits(f"{call()}\n{second}", tools=tools, natural=natural)
                assert found.parts == [OSLO] and "second" in str(found.error)
        mention = same_for_all_splits(f"{call()}<tool_call> is a tag", tools=tools)
        assert len(mention.calls) == 1 and mention.error is None


def test_a_namespace_is_put_back() -> None:
    tools = Tools((Tool("spawn", namespace="agents"), Tool("spawn"), Tool("b__c")))
    text = call("agents__spawn", "{}") + call("spawn", "{}") + call("b__c", "{}") + call("agents__other", "{}")
    made = same_for_all_splits(text, tools=tools).calls
    assert [(found.namespace, found.name) for found in made] == [
        ("agents", "spawn"),
        (None, "spawn"),
        (None, "b__c"),
        (None, "agents__other"),
    ]
    selected = Tools(tools.offered, "named", "spawn", "agents")
    assert same_for_all_splits(call("agents__spawn"), tools=selected).error is None
    assert same_for_all_splits(call("spawn"), tools=selected).error is not None


def test_a_custom_tool_gets_its_text() -> None:
    tools = Tools((Tool("patch", custom=True), Tool("run", namespace="x", custom=True)))
    text = '*** Begin\n"é" \\ \t{"input": 1}\n'
    for written in (json.dumps({"input": text}), json.dumps(json.dumps({"input": text}))):
        made = feed(call("patch", written) + call("x__run", '{"input": ""}'), tools=tools).calls
        assert [(found.name, found.namespace, found.arguments, found.custom) for found in made] == [
            ("patch", None, text, True),
            ("run", "x", "", True),
        ]
    for written in ("{}", '{"input": 1}', '{"input": null}', '{"text": "a"}', '{"input": "a", "more": "b"}'):
        found = same_for_all_splits(call("patch", written), tools=tools)
        assert not found.calls and "patch" in str(found.error)


def test_ids_are_unique_and_begin_as_told() -> None:
    made = feed(call() * 12).calls
    assert len({found.id for found in made}) == 12 and all(found.id.startswith("call_") for found in made)
