"""Values of a JSON Schema, and values next to them, for property tests: the part of the language that our documents use."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Path = tuple[str | int, ...]

MAX_OPTIONAL = 4
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
WRONG: tuple[Any, ...] = (None, True, 7, -1.5, 1 << 70, "x", "", [], ["x"], [[1]], {}, {"x": 1}, [{}])


class Values:
    """Strategies of a document's schemas. `components` are its named ones."""

    def __init__(self, components: dict[str, Schema]) -> None:
        self._components = components
        self._made: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: Schema) -> st.SearchStrategy[Any]:
        """Returns a strategy of values that keep the schema."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._made:
                self._made[name] = st.deferred(lambda: self.of(self._components[name]))
            return self._made[name]
        if "allOf" in schema:
            return self.of(self._merged(schema["allOf"]))
        if "enum" in schema:
            return st.sampled_from(schema["enum"]).map(copy.deepcopy)
        if "anyOf" in schema:
            return st.one_of([self.of(member) for member in schema["anyOf"]])
        types = schema.get("type")
        if types is None:
            return ANYTHING
        return st.one_of([self._typed(kind, schema) for kind in ([types] if isinstance(types, str) else types)])

    def _merged(self, schemas: list[Schema]) -> Schema:
        merged: Schema = {}
        for schema in schemas:
            found = self._components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            properties = {**merged.get("properties", {}), **found.get("properties", {})}
            required = sorted({*merged.get("required", []), *found.get("required", [])})
            merged = {**merged, **found, "properties": properties, "required": required}
        return merged

    def _typed(self, kind: str, schema: Schema) -> st.SearchStrategy[Any]:
        low, high = schema.get("minimum"), schema.get("maximum")
        match kind:
            case "null":
                return st.none()
            case "boolean":
                return st.booleans()
            case "integer":
                return st.integers(low, high) | st.integers(max(low, 0) if low is not None else 0, 8)
            case "number":
                return st.floats(low, high, allow_nan=False, allow_infinity=False)
            case "string":
                return st.text(min_size=schema.get("minLength", 0), max_size=8)
            case "array":
                most = min(schema.get("maxItems", 3), 3)
                return st.lists(self.of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)
        return self._object(schema)

    def _object(self, schema: Schema) -> st.SearchStrategy[Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties:
            others = schema.get("additionalProperties")
            least, named = schema.get("minProperties", 0), schema.get("propertyNames", {}).get("minLength", 0)
            return st.dictionaries(
                st.text(min_size=named, max_size=4),
                self.of(others) if isinstance(others, dict) else ANYTHING,
                min_size=least,
                max_size=2,
            )
        optional = [name for name in properties if name not in required]

        @st.composite
        def drawn(draw: st.DrawFn) -> dict[str, Any]:
            chosen = draw(st.lists(st.sampled_from(optional), max_size=MAX_OPTIONAL, unique=True)) if optional else []
            return {name: draw(self.of(properties[name])) for name in (*required, *chosen)}

        return drawn()


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all values inside a value, its own first."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


@st.composite
def spoiled(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """A copy of an object with one thing in it changed: another value, a member too many, or one too few."""
    changed = copy.deepcopy(value)
    path = draw(st.sampled_from(sorted(places(changed), key=str)))
    place = at(changed, path)
    if isinstance(place, dict) and (not path or draw(st.booleans())):
        if place and draw(st.booleans()):
            del place[draw(st.sampled_from(sorted(place)))]
        else:
            place[draw(st.sampled_from(["colour", "Model", "max-tokens"]))] = draw(st.sampled_from(WRONG))
    elif path:
        at(changed, path[:-1])[path[-1]] = copy.deepcopy(draw(st.sampled_from(WRONG)))
    return changed
