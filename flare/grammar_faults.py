"""Why llguidance could not compile a grammar, and where: told in our words, since its own are not passed on.

It quotes an expression on one line, marks the fault by carets on the next, and names it on a third, behind `error: `.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NAMES = {"lark": "a Lark grammar", "regex": "a regular expression"}

MAX_QUOTED = 60
"""Characters of an expression of a Lark grammar that is repeated in an error."""

CORRECT, LEAVE_OUT = "correct it", "leave it out"

_BEGINS = "regex parse error:\n"
_FAULT = re.compile(r" {4}(.*)\n {4}( *\^[ ^]*)\n")
_LOOKS = re.compile(r"lookarounds not supported yet; (\w+) in regex /(.*)/")
_PLACE = re.compile(r"(?:at )?([0-9]{1,9})\(([0-9]{1,9})\): ?")

_REGEX_FAULTS = (
    ("unclosed character class", "a class that is not closed", CORRECT),
    ("unclosed group", "a group that is not closed", CORRECT),
    ("unopened group", "a closing parenthesis of no group", CORRECT),
    ("unclosed counted repetition", "a counted repetition that is not closed", CORRECT),
    ("repetition operator missing", "a repetition of nothing", CORRECT),
    ("repetition quantifier expects", "a counted repetition without a number", CORRECT),
    ("invalid repetition count range", "a counted repetition whose least number is over its most", CORRECT),
    ("hexadecimal", "an escape by a number that is no character's", CORRECT),
    ("decimal literal", "a number that is missing or too large", CORRECT),
    ("incomplete escape", "an escape that ends too soon", CORRECT),
    ("invalid escape sequence found", "an escape that a class cannot hold", CORRECT),
    ("unrecognized escape", "an escape that Rust's syntax does not have", CORRECT),
    ("invalid character class range", "a range whose first character comes behind its last", CORRECT),
    ("invalid range boundary", "a range that does not end with a single character", CORRECT),
    ("flag", "flags that cannot stand there", CORRECT),
    ("capture group", "a group's name that is empty, not closed, taken or no name", CORRECT),
    ("special word boundary", "a word boundary, which is not supported", LEAVE_OUT),
    ("Unicode property", "a class of Unicode that is not known", CORRECT),
    ("maximum number of nested", "parentheses or brackets within more than 250 others", "flatten it"),
    ("backreferences", "a reference to a group, which is not supported", LEAVE_OUT),
    ("look-around", "look-around, which is not supported", LEAVE_OUT),
    ("invalid UTF-8", "bytes that are no UTF-8", LEAVE_OUT),
)
"""What the library calls the faults of an expression, what they are here, and the remedy."""

_LARK_FAULTS = (
    ("unknown name", "a name that nothing has"),
    ("duplicate", "a name that two rules have"),
    ("circular reference", "a terminal that leads to itself"),
    ("no start rule", "no rule called start"),
    ("Empty grammar", "no rule called start"),
    ("Unknown common regex", "an import of what is not in common"),
    ("unknown special token", "a special token that the model does not have"),
    ("range end must be", "a repetition whose least number is over its most"),
    ("& is only supported", "an intersection (&) outside of terminals, whose names are in capitals"),
    ("lexer error", "a text or a sign that Lark does not have"),
    ("error parsing string", "a text that is no string of JSON"),
    ("xpect", "a fault of syntax"),
)
"""The same for Lark grammars. The library expects something else where the syntax is wrong."""


class Fault(NamedTuple):
    """What is wrong with an expression. `expression` is how the library quotes it, `at` the index of the fault there, None
    where that is not told."""

    what: str
    remedy: str
    expression: str
    at: int | None


def regex_fault(error: str) -> Fault | None:
    """Returns what the library says of an expression in `error`, None where it says something else."""
    if looks := _LOOKS.search(error):
        kind = "a word boundary" if looks[1].startswith("Word") else "^ or $ inside of the expression"
        return Fault(f"{kind}, which is not supported", LEAVE_OUT, looks[2], None)
    _, begins, rest = error.partition(_BEGINS)
    if not begins:
        return None
    marked = _FAULT.match(rest)
    said = next((line for line in rest[marked.end() if marked else 0 :].split("\n") if line.startswith("error: ")), "")
    known = ((what, remedy) for words, what, remedy in _REGEX_FAULTS if words in said)
    what, remedy = next(known, ("what Rust's syntax does not have", CORRECT))
    if marked is None:
        return Fault(what, remedy, "", None)
    # Of two marks the first one is where a name or flag, which now comes again, stood first.
    carets = marked[2]
    return Fault(what, remedy, marked[1], carets.rfind(" ", 0, carets.rindex("^")) + 1)


def uncompiled(syntax: str, definition: str, error: str) -> str:
    """Returns what an error says of a definition ("lark" or "regex") that the library could not compile for this reason: that,
    the fault and its place where they are known, and the remedy. Places count from 1."""
    begins = f"cannot be compiled as {NAMES[syntax]}"
    fault = regex_fault(error)
    if syntax == "regex":
        if fault is None:
            return f"{begins}; correct it or make it smaller"
        place = "" if fault.at is None else f" at character {_origin(definition, fault) + 1}"
        return f"{begins}{place}: {fault.what}; {fault.remedy}"
    found = _PLACE.match(error)
    if found:
        begins += f" at line {found[1]}, column {found[2]}"
        error = error[found.end() :]
    if fault is not None:
        place = "in" if fault.at is None else f"at character {fault.at + 1} of"
        quoted = f"the expression {fault.expression!r}" if 0 < len(fault.expression) <= MAX_QUOTED else "an expression"
        return f"{begins}, {place} {quoted}: {fault.what}; {fault.remedy}"
    said = error.partition("\n")[0]
    what = next((what for words, what in _LARK_FAULTS if words in said), None)
    return f"{begins}; correct it or make it smaller" if what is None else f"{begins}: {what}; {CORRECT}"


def _origin(expression: str, fault: Fault) -> int:
    """Returns the index of a fault in an expression as it was sent: the library quotes it with its slashes and control
    characters escaped."""
    assert fault.at is not None
    origin = at = 0
    while at < min(fault.at, len(fault.expression)) and origin < len(expression):
        escaped = fault.expression[at] == "\\" != expression[origin]
        at += 2 if escaped else 1
        origin += 1
    return origin


def same_expression(quoted: str, expression: str) -> bool:
    """Whether an expression is the one that the library quotes."""
    return _bare(quoted) == _bare(expression)


def _bare(expression: str) -> str:
    """Returns an expression without what quoting changes."""
    return expression.translate(_UNQUOTED)


_UNQUOTED = str.maketrans({"\\": "", "\n": "n", "\r": "r", "\t": "t"})
