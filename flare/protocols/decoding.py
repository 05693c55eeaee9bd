"""Request bodies: bytes to a declared struct, and what is wrong with them in one line that names the field or the place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from flare.errors import RequestError
from flare.protocols.hints import fields_at, misdirected, near_field
from flare.protocols.refusals import required, shown, shown_number, unknown_field

T = TypeVar("T")

KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}

COMPLAINTS: Mapping[str, str] = {
    "invalid character": "an unexpected character",
    "trailing characters": "something behind its end",
    "trailing comma in array": "a comma before the end of an array",
    "trailing comma in object": "a comma before the end of an object",
    "expected ',' or ']'": "neither a comma nor the end of an array",
    "expected ',' or '}'": "neither a comma nor the end of an object",
    "expected ':'": "no colon behind a name",
    "object keys must be strings": "a name that is no string",
    "invalid number": "a number that is none",
    "invalid escape character in string": "an unknown escape in a string",
    "invalid escaped character": "an unknown escape in a string",
    "invalid character in unicode escape": "an unknown escape in a string",
    "unexpected end of hex escape": "an unknown escape in a string",
    "invalid utf-16 surrogate pair": "half of a surrogate pair in a string",
    "unexpected end of escaped utf-16 surrogate pair": "half of a surrogate pair in a string",
    "expected '\"'": "a name that is no string",
}
"""What msgspec finds wrong with JSON, in our words."""

BOM = b"\xef\xbb\xbf"

WHOLE_CHARACTERS = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])|\\u[dD][89abAB]..\\u[dD][c-fC-F])*+",
    re.DOTALL,
)
"""JSON up to an escaped half of a surrogate pair whose other half does not follow. Possessive: it never goes back."""

MAX_PATH = 200
"""Characters of a path that is looked for."""

STEPS = re.compile(r"([^.\[\]]+)|\[([0-9]{1,9})\]")
"""The steps of a path such as "messages[0].content": names and indices."""


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decodes a JSON body. Of a name that occurs twice the last value counts.

    Raises RequestError for anything that is not strict JSON (NaN, lone surrogates, invalid UTF-8, too deep nesting), with its
    place, and for missing, unknown or mistyped fields, with `param` set to the field's path.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as complaint:
        error = invalid_field(str(complaint), decoder.type, body)
        of_body = str(complaint).startswith("Object ") and " - at `$" not in str(complaint)
        raise (misdirected(decoder.type, body) if of_body else None) or error from None
    except RecursionError:
        raise RequestError("the body nests arrays or objects too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as complaint:
        raise _malformed(str(complaint), body) from None


def _malformed(complaint: str, body: bytes | bytearray) -> RequestError:
    """The refusal of what is not JSON in UTF-8, with the place where that shows."""
    if not body.strip():
        return RequestError("the body is empty; a JSON object is expected")
    if body.startswith(BOM):
        return RequestError("the body begins with a byte order mark, which JSON has not; leave it out")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return RequestError(f"the body is not UTF-8 {_place(body, error.start)}; send JSON in UTF-8")
    text, _, at = complaint.rpartition(" (byte ")
    found = COMPLAINTS.get(text.removeprefix("JSON is malformed: "), "something unexpected")
    place = int(at.removesuffix(")")) if text else len(body)
    if not text:
        found = "it ends before it is complete,"
        whole = WHOLE_CHARACTERS.match(body)
        if whole is not None and body.startswith(b"\\u", whole.end()):
            found, place = COMPLAINTS["invalid utf-16 surrogate pair"], whole.end()
    elif re.match(rb"-?(?:NaN|Infinity)", body[max(0, place - 1) : place + 10].lstrip(b"-: ,[")):
        found = "NaN or Infinity, which JSON has not,"
    return RequestError(f"the body is not valid JSON: {found} {_place(body, place)}")


def _place(body: bytes | bytearray, at: int) -> str:
    """Says where byte `at` is: its line and column, which count from 1, and its offset."""
    begin = body.rfind(b"\n", 0, at) + 1
    column = len(body[begin:at].decode(errors="replace")) + 1
    line = body.count(b"\n", 0, at) + 1
    return f"near line {line}, column {column} (byte {at})"


def invalid_field(complaint: str, kind: type, sent: Any) -> RequestError:
    """Returns the refusal for a validation complaint of msgspec about a value of type `kind`, in our words.

    `sent` is the value, or its JSON in bytes.
    """
    text, _, path = complaint.rpartition(" - at `$")
    if not text:
        text, path = complaint, ""
    within = path.removesuffix("`").removeprefix(".")
    if "[...]" in within and isinstance(sent, bytes | bytearray):
        within = _place_of_number(sent) or within
    if text.startswith(("Object contains unknown field `", "Object missing required field `")):
        name = text.split("`", 1)[1].removesuffix("`")
        param = f"{within}.{shown(name)}" if within else shown(name)
        if text.startswith("Object missing"):
            return required(param)
        return unknown_field(param, near_field(name, fields_at(kind, within)))
    where = f"{within}: " if within else "the body: "
    return RequestError(where + _wanted(text, _number_at(sent, within)), param=within or None)


class _TooLarge:
    """Stands for a number that is out of range."""


def _place_of_number(body: bytes | bytearray) -> str:
    """Returns the path of the first number out of range in a body, since msgspec tells no names of open objects; empty without
    one, and for a path too long to be told."""

    def number(text: str) -> type[_TooLarge] | None:
        try:
            msgspec.json.decode(text)
        except msgspec.MsgspecError:
            return _TooLarge
        return None

    try:
        waiting: list[tuple[str, Any]] = [("", json.loads(body, parse_int=number, parse_float=number))]
    except (ValueError, RecursionError):
        return ""
    while waiting:
        path, value = waiting.pop()
        if value is _TooLarge:
            return path if len(path) <= MAX_PATH else ""
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in reversed(list(enumerate(value)))]
        elif isinstance(value, dict):
            names = reversed(value.items())
            waiting += [(f"{path}.{shown(name)}" if path else shown(name), item) for name, item in names]
    return ""


def _number_at(sent: Any, path: str) -> str:
    """Returns the number at a path of what was sent, for the message; empty where there is none."""
    try:
        value = msgspec.json.decode(sent) if isinstance(sent, bytes | bytearray) else sent
        for name, index in STEPS.findall(path):
            value = value[name] if name else value[int(index)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    return shown_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _wanted(text: str, number: str) -> str:
    """Says what a field should hold, from "Expected `A | B`, got `C`" and "Expected `A` >= 1" and the like; `number` is
    what it holds, if that is one."""
    quoted = text.split("`")
    if not text.startswith("Expected `") or len(quoted) < 3:
        return "the number is out of range" if "out of range" in text else "the value is not one of those allowed"
    wanted = " or ".join(KINDS.get(kind, kind) for kind in quoted[1].split(" | ") if kind != "null")
    if len(quoted) >= 4:
        return f"expected {wanted}, got {KINDS.get(quoted[3], 'something else')}" + (f", {number}" if number else "")
    return f"expected {wanted}{quoted[2]}" + (f", got {number}" if number else "")
