"""Refusals that several endpoints have in common: one form of words for one thing."""

from __future__ import annotations

from collections.abc import Iterable

from flare.errors import RequestError

SHOWN_CHARACTERS = 100
"""The most that an error repeats of a name or value that a client sent."""


def shown(text: str) -> str:
    """Returns a client's text fit for a one-line message: printable and short."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:SHOWN_CHARACTERS])
    return clean if len(text) <= SHOWN_CHARACTERS else clean + "..."


def shown_number(value: float) -> str:
    """Returns a client's number as an error repeats it."""
    return "a huge number" if isinstance(value, int) and value.bit_length() > 128 else repr(value)


def required(param: str) -> RequestError:
    return RequestError(f"{param}: this field is required", param=param)


def unknown_field(param: str, hint: str = "") -> RequestError:
    """`hint` says what may have been meant."""
    return RequestError(f"{param}: unknown field; {hint or 'leave it out'}", param=param, code="unknown_parameter")


def unsupported(param: str) -> RequestError:
    return RequestError(
        f"{param}: not supported by this server; leave it out", param=param, code="unsupported_parameter"
    )


def not_one_of(param: str, value: object, known: Iterable[str], hint: str = "") -> RequestError:
    text = f"{param}: {shown(str(value))!r} is not one of {', '.join(known)}{hint}"
    return RequestError(text, param=param)


def foreign_type(param: str, value: object, what: str, known: Iterable[str]) -> RequestError:
    """The refusal of an object by its type; `what` such objects are called, `known` are the types that are served."""
    text = f"{param}: {shown(str(value))!r} {what} are not supported here; send {_listed(known)}"
    return RequestError(text, param=param, code="unsupported_parameter")


def misplaced(param: str, place: str) -> RequestError:
    """The refusal of a field or block that only `place` has."""
    return RequestError(f"{param}: only {place} has it; leave it out", param=param)


def no_template(param: str) -> RequestError:
    text = f"{param}: this core has no chat template; send the rendered text to /v1/completions"
    return RequestError(text, param=param)


def no_tools(param: str) -> RequestError:
    """The refusal of what only a model with a syntax for calls takes."""
    return RequestError(f"{param}: this model takes no tools; leave it out", param=param, code="unsupported_parameter")


def _listed(known: Iterable[str]) -> str:
    *most, last = known
    return f"{', '.join(most)} or {last}" if most else last
