"""Values written as text become what the schema says, as far as they can be read so; nothing fails."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.conversation import MAX_NESTING, Tool, Tools
from flare.output.argument_types import convert
from flare.output.schemas import MAX_SCHEMAS, Schemas

DEFINED: dict[str, Any] = {
    "$defs": {
        "Count": {"type": "integer"},
        "a/b~c d": {"type": "boolean"},
        "Tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Again": {"anyOf": [{"$ref": "#/$defs/Again"}, {"$ref": "#/$defs/Again"}, {"type": "integer"}]},
    },
    "definitions": {"Old": [{"type": "integer"}]},
    "properties": {"self": {"$ref": "#"}},
    "type": "object",
}


def written(value: Any) -> str:
    """What a client gets of a value."""
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "10", '"10"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, ' {"a": 1}\n', '" {\\"a\\": 1}\\n"'),
        ({"type": "string"}, "", '""'),
        ({"type": "integer"}, "7", "7"),
        ({"type": "integer"}, " -7\n", "-7"),
        ({"type": "integer"}, "123456789012345678901234567890", "123456789012345678901234567890"),
        ({"type": "integer"}, "+007", "7"),
        ({"type": "integer"}, "-00", "-0"),
        ({"type": "integer"}, "7.5", "7.5"),
        ({"type": "integer"}, "seven", '"seven"'),
        ({"type": "integer"}, "1_000", '"1_000"'),
        ({"type": "integer"}, "\u0667", '"\u0667"'),
        ({"type": "integer"}, "", '""'),
        ({"type": "integer"}, "null", "null"),
        ({"type": "number"}, "2.50", "2.50"),
        ({"type": "number"}, "3", "3"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "1", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": ["boolean", "integer"]}, "1", "1"),
        ({"type": "null"}, "None", "null"),
        ({"type": "array"}, '["a", 1.0]', '["a",1.0]'),
        ({"type": "array"}, "['a']", "\"['a']\""),
        ({"type": "array"}, '{"a": 1}', '{"a":1}'),
        ({"type": "object"}, '\n{"b": {"c": [true]}, "a": null}\n', '{"b":{"c":[true]},"a":null}'),
        ({"type": "object"}, '{"a": 1, "a": 2}', '"{\\"a\\": 1, \\"a\\": 2}"'),
        ({"type": "object"}, '{"a": 1} x', '"{\\"a\\": 1} x"'),
        ({"type": "object"}, '{"a": "\\ud800"}', '"{\\"a\\": \\"\\\\ud800\\"}"'),
        ({"type": "integer"}, '"5"', '"5"'),
        # Several types: JSON of one of them, else text.
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", '"None"'),
        ({"type": ["string", "null"]}, "NULL", '"NULL"'),
        ({"type": ["string", "integer"]}, "10", "10"),
        ({"type": ["string", "integer"]}, "010", '"010"'),
        ({"type": ["string", "integer"]}, "1.5", '"1.5"'),
        ({"type": ["string", "boolean"]}, "True", '"True"'),
        ({"type": ["string", "array"]}, '["a"]', '["a"]'),
        ({"type": ["string", "array"]}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": ["string", "null"]}, '"quoted"', '"\\"quoted\\""'),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", "7"),
        ({"oneOf": [{"type": "object"}, {"type": "string"}]}, '{"a":1}', '{"a":1}'),
        ({"anyOf": [{"properties": {}}, {"items": {}}]}, "[]", "[]"),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a":1}', '{"a":1}'),
        ({"type": ["string", "integer"], "anyOf": [{"type": "string"}, {"type": "null"}]}, "10", '"10"'),
        ({"allOf": [{"type": ["string", "number"]}, {"type": "integer"}]}, "10", "10"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "10", '"10"'),
        ({"allOf": [{"$ref": "#/$defs/Count"}, {"description": "d"}]}, "10", "10"),
        # Words that are listed.
        ({"type": "string", "enum": ["none", "nil", "yes"]}, "none", '"none"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["null", None]}, "null", '"null"'),
        ({"enum": ["a", None]}, "null", "null"),
        ({"enum": ["auto", 1]}, "1", "1"),
        ({"enum": ["auto", 1]}, "auto", '"auto"'),
        ({"type": "number", "enum": [1, 2]}, "2", "2"),
        ({"const": 3}, "3", "3"),
        ({"const": "3"}, "3", '"3"'),
        ({"const": None}, "null", "null"),
        ({"enum": []}, "1", '"1"'),
        # References.
        ({"$ref": "#/$defs/Count"}, "7", "7"),
        ({"$ref": "#/$defs/Count", "description": "d"}, "7", "7"),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "true", "true"),
        ({"$ref": "#/definitions/Old/0"}, "7", "7"),
        ({"$ref": "#/$defs/Tree"}, "[[null]]", "[[null]]"),
        ({"$ref": "#"}, '{"a":1}', '{"a":1}'),
        ({"$ref": "#/$defs/Loop"}, "7", '"7"'),
        ({"$ref": "#/$defs/Loop", "type": "integer"}, "7", "7"),
        ({"$ref": "#/$defs/Again"}, "7", '"7"'),
        ({"$ref": "#/$defs/None"}, "7", '"7"'),
        ({"$ref": "#/definitions/Old/9"}, "7", '"7"'),
        ({"$ref": "#Count"}, "7", '"7"'),
        ({"$ref": "https://example.com/schema"}, "7", '"7"'),
        # No type at all, and what is no schema.
        (None, "7", '"7"'),
        (True, "[7]", '"[7]"'),
        ({}, "7", '"7"'),
        ({"description": "anything"}, '{"a":1}', '"{\\"a\\":1}"'),
        ({"anyOf": [{}, {"type": "integer"}]}, "7", '"7"'),
        ({"minimum": 1}, "7", "7"),
        ({"type": "INTEGER"}, "7", "7"),
        ({"type": "int"}, "7", "7"),
        ({"type": "dict"}, "{}", "{}"),
        ({"type": "date"}, "7", '"7"'),
        ({"type": 5, "enum": {}, "anyOf": "x", "allOf": [3], "$ref": []}, "7", '"7"'),
    ],
)
def test_values_by_their_schema(schema: Any, text: str, value: str) -> None:
    assert written(convert(text, schema, Schemas(DEFINED))) == value


def test_the_depth_of_values() -> None:
    """The arguments around them are a level of their own."""
    for levels, converted in ((MAX_NESTING - 1, True), (MAX_NESTING, False), (200_000, False)):
        text = "[" * levels + "]" * levels
        assert (convert(text, {"type": "array"}, Schemas(None)) != text) is converted


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    str: "string",
}


@given(VALUES, st.lists(st.sampled_from(sorted(NAMES.values())), max_size=3), st.booleans())
def test_values_come_back_as_templates_write_them(value: Any, more: list[str], combined: bool) -> None:
    """Templates write strings as they are and all else as JSON. A string comes back where no other type may be meant."""
    own = NAMES[type(value)]
    if own == "string":
        assert convert(value, {"type": own}, Schemas(None)) == value
        return
    types = sorted({own, *more})
    schema = {"anyOf": [{"type": kind} for kind in types]} if combined else {"type": types}
    assert json.loads(written(convert(json.dumps(value), schema, Schemas(None)))) == value


SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.sampled_from(["integer", "string", "#", "#/a", "7", "x"]) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "a", "nullable"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(SCHEMAS, SCHEMAS, st.sampled_from(["7", "null", "[1]", '{"a":1}', "x", "", "true"]) | st.text(max_size=5))
def test_no_schema_makes_it_fail(schema: Any, root: Any, text: str) -> None:
    value = convert(text, schema, Schemas(root))
    Schemas(root).member(schema, "a")
    if not isinstance(value, str):
        assert json.loads(written(value)) == json.loads(text.strip().lower().lstrip("+") or "0")


def test_hostile_schemas_are_read_in_bounded_work() -> None:
    """Each level refers to the next one several times: unfolded they would be more than can be counted."""

    class Counted(dict[str, Any]):
        looked_at = 0

        def get(self, *key: Any) -> Any:
            Counted.looked_at += 1
            return super().get(*key)

    levels = 60
    root = Counted({str(i): Counted({"anyOf": [{"$ref": f"#/{i + 1}"}] * 5}) for i in range(levels)})
    root[str(levels)] = Counted({"type": "integer"})
    assert convert("7", {"$ref": "#/0"}, Schemas(root)) == "7"
    Schemas(root).member({"$ref": "#/0"}, "a")
    assert Counted.looked_at < 20 * MAX_SCHEMAS
    chain = {str(i): {"$ref": f"#/{i + 1}"} for i in range(100_000)}
    assert convert("7", {"$ref": "#/0"}, Schemas(chain)) == "7"


def test_members_are_found_wherever_the_schema_puts_them() -> None:
    root = {
        "$defs": {"base": {"properties": {"a": {"type": "integer"}}}},
        "properties": {"b": {"type": "boolean"}},
        "allOf": [
            {"$ref": "#/$defs/base"},
            {"anyOf": [{"properties": {"c": {"type": "null"}}}, {"properties": {"c": {}}}]},
        ],
        "additionalProperties": {"type": "array"},
    }
    assert Schemas(root).member(root, "a") == {"type": "integer"}
    assert Schemas(root).member(root, "b") == {"type": "boolean"}
    found = Schemas(root).member(root, "c")
    assert isinstance(found, dict) and len(found["anyOf"]) == 2
    assert Schemas(root).member(root, "d") == {"type": "array"}
    assert Schemas(None).member({"properties": {"a": True}}, "a") is True
    for none in (None, True, {}, {"properties": [], "additionalProperties": True}, {"$ref": "#/x"}):
        assert Schemas({}).member(none, "a") is None


def test_the_schema_of_a_tool_is_found_by_the_name_that_the_model_knows() -> None:
    tools = Tools(
        (Tool("f", parameters={"a": 1}), Tool("f", parameters={"b": 2}, namespace="n"), Tool("c", custom=True))
    )
    found = {name: Schemas.of_tool(tools, name).root for name in ("f", "n__f", "c", "g")}
    assert found == {"f": {"a": 1}, "n__f": {"b": 2}, "c": None, "g": None}
