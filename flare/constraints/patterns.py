"""Patterns of JSON Schemas, as llguidance takes them without letting more through."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(?:[pP](?:\{[^}]*+\}|.)|[xuU]\{[^}]*+\}|x..|u.{4}|U.{8}|.)", re.DOTALL)
_NUL = re.compile(r"\\(?:x00|u0{4}|U0{8}|[xuU]\{0+\})")
_PLAIN_CLASS = re.compile(r"\[[^^\\\[\]\x00][^\\\[\]\x00]*+\]")


def without_nul(pattern: str) -> str:
    """Returns the pattern without U+0000 in its classes.

    A class that holds every control character takes `\\"` and the other escapes of a JSON string for some of them, though it
    may exclude the quote. Of classes in Rust's syntax, within each other too.
    """
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        if (found := _ESCAPE.match(pattern, at)) is not None:
            end, text = found.end(), found[0]
            if text[1] in "pP":
                text = f"[{text}&&[^\\x00]]"
            elif _NUL.fullmatch(text):
                text = "[a&&b]"  # nothing is both
        elif (found := _PLAIN_CLASS.match(pattern, at)) is not None:
            end, text = found.end(), found[0]
        elif pattern[at] == "[":
            end = _class_end(pattern, at)
            text = f"[{pattern[at:end]}&&[^\\x00]]"
        else:
            end, text = at + 1, "[a&&b]" if pattern[at] == "\0" else pattern[at]
        parts.append(text)
        at = end
    return "".join(parts)


def _class_end(pattern: str, at: int) -> int:
    """Returns where a class that begins here ends: classes nest, and a bracket right at the beginning is a character."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)
        elif char == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(pattern)
