"""What an unknown field may have been meant as, and where a body belongs that came to the wrong route."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from flare.errors import RequestError

HOMES: Mapping[str, Sequence[str]] = {
    "messages": ("/v1/chat/completions", "/v1/messages"),
    "prompt": ("/v1/completions",),
    "input": ("/v1/responses",),
}
"""The field that holds the prompt, and the routes whose bodies have it."""

SAME = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("stop", "stop_sequences"),
    ("repetition_penalty", "repeat_penalty"),
)
"""Names of one thing in several protocols, the more usual first."""

LONGEST = 64
"""Characters of a name that is compared with others: the comparison takes the product of their lengths."""

ALIKE = 0.8
"""How much of two names must be the same for one to be taken for a slip of the other; 1 is all of it."""


def near_field(name: str, known: Collection[str]) -> str:
    """Returns the hint to a field of `known` that may be meant, empty without one."""
    near = next((other for group in SAME if name in group for other in group if other in known), None)
    if near is None and len(name) <= LONGEST:
        near = next(iter(difflib.get_close_matches(name, sorted(known), 1, ALIKE)), None)
    return f"did you mean {near!r}?" if near else ""


def misdirected(kind: type, body: bytes | bytearray) -> RequestError | None:
    """Returns the refusal of a body that holds another route's prompt and none of its own; `kind` is its type."""
    own = fields_at(kind, "") & HOMES.keys() & set(_required(kind))
    try:
        sent = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not own or own & sent.keys():
        return None
    for name, routes in HOMES.items():
        if name in sent and bytes(sent[name])[:1] in (b"[", b'"'):
            text = (
                f"{name}: not the prompt of this route, which is {min(own)}; send such a body to {' or '.join(routes)}"
            )
            return RequestError(text, param=name, code="unknown_parameter")
    return None


def fields_at(kind: type, path: str) -> set[str]:
    """Returns the names of the fields that an object at `path` of a body may have: "messages[0].content[1]" and the like."""
    found = _structs(_described(kind))
    for step in re.sub(r"\[[^\]]*\]", "", path).split(".") if path else ():
        found = [
            inner
            for struct in found
            for field in struct.fields
            if field.encode_name == step
            for inner in _structs(field.type)
        ]
    return {field.encode_name for struct in found for field in struct.fields}


@cache
def _described(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _required(kind: type) -> Iterable[str]:
    return [field.encode_name for struct in _structs(_described(kind)) for field in struct.fields if field.required]


def _structs(described: Any) -> list[inspect.StructType]:
    """Returns the structs that a value may be or hold, arrays and unions looked through."""
    if isinstance(described, inspect.StructType):
        return [described]
    if isinstance(described, inspect.UnionType):
        return [struct for member in described.types for struct in _structs(member)]
    return _structs(described.item_type) if isinstance(described, inspect.ListType) else []
