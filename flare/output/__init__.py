"""What a model writes besides its answer: reasoning, and calls of tools.

`machine.py` finds the openers of calls and the delimiters of reasoning in tokens and their text, and returns pieces:
answer text, reasoning, completed calls. What follows an opener is read by its format's reader (one file a format).
Formats that give the whole reply a structure have machines of their own. `syntaxes.py` is the table of all formats.
`rules.py` checks the calls against what the request allowed. What formats share: `scanning.py` (words and text in
pieces, bounds), `tag_reader.py`, `json_objects.py` and `framed.py` (calls in tags, calls in JSON, replies in frames),
`argument_types.py`, `elements.py` and `schemas.py` (plain text to typed values), and `faults.py` (the words for all
that is wrong). The core names its format; a core without one makes no machine at all, and its text is all answer.
"""

from flare.output.interface import Output, OutputError, OutputSyntax, Piece
from flare.output.syntaxes import (
    FORMATS,
    closes_reasoning,
    frames_reasoning,
    make_output,
    reply_markers,
    require,
)
from flare.output.ways import Way, Ways, reply_ways

__all__ = [
    "FORMATS",
    "Output",
    "OutputError",
    "OutputSyntax",
    "Piece",
    "Way",
    "Ways",
    "closes_reasoning",
    "frames_reasoning",
    "make_output",
    "reply_markers",
    "reply_ways",
    "require",
]
