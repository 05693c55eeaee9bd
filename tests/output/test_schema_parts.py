"""What a schema says of members and items, through references and combinations."""

from __future__ import annotations

from typing import Any

from flare.output.schema_parts import MAX_PARTS, alternatives, item_schema, kinds, member_schema

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}


def test_references_and_combinations_are_taken_apart() -> None:
    root: dict[str, Any] = {
        "$defs": {"a/b": {"properties": {"x": NUMBER}}, "c": {"$ref": "#/$defs/a~1b"}},
        "anyOf": [{"type": "null"}, {"oneOf": [{"$ref": "#/$defs/c"}, {"type": "array", "items": TEXT}]}],
        "allOf": [{"properties": {"y": TEXT}, "additionalProperties": False}, True, 5, {"$ref": 5}],
    }
    parts = alternatives(root, root)
    assert kinds(parts) == {"null", "array", "object"}
    assert member_schema(parts, "x") is NUMBER and member_schema(parts, "y") is TEXT
    assert member_schema(parts, "z") is None
    assert item_schema(parts, 3) is TEXT


def test_the_first_that_speaks_of_a_part_counts() -> None:
    parts = alternatives({"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"a": NUMBER}}]}, None)
    assert member_schema(parts, "a") is TEXT
    parts = alternatives({"additionalProperties": NUMBER, "prefixItems": [TEXT], "items": NUMBER}, None)
    assert member_schema(parts, "a") is NUMBER
    assert item_schema(parts, 0) is TEXT and item_schema(parts, 1) is NUMBER


def test_what_says_nothing_is_left_out() -> None:
    for schema in (None, True, False, "a", [], {}):
        parts = alternatives(schema, None)
        assert kinds(parts) == frozenset()
        assert member_schema(parts, "a") is None and item_schema(parts, 0) is None
    for reference in ("#/$defs/none", "other.json", "#anchor", "#/type/0", 1):
        assert alternatives({"$ref": reference}, {"type": "object"})[1:] == []


def test_the_work_is_bounded() -> None:
    circle: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert len(alternatives(circle, circle)) == 3
    assert len(alternatives({"$ref": "#"}, {"anyOf": [{"$ref": "#"}]})) == 3
    wide = {"anyOf": [{"type": "object"} for _ in range(10 * MAX_PARTS)]}
    assert len(alternatives(wide, None)) <= MAX_PARTS
    deep: dict[str, Any] = {"type": "array"}
    for _ in range(10 * MAX_PARTS):
        deep = {"anyOf": [deep]}
    assert kinds(alternatives(deep, None)) == frozenset()
