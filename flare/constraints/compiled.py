"""Constraints of requests, compiled within bounds for one model."""

from __future__ import annotations

from collections import OrderedDict
from ctypes import addressof, c_uint32
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from flare.constraints.json_schema import checked_schema
from flare.constraints.reply import CallTracker, ReplyMask
from flare.constraints.vocabulary import Vocabulary
from flare.errors import RequestError
from flare.grammar import MAX_DEFINITION, NAMES, check_lark, fault_place
from flare.output import Ways

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from flare.conversation import Constraint

WHITE_SPACE = r"[ \t\r\n]{1,32}"
"""What may stand between the tokens of JSON: a model that finds no end of white space would run to its limit."""

KEPT = 32
"""Compiled constraints that are kept: agents send the same one each time."""

MAX_STARTS = 256
"""Replies of one compiled constraint. They share what llguidance has worked out so far, which only ever grows."""

# A step may take 10 ms for the lexer and as much for the parser; an ambiguous Lark grammar takes the square of what is open.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_OPEN_ITEMS = {"json": 4000, "lark": 400}
"""Alternatives that may be open at once. An object has four for each member that may come next."""


class CompiledConstraint:
    """A constraint that replies can be started from, on any thread."""

    __slots__ = ("_matcher", "_starts", "vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._starts = 0
        self.vocabulary = vocabulary

    @property
    def spent(self) -> bool:
        """Whether as many replies have begun as share one compilation."""
        return self._starts >= MAX_STARTS

    def start(
        self, ways: Ways | None, *, opens_reasoning: bool = False, tracker: CallTracker | None = None
    ) -> ReplyMask:
        """Returns the mask of one reply; see `ReplyMask`."""
        self._starts += 1
        return ReplyMask(
            self._matcher.deep_copy(), self.vocabulary, ways, opens_reasoning=opens_reasoning, tracker=tracker
        )


class Constraints:
    """Compiles the constraints of one model's requests; thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[tuple[str, str], CompiledConstraint] = OrderedDict()
        self._lock = Lock()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Returns a constraint, compiled now or before. Raises RequestError naming its field where that takes too much or
        cannot be done."""
        if not self.vocabulary.stops:
            text = "this model has no token that ends a reply, so that no answer can be held to a form"
            raise RequestError(f"{constraint.field}: {text}", param=constraint.field, code="unsupported_parameter")
        key = _definition(constraint)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not found.spent:
                self._kept.move_to_end(key)
                return found
        matcher = self._compiled(*key, constraint)
        compiled = CompiledConstraint(matcher, self.vocabulary)
        with self._lock:
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compiled(self, kind: str, definition: str, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if kind == "json":
            options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
            grammar = LLMatcher.grammar_from_json_schema(definition, overrides=options)
        else:
            make = LLMatcher.grammar_from_lark if kind == "lark" else LLMatcher.grammar_from_regex
            grammar = make(definition)
        limits = LLParserLimits(**_LIMITS, max_items_in_row=_OPEN_ITEMS["json" if kind == "json" else "lark"])
        matcher = LLMatcher(self.vocabulary.native, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask takes the longest: here it delays nobody, and what it cannot be made for is refused.
            words = (c_uint32 * self.vocabulary.words)()
            matcher.unsafe_compute_mask_ptr(addressof(words), 4 * self.vocabulary.words)
        if matcher.is_error():
            raise _uncompilable(kind, matcher.get_error(), constraint)
        return matcher


def _definition(constraint: Constraint) -> tuple[str, str]:
    """Returns what is compiled: "json", "lark" or "regex", and its text. Raises RequestError for too long a text."""
    if constraint.kind in ("json_object", "json_schema"):
        schema = {"type": "object"}
        if constraint.kind == "json_schema":
            schema = checked_schema(constraint.definition, constraint.field)
        return "json", msgspec.json.encode(schema).decode()
    text = constraint.definition
    size = len(text.encode())
    if size > MAX_DEFINITION:
        message = f"{constraint.field}: {size} bytes of UTF-8, the limit is {MAX_DEFINITION}; send a smaller one"
        raise RequestError(message, param=constraint.field)
    if constraint.kind == "lark":
        check_lark(text, constraint.field)
    return constraint.kind, text


_SAID = (
    ("oneOf constraints are not supported", "a oneOf whose schemas do not exclude each other; send it as anyOf"),
    ("Unsatisfiable schema", "no value is of this schema; correct it"),
    ("are not disjoint", "two patternProperties that the same name may match; let each name match one"),
    (
        "regex parse error",
        "a pattern that is not a regular expression of the linear kind; leave out look-around and the like",
    ),
    (
        "lookarounds not supported",
        "a pattern with look-around or word boundaries, which are not supported; leave them out",
    ),
    ("'multipleOf'", "a multipleOf with too many digits; send a rounder number"),
)
"""What llguidance says of schemas, and what is said of it here: its own words are not passed on."""


def _uncompilable(kind: str, error: str, constraint: Constraint) -> RequestError:
    field = constraint.field
    if kind != "json":
        place = fault_place(error) if kind == "lark" else ""
        text = f"cannot be compiled as {NAMES[kind]}{place}; correct it or make it smaller"
    else:
        found = next((said for begins, said in _SAID if begins in error), None)
        text = f"holds {found}" if found and not found.startswith("no ") else found
        text = text or "cannot be compiled within bounds; send a simpler schema"
    return RequestError(f"{field}: {text}", param=field)
