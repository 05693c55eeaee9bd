"""Constraints of requests, compiled within bounds for one model."""

from __future__ import annotations

from collections import OrderedDict
from ctypes import addressof, c_uint32
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from flare.constraints.json_schema import patterns
from flare.constraints.patterns import without_nul
from flare.constraints.reply import MAX_BREAKS, CallTracker, ReplyMask
from flare.constraints.vocabulary import Vocabulary
from flare.deep_stack import on_deep_stack
from flare.errors import RequestError
from flare.grammar import MAX_DEFINITION, check_lark, check_regex, regex_error
from flare.grammar_faults import regex_fault, same_expression, uncompiled
from flare.output import Ways

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from flare.conversation import Constraint

WHITE_SPACE = r"[ \t\r\n]{1,32}"
"""What may stand between the tokens of JSON: a model that finds no end of white space would run to its limit."""

TRIED = 50
"""Patterns of a schema, alike but for their backslashes, of which each is compiled to find the one at fault: 1 ms each."""

KEPT = 32
"""Constraints whose form is kept: agents send the same one each time."""

# A step may take about 10 ms for the lexer and as much for the parser. Most take less than 1 ms and some 100 items; an
# ambiguous grammar takes all of them, and 50,000 would be 280 ms with a vocabulary of 49,000 tokens.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_OPEN_ITEMS = {"json_object": 4000, "json_schema": 4000, "lark": 400, "regex": 400}
"""Alternatives that may be open at once. An object has four for each member that may come next."""


class CompiledConstraint:
    """A constraint compiled for one reply, whose `start` is called once.

    Each reply has its own lexer: what llguidance works out for a reply counts against its limits, in copies of it too.
    """

    __slots__ = ("_matcher", "breaks", "vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self.vocabulary = vocabulary
        self.breaks = any(matcher.validate_tokens([token]) for token in vocabulary.breaks)
        """Whether the answer may begin with line breaks."""

    def start(
        self, ways: Ways | None, *, opens_reasoning: bool = False, tracker: CallTracker | None = None
    ) -> ReplyMask:
        """Returns the mask of the reply; see `ReplyMask`."""
        return ReplyMask(
            self._matcher,
            self.vocabulary,
            ways,
            opens_reasoning=opens_reasoning,
            tracker=tracker,
            gap=0 if self.breaks else MAX_BREAKS,
        )


class Constraints:
    """Compiles the constraints of one model's requests; thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._lock = Lock()

    @property
    def possible(self) -> bool:
        """Whether answers can be held to a form: some token of the model ends them."""
        return bool(self.vocabulary.stops)

    def prepare(self) -> None:
        """Makes what every constraint needs; the first one does so too, and whoever comes meanwhile waits for the same."""
        _ = self.vocabulary.native

    def compile(self, constraint: Constraint, replies: int = 1) -> list[CompiledConstraint]:
        """Returns a constraint compiled for each of some replies, which takes 1 to 8 ms for most, 0.7 s at most. Raises
        RequestError naming its field where that takes too much or cannot be done."""
        if not self.possible:
            text = "this model has no token that ends a reply, so that no answer can be held to a form"
            raise RequestError(f"{constraint.field}: {text}", param=constraint.field, code="unsupported_parameter")
        grammar = self._grammar(constraint)
        matchers = on_deep_stack(lambda: [self._matcher(grammar, constraint) for _ in range(replies)])
        return [CompiledConstraint(matcher, self.vocabulary) for matcher in matchers]

    def _grammar(self, constraint: Constraint) -> str:
        """Returns llguidance's form of a constraint, made now or before."""
        key = constraint.kind, msgspec.json.encode(constraint.definition)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        grammar = on_deep_stack(lambda: _translated(constraint))
        with self._lock:
            self._kept[key] = grammar
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _matcher(self, grammar: str, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS, max_items_in_row=_OPEN_ITEMS[constraint.kind])
        matcher = LLMatcher(self.vocabulary.native, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask takes the longest: here it delays nobody, and what it cannot be made for is refused.
            words = (c_uint32 * self.vocabulary.words)()
            matcher.unsafe_compute_mask_ptr(addressof(words), 4 * self.vocabulary.words)
        if matcher.is_error():
            raise _uncompilable(matcher.get_error(), constraint)
        return matcher


def _translated(constraint: Constraint) -> str:
    """Returns llguidance's form of what is asked for. Raises RequestError for what cannot be kept, or is too long."""
    from llguidance import LLMatcher

    if constraint.kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if constraint.kind == "json_object" else constraint.enforced
        options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
        return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=options)
    text = constraint.definition
    size = len(text.encode())
    if size > MAX_DEFINITION:
        message = f"{constraint.field}: {size} bytes of UTF-8, the limit is {MAX_DEFINITION}; send a smaller one"
        raise RequestError(message, param=constraint.field)
    if constraint.kind == "lark":
        check_lark(text, constraint.field)
        return LLMatcher.grammar_from_lark(text)
    check_regex(text, constraint.field)
    return LLMatcher.grammar_from_regex(text)


_SAID = (
    ("oneOf constraints are not supported", "a oneOf whose schemas do not exclude each other; send it as anyOf"),
    ("Unsatisfiable schema", "no value is of this schema; correct it"),
    ("NoExtensionBias", "a $ref that leads to itself and nothing else, so that no value is of this schema; correct it"),
    (
        "min/maxProperties only supported",
        "minProperties or maxProperties beside optional properties; require all, or none",
    ),
    ("are not disjoint", "two patternProperties that the same name may match; let each name match one"),
    ("'multipleOf'", "a multipleOf with too many digits; send a rounder number"),
)
"""What llguidance says of schemas, and what is said of it here: its own words are not passed on."""


def _uncompilable(error: str, constraint: Constraint) -> RequestError:
    field = constraint.field
    if constraint.kind in ("lark", "regex"):
        text = uncompiled(constraint.kind, constraint.definition, error)
    elif fault := regex_fault(error):
        # The library quotes the pattern as it was passed on; where it is at fault is told of the one that was sent.
        alike: dict[str, str] = {}
        for place, sent in patterns(constraint.definition, field):
            if same_expression(fault.expression, without_nul(sent)):
                alike.setdefault(sent, place)
        tried = ((place, sent, regex_error(sent)) for sent, place in islice(alike.items(), TRIED))
        field, pattern, found = next((one for one in tried if one[2]), (field, "", ""))
        text = uncompiled("regex", pattern, found) if found else f"a pattern has {fault.what}; {fault.remedy}"
    else:
        found = next((said for begins, said in _SAID if begins in error), None)
        text = f"holds {found}" if found and not found.startswith("no ") else found
        text = text or "cannot be compiled within bounds; send a simpler schema"
    return RequestError(f"{field}: {text}", param=field)
