"""What a schema says of types, members and items, through references and combinations, and how much work it may take."""

from __future__ import annotations

from typing import Any

import pytest

from flare.output.argument_types import convert
from flare.output.schemas import MAX_SCHEMAS, Schemas

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}


def test_references_and_combinations_are_taken_apart() -> None:
    root: dict[str, Any] = {
        "$defs": {"a/b": {"properties": {"x": NUMBER}}, "c": {"$ref": "#/$defs/a~1b"}},
        "anyOf": [{"type": "null"}, {"oneOf": [{"$ref": "#/$defs/c"}, {"type": "array", "items": TEXT}]}],
        "allOf": [{"properties": {"y": TEXT}, "additionalProperties": False}, True, 5, {"$ref": 5}],
    }
    schemas = Schemas(root)
    assert schemas.member(root, "x") is NUMBER and schemas.member(root, "y") is TEXT
    assert schemas.member(root, "z") is None and schemas.item(root, 3) is TEXT
    del root["allOf"]
    assert Schemas(root).types(root, "") == {"null", "array", "object"}


def test_all_that_speak_of_a_part_by_name_or_place_count() -> None:
    """As they do in `convert`: JSON of any of their types is taken."""
    root: Any = {"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"a": NUMBER}}], "additionalProperties": {}}
    schemas = Schemas(root)
    assert schemas.types(schemas.member(root, "a"), "1") == {"string", "integer"}
    assert schemas.member(root, "a") is schemas.member(root, "a")
    assert convert("1", schemas.member(root, "a"), schemas) == 1
    root = {"additionalProperties": NUMBER, "prefixItems": [TEXT], "items": NUMBER}
    schemas = Schemas(root)
    assert schemas.member(root, "a") is NUMBER
    assert [schemas.item(root, at) for at in (0, 1, 2, 10**9)] == [TEXT, NUMBER, NUMBER, NUMBER]


@pytest.mark.parametrize("schema", [None, True, False, "a", [], {}, {"properties": {"b": TEXT}}])
def test_what_says_nothing(schema: Any) -> None:
    schemas = Schemas(None)
    assert schemas.member(schema, "a") is None and schemas.item(schema, 0) is None
    assert schemas.types(schema, "1") == ({"object"} if isinstance(schema, dict) and schema else set())


def test_a_word_of_an_enum_is_kept_apart_from_other_texts() -> None:
    schema = {"enum": ["1", 2]}
    schemas = Schemas(None)
    for text, types in (("1", {"string"}), ("2", {"string", "integer"}), ("1", {"string"})):
        assert schemas.types(schema, text) == types
    assert convert("2", schema, schemas) == 2 and convert("1", schema, schemas) == "1"


def test_a_schema_is_read_once_for_all_values_of_a_call() -> None:
    class Counted(dict[str, Any]):
        looked_at = 0

        def get(self, *key: Any) -> Any:
            Counted.looked_at += 1
            return super().get(*key)

    item = Counted({"anyOf": [Counted(NUMBER) for _ in range(MAX_SCHEMAS // 2)]})
    root = {"items": item, "properties": {"a": item}}
    schemas = Schemas(root)
    for at in range(1000):
        assert convert("7", schemas.item(root, at), schemas) == convert("7", schemas.member(root, "a"), schemas) == 7
    assert Counted.looked_at < 10 * MAX_SCHEMAS


def test_the_work_is_bounded() -> None:
    circle: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert Schemas(circle).types(circle, "") == set() and Schemas(circle).member(circle, "a") is None
    wide = {"anyOf": [{"type": "object"} for _ in range(10 * MAX_SCHEMAS)]}
    assert Schemas(wide).types(wide, "") == set()  # it takes too many to say
    deep: dict[str, Any] = {"type": "array"}
    for _ in range(MAX_SCHEMAS):
        deep = {"anyOf": [deep]}
    assert Schemas(deep).types(deep, "") == set() and Schemas(deep).item(deep, 0) is None
