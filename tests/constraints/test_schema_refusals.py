"""JSON Schemas that are refused, each by its place, and those that would take too long: bounds, bombs and their times."""

from __future__ import annotations

from itertools import product
from time import perf_counter, thread_time
from typing import Any

import pytest

from flare.constraints import checked_schema
from flare.constraints.json_schema import MAX_DEPTH, MAX_MEMBERS, MAX_SCHEMA
from flare.errors import RequestError
from tests.constraints.driving import is_answer, json_mask


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"properties": {"a": {"not": {}}}}, "s.properties.a.not", "not supported in schemas of answers"),
        ({"allOf": [{}, {"if": {}}]}, "s.allOf[1].if", "not supported"),
        ({"minLenght": 2}, "s.minLenght", "not supported"),
        ({"items": {"uniqueItems": True}}, "s.items.uniqueItems", "not supported"),
        ({"type": "string", "nullable": True}, "s.nullable", 'send "null" among the types'),
        ({"contentEncoding": "base64"}, "s.contentEncoding", "not supported"),
        ({"$dynamicRef": "#a"}, "s.$dynamicRef", "refer to the schema by $ref"),
        ({"properties": {"a": {"$ref": "http://example.com/x"}}}, "s.properties.a.$ref", "is not within this schema"),
        ({"$ref": "#/$defs/a"}, "s.$ref", "is no schema of this one"),
        ({"$ref": "#/default", "default": {"not": {}}}, "s.$ref", "no schema stands"),
        ({"$ref": "#/properties/a/const", "properties": {"a": {"const": {"not": {}}}}}, "s.$ref", "no schema stands"),
        ({"items": [{"type": "string"}]}, "s.items", "send it as prefixItems"),
        ({"format": "regex"}, "s.format", "'regex' is not enforced; send date, date-time"),
        ({"type": "text"}, "s.type", "'text' is not one of array, boolean"),
        ({"type": []}, "s.type", "names no type"),
        ({"properties": {"a": 1}}, "s.properties.a", "the number 1 is not a schema"),
        ({"enum": []}, "s.enum", "at least one value"),
        ({"required": "a"}, "s.required", "expected an array of names"),
        ({"maximum": 1e30}, "s.maximum", "1e+30 is beyond 9007199254740992"),
        ({"minimum": True}, "s.minimum", "expected a number, got true"),
        ({"minItems": 10**9}, "s.minItems", "1000000000 is more than can be counted, the limit is 1000000"),
        ({"maxLength": -1}, "s.maxLength", "expected a whole number"),
        ({"multipleOf": 0}, "s.multipleOf", "greater than 0"),
        ({"multipleOf": 987654}, "s.multipleOf", "has too many digits"),
        ({"allOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "s", "2 multipleOf hold for the same value"),
        (
            {"properties": {f"p{i}": {} for i in range(MAX_MEMBERS + 1)}},
            "s.properties",
            "501 members, the limit is 500",
        ),
        ({"enum": [1, [{"a": 2**53 + 1}]]}, "s.enum[1][0].a", "9007199254740993 is beyond 9007199254740992"),
        ({"const": -(2**70)}, "s.const", "and would be written as another number; send it as a string"),
        ({"multipleOf": 5001}, "s.multipleOf", "has too many digits"),
        ({"enum": list(range(10_001))}, "s.enum", "more than 10000 values"),
        ({"oneOf": [{"const": i} for i in range(201)]}, "s.oneOf", "201 schemas, the limit is 200"),
        (
            {"patternProperties": {str(i): {} for i in range(21)}},
            "s.patternProperties",
            "more than 20 of these patterns",
        ),
        ({"anyOf": [{}] * 5001}, "s", "more than 5000 schemas"),
        ({"title": "x" * MAX_SCHEMA}, "s", "bytes of UTF-8, the limit is 262144"),
        (False, "s", "false, which no value is of"),
        ([], "s", "not a schema"),
    ],
)
def test_what_is_refused_and_where(schema: Any, place: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked_schema(schema, "s")
    error = caught.value
    assert (error.param, error.status) == (place, 400) and str(error).startswith(f"{place}: ")
    assert said in str(error) and len(str(error)) < 300 and "\n" not in str(error)


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_depth() -> None:
    assert is_answer(json_mask(nested(MAX_DEPTH - 2)), "{}")
    with pytest.raises(RequestError, match="nests arrays and objects more than 64 levels deep"):
        checked_schema(nested(20_000), "s")


REFERENCES = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "string"}}
SEARCHED = [{"type": "string", "pattern": f"a.*b{i}"} for i in range(30)]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": REFERENCES},
        {"allOf": SEARCHED},
        {"allOf": [{"properties": {"a": part}} for part in SEARCHED]},
        {"allOf": [{"items": part} for part in SEARCHED]},
        {"allOf": [{"additionalProperties": part} for part in SEARCHED]},
        {"allOf": [{"anyOf": [part, {"$ref": "#/$defs/x", "allOf": [{}]}]} for part in SEARCHED], "$defs": {"x": {}}},
        {"allOf": [{"anyOf": [{"properties": {f"x{i}": {"const": j}}} for j in range(8)]} for i in range(8)]},
        {"type": "object", "patternProperties": {f"^(a|b)*a(a|b){{14}}{i}$": {} for i in range(20)}},
        {"oneOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{10}}{i}$"} for i in range(200)]},
        {"type": "string", "pattern": "^((a{1,90}){1,90}){1,90}$"},
        {"type": "string", "pattern": "(?:" * 5000 + "a" + ")" * 5000},
        {"anyOf": [{"type": "object", "properties": {f"{c}{i}": {} for i in range(480)}} for c in "abcdefgh"]},
        {"type": "array", "minItems": 999_999},
        {"enum": [f"value {i} {i * 7919}" for i in range(10_000)]},
        {"type": "integer", "multipleOf": 9973, "minimum": 1, "maximum": 2**53},
    ],
    ids=range(15),
)
def test_bombs_are_refused_or_compiled_within_bounds(schema: Any) -> None:
    started = perf_counter()
    try:
        json_mask(schema)
    except RequestError as error:
        assert error.status == 400 and len(str(error)) < 300 and "\n" not in str(error)
    assert perf_counter() - started < 10


