"""JSON Schemas held against the official suite, token by token: right values can be written, wrong ones cannot."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from flare.constraints import checked_schema
from flare.constraints.json_schema import FORMATS, KEYWORDS, NEUTRAL
from flare.errors import RequestError
from tests.constraints.driving import is_answer, json_mask, wander, write
from tests.constraints.json_schema_suite import Case, cases

OTHERWISE_WRITTEN = {
    "allOf: allOf": [{"foo": "baz", "bar": 2}],
    "allOf: allOf with base schema": [{"foo": "quux", "bar": 2, "baz": None}],
    "const: const with object": [{"baz": "bax", "foo": "bar"}],
    "const: const with 0 does not match other zero-like types": [0.0],
    "const: const with 1 does not match true": [1.0],
    "const: const with -2.0 matches integer and float types": [-2.0],
    "const: float and integers are equal up to 64-bit representation limits": [9007199254740992.0],
    "enum: enum with 0 does not match false": [0.0],
    "enum: enum with [0] does not match [false]": [[0.0]],
    "enum: enum with 1 does not match true": [1.0],
    "enum: enum with [1] does not match [true]": [[1.0]],
    "type: integer type matches integers": [1.0],
}
"""Values that JSON Schema allows and that are not written: another order of members, integers with a fraction of zero."""


def taken() -> list[Case]:
    found = []
    for case in cases():
        try:
            checked_schema(case.schema, "s")
            json_mask(case.schema)
        except RequestError:
            continue
        found.append(case)
    return found


TAKEN = taken()


def test_most_of_the_suite_is_taken() -> None:
    """Of 320 cases those without words that are not enforced, references to elsewhere, and schemas that no value is of."""
    assert len(TAKEN) >= 140
    words = {word for case in TAKEN if isinstance(case.schema, dict) for word in case.schema}
    assert KEYWORDS - words <= {"format", "definitions"}


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_the_suites_values(case: Case) -> None:
    for value, valid in case.values:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if valid and any(type(o) is type(value) and o == value for o in OTHERWISE_WRITTEN.get(case.name, [])):
            continue
        assert is_answer(json_mask(case.schema), text) == valid, text


SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
        },
        "$ref": "#/$defs/node",
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "x": {"type": of}}, "required": ["kind", "x"]}
            for kind, of in (("i", "integer"), ("b", "boolean"))
        ]
    },
    {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]+)?$", "maxLength": 9},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 99.25},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 5000},
    {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "boolean"}},
    {"type": ["string", "null"], "maxLength": 4},
    {"anyOf": [{"type": "array", "prefixItems": [{"type": "boolean"}], "items": False}, {"const": "none"}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_is_drawn_at_random_is_of_the_schema(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    random, ended = Random(7), 0
    for _ in range(25):
        text = wander(json_mask(schema), random)
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
    assert ended >= 15


def test_any_object_drawn_at_random_is_one() -> None:
    random = Random(3)
    texts = [wander(json_mask({"type": "object"}), random) for _ in range(25)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 15 and all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 4}, ["abca"], ["abcab", "abd"]),
        ({"type": "string", "pattern": "z"}, ["xzy", "z"], ["xy", ""]),
        ({"type": "string", "maxLength": 2}, ["\U0001f60a\u4f60", ""], ["abc"]),
        ({"type": "string", "enum": ['\u00e9"\\', "\u4f60"]}, ['\u00e9"\\', "\u4f60"], ["e", ""]),
        ({"type": "integer", "minimum": 0, "maximum": 20_000_000_000}, [19_999_999_999, 0], [20_000_000_001, -1]),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, [2**53 - 1, 5], [10**17]),
        ({"type": "object", "x-guidance": {"lenient": True}, "properties": {}}, [{"a": 1}], [1]),
    ],
)
def test_right_values(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """Patterns are searched and joined with lengths, lengths count characters, and large bounds hold."""
    for values, expected in ((good, True), (bad, False)):
        for value in values:
            assert is_answer(json_mask(schema), json.dumps(value, ensure_ascii=False)) == expected, value


def test_white_space_between_the_tokens_of_json_ends() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for blank in ("", " ", "\n  ", "\t\r\n ", " " * 32):
        assert is_answer(json_mask(schema), f'{{{blank}"a"{blank}:{blank}"x"{blank}}}')
    for count in (33, 40, 500):
        assert not write(json_mask(schema), "{" + " \n" * (count // 2) + " " * (count % 2) + '"')
    assert not write(json_mask(schema), '{"a":"x"}\n') and not write(json_mask(schema), "\n{")
    assert is_answer(json_mask(schema), '{"a":"' + " " * 200 + '"}')


def test_words_that_ask_for_nothing_pass() -> None:
    schema = {
        "type": "array",
        "title": "T",
        "x-order": 1,
        "$schema": "any",
        "$id": "here",
        "default": {"not": 1},
    }
    for number in range(3):
        neutral = {word: values[number % len(values)] for word, values in NEUTRAL.items()}
        assert checked_schema(schema | neutral, "s") == {"type": "array"}
    for word, value in (("uniqueItems", 0), ("nullable", None), ("propertyNames", {"type": "string", "minLength": 1})):
        with pytest.raises(RequestError, match=f"s.{word}: not supported"):
            checked_schema({word: value}, "s")
    assert checked_schema(True, "s") == {}


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    """One of a union, as pydantic writes them."""
    return {"type": "object", "properties": {"t": value, **more}, "required": ["t"], "additionalProperties": False}


X, Y = {"x": {"type": "integer"}}, {"y": {"type": "string"}}
UNION = {"a": tagged({"const": "a"}, **X), "b": tagged({"enum": ["b", "c"]}, **Y), "n": {"type": "null"}}


@pytest.mark.parametrize(
    ("parts", "good", "bad"),
    [
        (
            [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            [{"t": "a", "x": 1}, {"t": "c", "y": ""}],
            [{"t": "a", "y": ""}],
        ),
        ([{"$ref": "#/$defs/a"}, {"type": "null"}], [None, {"t": "a"}], [{"t": "b"}]),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/n"}], [None, {"t": "b"}], [1]),
        (
            [tagged({"const": 1}, **X), tagged({"const": 2, "type": "integer"}, **Y)],
            [{"t": 2, "y": "a"}],
            [{"t": 1, "y": "a"}],
        ),
        ([tagged({"const": True}), tagged({"const": 1})], [{"t": True}, {"t": 1}], [{"t": False}]),
        ([{"allOf": [{"$ref": "#/$defs/a"}]}, {"type": ["string", "boolean"]}], ["s", {"t": "a"}], [1]),
        ([{"enum": [1, "x"]}, {"enum": [2, "y"]}], [1, "y"], [3]),
        ([{"type": "integer"}, {"type": "string"}], [1, "a"], [None, 1.5]),
    ],
    ids=range(8),
)
def test_one_of_schemas_that_exclude_each_other(parts: list[Any], good: list[Any], bad: list[Any]) -> None:
    for schema in (
        {"$defs": UNION, "oneOf": parts},
        {"$defs": UNION, "oneOf": parts, "anyOf": [{}]},
    ):
        validator = jsonschema.Draft202012Validator(schema)
        for value in (*good, *bad):
            assert validator.is_valid(value) == (value in good)
            assert is_answer(json_mask(schema), json.dumps(value)) == (value in good), value


@pytest.mark.parametrize(
    "parts",
    [
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
        [tagged({"const": 1}), tagged({"const": 1.0})],
        [{"type": "integer"}, {"type": "number"}],
        [
            {"properties": {"t": {"const": 1}}, "required": ["t"]},
            {"properties": {"t": {"const": 2}}, "required": ["t"]},
        ],
        [{"type": "object", "properties": {"t": {"const": c}}} for c in "ab"],
        [{"type": "string"}, {"maxLength": 3}],
        [True, {"type": "string"}],
    ],
    ids=range(7),
)
def test_one_of_schemas_that_may_hold_together_is_refused(parts: list[Any]) -> None:
    with pytest.raises(RequestError, match="a oneOf whose schemas do not exclude each other"):
        json_mask({"$defs": UNION, "oneOf": parts})


def test_an_alternative_that_is_referred_to_stays_in_its_place() -> None:
    schema = {
        "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}, "b": {"$ref": "#/properties/a/oneOf/0"}}
    }
    assert is_answer(json_mask(schema), '{"a": null, "b": "x"}') and not write(json_mask(schema), '{"b": null')


@pytest.mark.parametrize(
    "name", ["Answer[int]", "a b", "\u00e9", "x|y", "a<b>", "a%b", "a/b", "c~d", "a.b-C_1", "50%25"]
)
@pytest.mark.parametrize("quoted", [False, True])
def test_references_to_any_name(name: str, quoted: bool) -> None:
    step = name.replace("~", "~0").replace("/", "~1")
    reference = "#/$defs/" + (quote(step) if quoted or "%" in step else step)
    schema = {"$defs": {name: {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": reference}}}
    assert is_answer(json_mask(schema), '{"x": 1}') and not write(json_mask(schema), '{"x": "')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]+$', ["ab\n\\", "\u00e9\x01"], ['a"', '"']),
        ("^[^\\\\]+$", ['"ab"', "\t"], ["\\", "a\\n"]),
        ('^[^<>"]+$', ["a\\", "\r"], ['"', "<"]),
        ('^[^"\\\\]*$', ["", "\n"], ['"', "\\"]),
        ("^[\\x00-\\x21\\x23-\\x7e]+$", ["a\n"], ['"']),
        ("^(?:[\\x00-\\x1f]|[ -!]|[#-~])+$", ["a\n"], ['"']),
        ("^(\\x00|[\\x01-\\x1f])+$", ["\n"], ['"', "\\"]),
        ('^[^]"]+$', ["[\n"], ['"', "]"]),
        ('^[^\\d"]+$', ["a\n"], ['"', "1"]),
        ('a[^"]b', ["a\nb"], ['a"b']),
        ("^[^a-c]+$", ['"\\\n'], ["a"]),
        ('^[a-z"]+$', ['a"'], ["\\"]),
    ],
)
def test_classes_of_patterns_take_no_escapes_of_what_they_exclude(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    for value in (*good, *bad):
        assert (re.search(pattern, value) is not None) == (value in good)
        text = json.dumps(value, ensure_ascii=False)
        assert is_answer(json_mask({"type": "string", "pattern": pattern}), text) == (value in good), text
        schema = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
        assert is_answer(json_mask(schema), "{" + text + ":1}") == (value in good), text


@pytest.mark.parametrize("property", ["P", "{Alphabetic}"])
def test_classes_of_characters_properties_take_no_escapes(property: str) -> None:
    for pattern in (f"^\\P{property}+$", f"^[^\\p{property}]+$"):
        excluded = '"' if property == "P" else "a"
        assert not is_answer(json_mask({"type": "string", "pattern": pattern}), json.dumps(excluded))
        assert is_answer(json_mask({"type": "string", "pattern": pattern}), '"1\\n"')


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
OPEN = [
    A,
    {"type": "object", **A, "required": ["a"]},
    {"allOf": [A, B]},
    {"allOf": [A, {"additionalProperties": {"type": "integer"}}]},
    {"allOf": [A, {**B, "additionalProperties": False}]},
    {"allOf": [A, {"required": ["b"]}], "minProperties": 1},
    {"$defs": {"A": A}, "$ref": "#/$defs/A", **B},
    {"anyOf": [{**A, "type": "object"}, {**B, "type": "object", "required": ["b"]}]},
]


@pytest.mark.parametrize("schema", OPEN, ids=range(len(OPEN)))
def test_free_names_beside_properties(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for text in (
        '{"a":1}',
        '{"a":"x"}',
        '{"a":1,"b":"x"}',
        '{"a":1,"b":2}',
        '{"b":2}',
        '{"b":"x"}',
        '{"a":1,"b":2,"c":3}',
        '{"a":1,"b":2,"c":"x"}',
        '{"a":1,"b":2,"ab":3,"\u00e9":4,"":5,"q\\"\\n":6}',
    ):
        assert is_answer(json_mask(schema), text) == validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("schema", OPEN[:2], ids=range(2))
def test_free_names_hold_no_escapes(schema: Any) -> None:
    for text in ('{"\\u0061":"x"', '{"a":1,"\\u0061":"x"', '{"a":1,"b\\u0061"'):
        assert not write(json_mask(schema), text)
    assert is_answer(json_mask(schema), '{"a":1,"\\t\\u0001":2}'), "control characters are written so"


def test_formats_that_describe_a_type_are_passed_over() -> None:
    for format in ("int32", "int64", "float", "double", "binary", "path", "password"):
        assert checked_schema({"type": "integer", "format": format}, "s") == {"type": "integer"}
    for format in ("byte", "date-time-local", 7, ["int32"]):
        with pytest.raises(RequestError, match="s.format: "):
            checked_schema({"format": format}, "s")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_formats_are_enforced(format: str) -> None:
    good = {
        "date": "2026-02-28",
        "date-time": "2026-02-28T10:00:00Z",
        "duration": "P3DT4H",
        "email": "a.b@example.com",
        "hostname": "a-b.example",
        "ipv4": "127.0.0.1",
        "ipv6": "::1",
        "time": "10:00:00Z",
        "uri": "https://example.com/a?b#c",
        "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    }[format]
    assert is_answer(json_mask({"type": "string", "format": format}), f'"{good}"')
    assert not is_answer(json_mask({"type": "string", "format": format}), '"not one, surely"')
