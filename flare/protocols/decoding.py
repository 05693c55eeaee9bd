"""Request bodies: bytes to a declared struct, and what is wrong with them in one line that names the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from flare.errors import RequestError
from flare.protocols.refusals import required, shown, unknown_field

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


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decodes a JSON body. Of a name that occurs twice the last value counts.

    Raises RequestError for anything that is not strict JSON (NaN, lone surrogates, invalid UTF-8, too deep nesting) and
    for missing, unknown or mistyped fields, with `param` set to the field's path.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from None
    except RecursionError:
        raise RequestError("the body nests arrays or objects too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        if not body.strip():
            raise RequestError("the body is empty; a JSON object is expected") from None
        raise RequestError(
            "the body is not valid JSON in UTF-8 (NaN, Infinity and lone surrogates are not JSON)"
        ) from None


def invalid_field(complaint: str) -> RequestError:
    """Returns the refusal for a validation complaint of msgspec, in our words."""
    text, _, path = complaint.rpartition(" - at `$")
    if not text:
        text, path = complaint, ""
    param = path.removesuffix("`").removeprefix(".")
    if text.startswith(("Object contains unknown field `", "Object missing required field `")):
        name = shown(text.split("`", 1)[1].removesuffix("`"))
        param = f"{param}.{name}" if param else name
        if text.startswith("Object missing"):
            return required(param)
        return unknown_field(param)
    where = f"{param}: " if param else "the body: "
    return RequestError(where + _wanted(text), param=param or None)


def _wanted(text: str) -> str:
    """Says what a field should hold, from "Expected `A | B`, got `C`" and "Expected `A` >= 1" and the like."""
    quoted = text.split("`")
    if not text.startswith("Expected `") or len(quoted) < 3:
        return "the number is out of range" if "out of range" in text else "the value is not one of those allowed"
    wanted = " or ".join(KINDS.get(kind, kind) for kind in quoted[1].split(" | ") if kind != "null")
    if len(quoted) >= 4:
        return f"expected {wanted}, got {KINDS.get(quoted[3], 'something else')}"
    return f"expected {wanted}{quoted[2]}"