def models(count: int, members: int, of: Any) -> dict[str, Any]:
    """As pydantic writes models that refer to each other."""
    table = {
        f"d{i}": {
            "type": "object",
            "properties": {f"p{j}": of(i, j) for j in range(members)},
            "required": ["p0"],
            "additionalProperties": False,
        }
        for i in range(count)
    }
    return {"$defs": table, "type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(count)]}}


@pytest.mark.parametrize(
    "schema",
    [
        models(60, 15, lambda i, j: {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}),
        models(40, 10, lambda i, j: {"$ref": f"#/$defs/d{(7 * i + j) % 40}"}),
        models(10, 5, lambda i, j: {"anyOf": [{"$ref": f"#/$defs/d{(i + j) % 10}"}, {"type": "null"}]}),
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {}}},
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"x": {"pattern": "a"}}}],
            "$defs": {"a": {"items": {"$ref": "#"}}},
        },
    ],
    ids=range(5),
)
def test_schemas_that_join_nothing_pass_quickly(schema: Any) -> None:
    started = thread_time()
    checked_schema(schema, "s")
    assert thread_time() - started < 0.5


def test_what_joins_too_much_is_refused_in_time() -> None:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}], "properties": {f"p{i}": {}}} for i in range(1500)}
    mutual = models(60, 8, lambda i, j: {"allOf": [{"$ref": f"#/$defs/d{(7 * i + j + k) % 60}"} for k in range(2)]})
    for schema in ({"$ref": "#/$defs/d0", "$defs": chain | {"d1500": {}}}, mutual):
        started = thread_time()
        with pytest.raises(RequestError, match="joins too many schemas by allOf, anyOf and"):
            checked_schema(schema, "s")
        assert thread_time() - started < 3


