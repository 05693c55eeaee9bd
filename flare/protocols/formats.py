"""What a request demands of the form of its answer, on every endpoint: JSON, JSON of a schema, or a text of a grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flare.constraints.json_schema import checked_schema
from flare.conversation import Constraint
from flare.errors import RequestError
from flare.grammar import MAX_DEFINITION
from flare.protocols.refusals import foreign_type, misplaced, required, unsupported

MAX_CHOICES = 1000
"""Texts of `structured_outputs.choice`."""

TYPES = ("text", "json_object", "json_schema")


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`json_schema` of a format. `name`, `description` and `strict` have no effect: every schema is enforced."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: Any = None


class Format(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format` of Chat Completions and Completions."""

    type: str
    json_schema: JsonSchema | None = None


class FlatFormat(JsonSchema, kw_only=True):
    """`text.format` of Responses, and `output_config.format` of Messages: the schema's members beside the type."""

    type: str


class OutputForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's field: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    whitespace_pattern: Any = None
    structural_tag: Any = None


_KINDS = ("json", "json_object", "regex", "choice", "grammar")

UNBUILT_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""vLLM's options of `structured_outputs` without a part here: null and these values pass."""


class FormatFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of the request itself that bound an answer; `response_format` is of Chat Completions and Completions."""

    grammar: str | None = None
    structured_outputs: OutputForm | None = None


def asked_constraint(fields: Any, format: Format | FlatFormat | None, field: str, **others: Any) -> Constraint | None:
    """Returns what a request demands of its answer. `fields` are its FormatFields, `format` its field `field`, and `others`
    fields that cannot stand beside a constraint.

    Raises RequestError naming the place of what cannot be kept, and both fields of two that exclude each other.
    """
    found = {
        field: _format(format, field),
        "structured_outputs": _structured_outputs(fields.structured_outputs),
        "grammar": _grammar(fields.grammar, "grammar"),
    }
    held = [(name, constraint) for name, constraint in found.items() if constraint is not None]
    if not held:
        return None
    (name, constraint), *more = held
    excluded = [other for other, _ in more] + [other for other, value in others.items() if value]
    for other in excluded:
        text = f"{other}: cannot be combined with {name}, which bounds the answer; send one of them"
        raise RequestError(text, param=other)
    return constraint


def _format(format: Format | FlatFormat | None, field: str) -> Constraint | None:
    if format is None:
        return None
    if isinstance(format, FlatFormat):
        return _of_type(format.type, format, field, f"{field}.schema")
    if format.type != "json_schema" and format.json_schema is not None:
        raise misplaced(f"{field}.json_schema", "the type json_schema")
    return _of_type(format.type, format.json_schema or JsonSchema(), field, f"{field}.json_schema.schema")


def _of_type(type: str, format: JsonSchema, field: str, place: str) -> Constraint | None:
    if type == "text":
        return None
    if type == "json_object":
        return Constraint("json_object", None, field, instruct=True)
    if type != "json_schema":
        raise foreign_type(f"{field}.type", type, "formats", TYPES)
    if format.schema is None:
        raise required(place)
    return _schema(format.schema, place)


def _schema(schema: Any, place: str) -> Constraint:
    """A constraint whose definition is the schema as it was sent; what of it cannot be kept is refused here."""
    return Constraint("json_schema", schema, place, instruct=True, enforced=checked_schema(schema, place))


def _grammar(text: str | None, field: str) -> Constraint | None:
    if text is None:
        return None
    if not text.strip():
        raise RequestError(f"{field}: an empty grammar; send its text or leave it out", param=field)
    return Constraint("lark", text, field)


def _structured_outputs(asked: OutputForm | None) -> Constraint | None:
    if asked is None:
        return None
    field = "structured_outputs"
    given = {name: getattr(asked, name) for name in _KINDS}
    kinds = [name for name, value in given.items() if value is not None and (name != "json_object" or value)]
    for name, neutral in UNBUILT_OPTIONS.items():
        value = getattr(asked, name)
        if not any(value is passed for passed in (None, *neutral)):
            raise unsupported(f"{field}.{name}")
    if len(kinds) != 1:
        text = f"{field}: holds {' and '.join(kinds) or 'none'} of {', '.join(_KINDS)}; send exactly one"
        raise RequestError(text, param=field)
    place = f"{field}.{kinds[0]}"
    if asked.json is not None:
        return _schema(asked.json, place)
    if asked.json_object:
        return Constraint("json_object", None, place, instruct=True)
    if asked.choice is not None:
        return Constraint("regex", _choices(asked.choice, place), place)
    if asked.grammar is not None:
        return _grammar(asked.grammar, place)
    if not asked.regex:
        raise RequestError(f"{place}: an empty expression; send one or leave it out", param=place)
    return Constraint("regex", asked.regex, place)


def _choices(texts: list[str], place: str) -> str:
    """Returns the regular expression of some texts."""
    if not 1 <= len(texts) <= MAX_CHOICES or "" in texts:
        text = f"{place}: {len(texts)} texts, send 1 to {MAX_CHOICES}, none of them empty"
        raise RequestError(text, param=place)
    expression = "|".join("".join(_literal(text)) for text in texts)
    size = len(expression.encode())
    if size > MAX_DEFINITION:
        text = f"{place}: the expression of these texts has {size} bytes of UTF-8, the limit is {MAX_DEFINITION}"
        raise RequestError(f"{text}; send fewer or shorter texts", param=place)
    return expression


def _literal(text: str) -> Iterator[str]:
    for char in text:
        yield char if char.isalnum() or char.isspace() or ord(char) > 127 else f"\\x{ord(char):02x}"
