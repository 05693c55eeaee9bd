"""What a reply has to be, kept token by token: JSON, JSON of a schema, a Lark grammar or a regular expression.

`json_schema.py` lets through what of a schema can be kept, `meetings.py` what of it can be joined, `vocabulary.py` shows
llguidance the model's tokens, `compiled.py` compiles a request's constraint within bounds, and `reply.py` is the mask of one
reply: free reasoning, then an answer of the grammar or a call. `flare/output/ways.py` says how a format comes to its answers
and calls.
"""

from flare.constraints.compiled import CompiledConstraint, Constraints
from flare.constraints.json_schema import checked_schema
from flare.constraints.reply import CallTracker, ReplyMask
from flare.constraints.vocabulary import Vocabulary

__all__ = ["CallTracker", "CompiledConstraint", "Constraints", "ReplyMask", "Vocabulary", "checked_schema"]