def test_patterns_of_alternatives_do_not_meet() -> None:
    """Each of a union's members may have its own."""
    part = {"properties": {"a": {"type": "string", "format": "date"}, "b": {"type": "string", "pattern": "x"}}}
    checked_schema({"anyOf": [part, *SEARCHED]}, "s")
    with pytest.raises(RequestError, match="3 patterns and formats hold for the same value"):
        checked_schema({"allOf": [part, {"anyOf": [part, {}]}, part]}, "s")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "f: holds a oneOf whose schemas do not exclude each other"),
        ({"minItems": 3, "maxItems": 1, "type": "array"}, "f: no value is of this schema"),
        ({"$ref": "#"}, "f: holds a $ref that leads to itself and nothing else"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "f: holds a $ref that leads to",
        ),
        (
            {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
            "f: holds minProperties or maxProperties beside optional",
        ),
        ({"patternProperties": {"^a": {"const": 1}, "^aa": {"const": 2}}}, "f: holds two patternProperties"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_our_words(schema: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        json_mask(schema)
    assert str(caught.value).startswith(said) and caught.value.param == "f"


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "f.pattern", " at character 1: look-around, which is not supported"),
        (
            {"anyOf": [{"type": "null"}, {"type": "string", "pattern": r"\bfoo\b"}]},
            "f.anyOf[1].pattern",
            ": a word boundary, which is not supported",
        ),
        (
            {"oneOf": [{"type": "null"}, {"type": "string", "pattern": "a$b"}]},
            "f.oneOf[1].pattern",
            ": ^ or $ inside of the expression, which is not supported",
        ),
        (
            {"properties": {"a": {"pattern": "(?!a[^b])"}, "b": {"pattern": "a"}}},
            "f.properties.a.pattern",
            " at character 1: look-around",
        ),
        (
            {"properties": {"a": {"pattern": "a(b"}, "b": {"pattern": r"a\(b"}}},
            "f.properties.a.pattern",
            " at character 2: a group",
        ),
        (
            {"properties": {"a": {"pattern": r"a\(b"}, "b": {"pattern": "a(b"}}},
            "f.properties.b.pattern",
            " at character 2: a group",
        ),
        ({"items": {"patternProperties": {"^(?!x)": {}}}}, "f.items.patternProperties.^(?!x)", " at character 2: look"),
        ({"type": "string", "pattern": "a["}, "f.pattern", " at character 2: a class that is not closed"),
        ({"type": "string", "pattern": "[^a]/\n[b-a]"}, "f.pattern", " at character 8: a range whose first"),
        ({"properties": {"pattern": {"pattern": "[a]x("}}}, "f.properties.pattern.pattern", " at character 5: a group"),
        ({"type": "string", "pattern": "ab\\"}, "f.pattern", " at character 3: an escape that ends too soon"),
        (
            {"patternProperties": {"b\\": {}}},
            "f.patternProperties.b\\",
            " at character 2: an escape that ends too soon",
        ),
    ],
)
def test_a_pattern_that_is_not_supported_is_refused_by_its_place(schema: Any, place: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        json_mask(schema)
    assert str(caught.value).startswith(f"{place}: cannot be compiled as a regular expression{said}")
    assert caught.value.param == place


def test_patterns_alike_are_tried_up_to_a_bound() -> None:
    """`-` may be escaped or not: there are a thousand ways to write ten of them, and one that is at fault behind them."""
    alike = ["".join(signs) + "(" for signs in product(["-", r"\-"], repeat=10)]
    schema = {"anyOf": [{"pattern": "-" * 10 + "("}, *({"pattern": f"{text[:-1]}\\("} for text in alike)]}
    begun = thread_time()
    with pytest.raises(RequestError) as caught:
        json_mask(schema)
    assert str(caught.value) == "f: a pattern has a group that is not closed; correct it"
    assert thread_time() - begun < 1
