"""What a model writes besides its answer: reasoning, and calls of tools.

A *syntax* of calls (one file each) reads what follows its opener. `machine.py` finds openers and the delimiters of
reasoning in tokens and their text, and returns pieces: answer text, reasoning, completed calls. `rules.py` checks the
calls against what the request allowed. The core names its syntax; a core without one makes no machine at all, and its
text is all answer.
"""

from flare.output.interface import Output, OutputError, OutputSyntax, Piece
from flare.output.machine import make_output

__all__ = ["Output", "OutputError", "OutputSyntax", "Piece", "make_output"]
