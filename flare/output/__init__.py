"""What a model writes besides its answer: reasoning, and calls of tools.

A *syntax* (one file each) is a machine that takes tokens with their text and returns pieces: answer text, reasoning
text, completed calls. It is linear in the length of the output and does not depend on how the output is cut into
steps. `rules.py` checks the calls against what the request allowed; `make_output` puts both together for one choice.
The core names its syntax; a core without one makes no machine at all, and its text is all answer.
"""

from flare.output.interface import Output, OutputError, OutputSyntax, Piece, make_output

__all__ = ["Output", "OutputError", "OutputSyntax", "Piece", "make_output"]
