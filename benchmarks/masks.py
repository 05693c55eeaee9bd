"""What a constrained token costs: microseconds of its mask and of taking it, for typical forms and two sizes of vocabulary.

    python -m benchmarks.masks CORE

The larger vocabulary is the core's own with made-up words added, as wide as Qwen's. For the core's own, greedy decode steps of
one row run in turns, one with masks, made as the engine makes them while the step runs, and one without.
"""

from __future__ import annotations

import argparse
from ctypes import addressof, c_uint32
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks import machine, report

if TYPE_CHECKING:
    from benchmarks.step_flare import Flare

WIDE = 151_936
"""Tokens of the larger vocabulary."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "kind": {"enum": ["person", "firm", "other"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[str, Any, str]] = {
    "an object of four members": (
        "json_schema",
        PERSON,
        '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "engines"], "kind": "person"}',
    ),
    "any object": ("json_object", None, '{"title": "A day", "items": [1, 2.5, null, {"deep": [true, "yes it is"]}]}'),
    "a list of dates": (
        "json_schema",
        {"type": "array", "items": {"type": "string", "format": "date"}},
        '["2026-01-31", "2026-02-28", "2026-03-31"]',
    ),
    "a Lark grammar": (
        "lark",
        'start: "SELECT " NAME ("," NAME)* " FROM " NAME\nNAME: /[a-z_]+/\n',
        "SELECT a,b_c FROM t",
    ),
    "a regular expression": ("regex", r"[A-Z]{2}-[0-9]{4}( [a-z]+){1,20}", "AB-1234 the quick brown fox jumps over it"),
}
"""A name, the kind and definition of a constraint, and a text of it."""


def compare(core: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    """As `measure`, with the share that others had of the machine in each row."""
    machine.wait_for_quiet()
    load = machine.ForeignLoad()
    return [row | {"foreign": load.share()} for row in measure(core, threads, rounds)]


def measure(core: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a row a form, vocabulary and round: microseconds a token, of the slowest mask, of compiling, and, for the core's
    own vocabulary, of a decode step without and with masks."""
    from benchmarks.step_flare import Flare
    from flare.constraints import Constraints, Vocabulary
    from flare.core.directory import open_core
    from flare.loading import load_text

    opened = open_core(core)
    tokenizer, _ = load_text(opened)
    narrow: Any = tokenizer
    size, stops = opened.manifest.model.vocabulary, opened.manifest.tokens.eos
    side = Flare(core, threads)
    side.prefill(list(range(100, 228)), 0)
    results = []
    for tokens, width in ((narrow, size), (_Widened(tokenizer, size), WIDE)):
        vocabulary = Vocabulary(tokens, width, stops)
        started = perf_counter()
        native = vocabulary.native
        tables = perf_counter() - started
        assert native.vocab_size == width
        for number in range(rounds):
            for name, (kind, definition, text) in FORMS.items():
                row = _drive(Constraints(vocabulary), kind, definition, text, side if width == size else None)
                head = {"form": name, "vocabulary": width, "round": number, "tables_s": tables}
                results.append(head | row)
    side.replay.close()
    return results


def _drive(constraints: Any, kind: Any, definition: Any, text: str, side: Flare | None) -> dict[str, Any]:
    """Compiles a constraint and writes a text under it, then once more beside steps of `side`."""
    from flare.constraints import checked_schema
    from flare.conversation import Constraint

    vocabulary = constraints.vocabulary
    words = (c_uint32 * vocabulary.words)()
    address = addressof(words)
    started = perf_counter()
    enforced = checked_schema(definition, "form") if kind == "json_schema" else None
    constraint = Constraint(kind, definition, "form", enforced=enforced)
    (compiled,) = constraints.compile(constraint)
    compiling = perf_counter() - started
    mask = compiled.start(None)
    rest, tokens, fills, accepts = text.encode(), [], [], []
    while rest:
        started = perf_counter()
        mask.fill(address, vocabulary.words)
        filled = perf_counter()
        found = [t for t in vocabulary.leading(rest) if words[t // 32] >> t % 32 & 1]
        token = max(found, key=lambda t: len(vocabulary.text(t)))
        before = perf_counter()
        mask.accept(token)
        accepts.append(perf_counter() - before)
        fills.append(filled - started)
        rest = rest[len(vocabulary.text(token)) :]
        tokens.append(token)
    result = {
        "compile_ms": 1e3 * compiling,
        "token_us": 1e6 * (sum(fills) + sum(accepts)) / len(fills),
        "slowest_us": 1e6 * max(fills),
    }
    if side is None:
        return result
    (compiled,) = constraints.compile(constraint)
    mask = compiled.start(None)
    plain, masked = 0.0, 0.0
    for position, token in enumerate(tokens, 128):
        started = perf_counter()
        side.decode([token], position)
        between = perf_counter()
        side.decode([token], position, lambda: mask.fill(address, vocabulary.words))
        mask.accept(token)
        masked += perf_counter() - between
        plain += between - started
    return result | {"step_us": 1e6 * plain / len(tokens), "masked_step_us": 1e6 * masked / len(tokens)}


class _Widened:
    """A tokenizer with made-up words behind its own, always the same."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.encode_joined = tokenizer.encode_joined
        self.token_to_id = tokenizer.token_to_id
        random = Random(1)
        known = {tokenizer.token_bytes(token) for token in range(size)}
        words = sorted(word for word in known if len(word) > 1 and word.isalpha())
        self._more: list[bytes] = []
        while size + len(self._more) < WIDE:
            word = random.choice(words) + random.choice(words)[: random.randint(1, 6)]
            if word not in known:
                known.add(word)
                self._more.append(word)
        self._size = size

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if token < self._size else self._more[token - self._size]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__.splitlines()[0])
    parser.add_argument("core", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of the decode steps")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(report.masks(compare(arguments.core, arguments.threads, arguments.rounds)))


if __name__ == "__main__":
    main()
