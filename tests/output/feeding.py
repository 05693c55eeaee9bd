"""Feeds an output machine as generation does, and joins what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flare.conversation import Tool, ToolCall, Tools
from flare.output import OutputError, OutputSyntax, Piece, make_output

TAGS = ("<think>", "</think>")
OPEN, CLOSE, OTHER = 1, 2, 9
"""Tokens: the delimiters of TOKENS, and any other."""

TEXTS = OutputSyntax(tools="hermes", reasoning=TAGS)
TOKENS = OutputSyntax(tools="hermes", reasoning=TAGS, open_token=OPEN, close_token=CLOSE)
CALLS = OutputSyntax(tools="hermes")
REASONS = OutputSyntax(reasoning=TAGS)

WEATHER = Tools((Tool("weather"), Tool("clock")))

Pushed = tuple[int, str]


class Fed(NamedTuple):
    """What came out: neighbouring texts of one kind are joined, a call is (name, arguments). `places` are where the answer
    text stood in what was pushed: (start, end), neighbours joined."""

    parts: list[Any]
    reasoning_tokens: int
    error: str | None
    calls: list[ToolCall]
    places: list[tuple[int, int]]


def feed(
    pushed: str | Sequence[str | Pushed],
    *,
    syntax: OutputSyntax = TEXTS,
    tools: Tools = WEATHER,
    opens: bool = False,
    natural: bool = True,
    continues: bool = False,
) -> Fed:
    """Pushes texts, as ordinary tokens, or (token, text) pairs, then ends the answer.

    Checks that answer text stands where the machine says, and that what the machine has decided stays so.
    """
    machine = make_output(syntax, tools, opens_reasoning=opens, call_prefix="call", continues=continues)
    assert machine is not None
    parts: list[Any] = []
    calls: list[ToolCall] = []
    error = None
    given, decided = "", 0
    places: list[tuple[int, int]] = []

    def place(piece: Piece) -> None:
        end = len(given) - piece.behind
        start = end - len(piece.text)
        assert given[start:end] == piece.text and start >= decided, (given, piece, decided)
        if places and places[-1][1] == start:
            start = places.pop()[0]
        assert not places or places[-1][1] < start
        places.append((start, end))

    def take(pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "call":
                assert piece.call is not None and piece.text == ""
                calls.append(piece.call)
                parts.append(("call", piece.call.name, piece.call.arguments))
                continue
            assert piece.text and piece.call is None
            if piece.kind == "text":
                place(piece)
            if parts and parts[-1][0] == piece.kind:
                parts[-1][1].append(piece.text)
            else:
                parts.append((piece.kind, [piece.text]))

    try:
        for item in [pushed] if isinstance(pushed, str) else pushed:
            token, text = (OTHER, item) if isinstance(item, str) else item
            given += text
            take(machine.push(token, text))
            assert 0 <= machine.undecided <= len(given)
            decided = max(decided, len(given) - machine.undecided)
        take(machine.end(natural=natural))
    except OutputError as caught:
        error = str(caught)
        assert error and "\n" not in error and len(error) < 300
    joined = [part if part[0] == "call" else (part[0], "".join(part[1])) for part in parts]
    return Fed(joined, machine.reasoning_tokens, error, calls, places)


def same_for_all_splits(text: str, **options: Any) -> Fed:
    """Feeds a text whole, by characters and by threes; what comes out must be the same."""
    whole = feed(text, **options)
    for size in (1, 3):
        split = feed([text[i : i + size] for i in range(0, len(text), size)], **options)
        assert (split.parts, split.error, split.places) == (whole.parts, whole.error, whole.places)
    return whole


def call(name: str = "weather", arguments: str = '{"city": "Oslo"}') -> str:
    """A call as models of this syntax write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
