"""Calls as JSON objects: what is taken, what is refused, and how the arguments are passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.conversation import MAX_ARGUMENTS_BYTES, MAX_NESTING
from flare.output import OutputError
from flare.output.json_objects import ObjectReader, call_arguments, read_object
from tests.output.feeding import call, feed, same_for_all_splits


def arguments_of(written: str) -> str:
    """What the client gets of arguments that the model wrote."""
    found = same_for_all_splits(call("weather", written))
    assert found.error is None, found.error
    ((_, _, arguments),) = found.parts
    return arguments


@pytest.mark.parametrize(
    ("written", "passed_on"),
    [
        ("{}", "{}"),
        ("null", "{}"),
        (
            '{ "a" : 1 ,\n"b":[ 1.50 , -0, 1E400, 123456789012345678901234567890 ] }',
            '{"a":1,"b":[1.50,-0,1E400,123456789012345678901234567890]}',
        ),
        ('{"z": true, "a": null, "m": false}', '{"z":true,"a":null,"m":false}'),
        (r'{"a": "\u00fc \ud83d\ude42 \"x\" C:\\tmp\t\n<\/b>"}', '{"a":"ü 🙂 \\"x\\" C:\\\\tmp\\t\\n</b>"}'),
        (
            '{"a": "ü 🙂 \u2028 <tool_call> </tool_call> <think> {[}]"}',
            '{"a":"ü 🙂 \u2028 <tool_call> </tool_call> <think> {[}]"}',
        ),
        (r'"{\"a\": {\"b\": [1.0]}}"', '{"a":{"b":[1.0]}}'),
        ('"{}"', "{}"),
        ('" {} \\n"', "{}"),
        ('{"": {}, "a": 1}'.replace('"": {}, ', '"b": {"": 2}, '), '{"b":{"":2},"a":1}'),
    ],
)
def test_arguments_are_passed_on_as_written(written: str, passed_on: str) -> None:
    assert arguments_of(written) == passed_on
    json.loads(passed_on)


def test_arguments_may_come_first_or_not_at_all() -> None:
    for text in (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": "{\\"a\\":1}", "name": "f"}</tool_call>',
    ):
        assert same_for_all_splits(text).parts == [("call", "f", '{"a":1}')]
    assert same_for_all_splits('<tool_call> { "name" : "f" } </tool_call>').parts == [("call", "f", "{}")]


@pytest.mark.parametrize(
    "written",
    [
        "{'a': 1}",
        '{"a": 1,}',
        '{"a" 1}',
        '{"a": 01}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": True}',
        '{"a": 1]',
        '{"a": "line\nbreak"}',
        '{"a": "\\x41"}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
        '{"": 1}',
        '{"a": 1} // said',
        "[1]",
        "1",
        "true",
        '""',
        '"Oslo"',
        '"[1]"',
        '"{} {}"',
        '"{\\"a\\": 1, \\"a\\": 2}"',
        '"{\\"a\\": "',
        '"\\"{}\\""',
        "",
        '{"a": ' + "[" * MAX_NESTING + "]" * MAX_NESTING + "}",
        json.dumps('{"a": ' + "[" * MAX_NESTING + "]" * MAX_NESTING + "}"),
        json.dumps('{"a": ' + "[" * 100_000),
    ],
)
def test_arguments_that_are_no_json_object(written: str) -> None:
    found = feed(call("weather", written))
    assert found.error is not None and not found.calls
    if len(written) < 1000:
        assert same_for_all_splits("So: " + call("weather", written)).parts == [("text", "So: ")]


@pytest.mark.parametrize(
    "envelope",
    [
        '{"name": ""}',
        '{"name": " "}',
        '{"name": "\\ud800"}',
        '{"name": "a", "name": "b"}',
        '{"name": "a", "parameters": {}}',
        '{"name": "a", "arguments": {}, "arguments": {}}',
        '{"arguments": {}}',
        '{"arguments": {}, "name": 5}',
        '{"arguments": {}, "name": null}',
        '{"name": "a"',
        '{"name": "a" "arguments": {}}',
        '{"name": "a", "arguments": {}',
        '{"name": "a", "arguments": {}]',
    ],
)
def test_envelopes_that_are_no_call(envelope: str) -> None:
    found = same_for_all_splits(f"<tool_call>{envelope}</tool_call>")
    assert found.error is not None and found.parts == []


def test_the_bounds_of_arguments() -> None:
    nested = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert arguments_of(f'{{"a":{nested}}}') == arguments_of(json.dumps(f'{{"a":{nested}}}')) == f'{{"a":{nested}}}'
    most = '{"a":"' + "ü" * ((MAX_ARGUMENTS_BYTES - 8) // 2) + '"}'
    assert len(most.encode()) == MAX_ARGUMENTS_BYTES
    for written in (most, json.dumps(most, ensure_ascii=False)):
        (found,) = feed(call("weather", written)).calls
        assert found.arguments == most
    for written in (most.replace("ü", "üx", 1), json.dumps(most.replace("ü", "üx", 1), ensure_ascii=False)):
        found = feed(call("weather", written))
        assert found.error is not None and str(MAX_ARGUMENTS_BYTES) in found.error


def test_an_endless_call_is_given_up_while_it_is_read() -> None:
    chunk = "x" * (1 << 20)
    found = feed(['<tool_call>{"name": "', *[chunk] * 17], natural=False)
    assert found.error is not None and "bytes" in found.error
    assert feed(['<tool_call>{"name": "', *[chunk] * 15], natural=False).error is None
    assert feed(['<tool_call>{"name": "', *["ü" * (1 << 20)] * 9], natural=False).error is not None  # bytes count


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(min_size=1), VALUES, max_size=3)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 2]), st.booleans())
def test_any_object_comes_back_the_same(value: dict[str, Any], ascii: bool, indent: int | None, string: bool) -> None:
    """Python's own encoder and decoder are the judges: values, and the order of members."""
    written = json.dumps(value, ensure_ascii=ascii, indent=indent)
    reader = ObjectReader(limit=MAX_ARGUMENTS_BYTES, max_depth=MAX_NESTING)
    assert reader.feed(written + "]", 0) == len(written) and reader.complete and reader.text == written
    passed_on = call_arguments(written if string else read_object(written))
    decoded = json.loads(passed_on)
    assert decoded == value and list(decoded) == list(value)


@given(st.text(alphabet='{}[]",:\\ \n0-1.eEtrufalsn<', max_size=12))
def test_objects_are_taken_where_python_takes_them(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        found = json.loads(call_arguments(text))
    except OutputError:
        found = None
    if isinstance(expected, dict) and "" not in expected and len(expected) == text.count(":"):
        assert found == expected
    elif not isinstance(expected, dict):
        assert found is None
