"""A small model's tokens, and what drives a mask as generation does: along a text, or at random."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import addressof, c_uint32
from functools import cache
from random import Random
from typing import Any

from flare.constraints import CompiledConstraint, Constraints, ReplyMask, Vocabulary, checked_schema
from flare.conversation import Constraint
from flare.errors import MaskError
from flare.output import OutputSyntax, Ways
from flare.text.tokenizer import Tokenizer
from tests.text import samples

CLOSERS = (b'"', b"}", b"]", b"}}", b'"}', b"]}", b"0", b"e", b"l", b"1")


@cache
def constraints(spelled: tuple[str, ...] = ()) -> Constraints:
    """A byte-level tokenizer's vocabulary, which ends replies with `<|im_end|>` or `</s>`."""
    base = samples.byte_level()
    stops = [base.token_to_id("<|im_end|>"), base.token_to_id("</s>")]
    tokenizer = Tokenizer(base, eos_token_ids=stops)
    shown = frozenset(i for name in spelled if (i := tokenizer.token_to_id(name)) is not None)
    return Constraints(Vocabulary(tokenizer, tokenizer.vocab_size + 5, stops, shown))


VOCABULARY = constraints().vocabulary
STOP = min(VOCABULARY.stops)


def token(name: str) -> int:
    found = VOCABULARY.token(name.encode())
    assert found is not None
    return found


def compiled(kind: Any, definition: Any = None, field: str = "f") -> CompiledConstraint:
    enforced = checked_schema(definition, field) if kind == "json_schema" else None
    (found,) = constraints().compile(Constraint(kind, definition, field, enforced=enforced))
    return found


def json_mask(schema: Any) -> ReplyMask:
    return compiled("json_schema", schema).start(None)


def allowed(mask: ReplyMask) -> set[int] | None:
    """The tokens that may come, None for all of them."""
    words = (c_uint32 * VOCABULARY.words)()
    if not mask.fill(addressof(words), VOCABULARY.words):
        return None
    bits = int.from_bytes(bytes(words), "little")
    assert bits < 1 << 32 * VOCABULARY.words
    return {token for token in range(32 * VOCABULARY.words) if bits >> token & 1}


def write(mask: ReplyMask, text: str | bytes) -> bool:
    """Writes a text in tokens that the mask allows, the longest first; returns whether that was possible."""
    rest = text if isinstance(text, bytes) else text.encode()
    while rest:
        may = allowed(mask)
        for token in sorted(VOCABULARY.leading(rest), key=lambda t: -len(VOCABULARY.text(t))):
            if may is None or token in may:
                mask.accept(token)
                rest = rest[len(VOCABULARY.text(token)) :]
                break
        else:
            return False
    return True


def ends(mask: ReplyMask) -> bool:
    """Whether the reply may end here."""
    may = allowed(mask)
    return may is None or bool(may & VOCABULARY.stops)


def is_answer(mask: ReplyMask, text: str | bytes) -> bool:
    return write(mask, text) and ends(mask)


def wander(mask: ReplyMask, random: Random, most: int = 60) -> bytes | None:
    """Writes at random, and behind `most` tokens so that the answer ends soon; None where it does not end."""
    text = b""
    for step in range(most * 8):
        may = allowed(mask)
        assert may, "no token may come"
        if may & VOCABULARY.stops and (step >= most or may <= VOCABULARY.stops or random.random() < 0.1):
            mask.accept(random.choice(sorted(may & VOCABULARY.stops)))
            return text
        choice = _closer(may) if step >= most else None
        if choice is None:
            choice = random.choice(sorted(may - VOCABULARY.stops))
        mask.accept(choice)
        text += VOCABULARY.text(choice)
    return None


def _closer(may: set[int]) -> int | None:
    for text in CLOSERS:
        for found in VOCABULARY.leading(text):
            if VOCABULARY.text(found) == text and found in may:
                return found
    return None


def forbids(mask: ReplyMask, token: int) -> bool:
    """Whether a token may not come: neither does the mask allow it nor may it be given."""
    may = allowed(mask)
    if may is None or token in may:
        return False
    try:
        mask.accept(token)
    except MaskError:
        return True
    raise AssertionError("accepted what the mask forbids")


def replies(ways: Ways | None, **options: Any) -> Iterator[ReplyMask]:
    while True:
        yield compiled("json_schema", {"type": "object"}).start(ways, **options)


NONE = OutputSyntax()
