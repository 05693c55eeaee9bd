"""The formats that a core may name in `template.facts.output.tools`, and what each is read with.

A *format of calls* marks calls within a reply that otherwise is reasoning and answer: `Machine` finds its openers, and a
reader of its own reads what follows one. A *format of replies* gives all of a reply its structure, and has a machine of
its own, which also runs where a request offers no tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from flare.conversation import Tools
from flare.output.interface import Output, OutputSyntax
from flare.output.machine import Machine
from flare.output.openers import CallFormat, Calls, ReplyFormat
from flare.output.rules import Rules
from flare.output.structured import StructuredOutput

_PLACES: Mapping[str, tuple[str, str]] = {
    "deepseek_dsml": ("deepseek", "FORMAT"),
    "gemma4": ("gemma4", "FORMAT"),
    "glm": ("glm", "FORMAT"),
    "granite": ("json_calls", "GRANITE"),
    "hermes": ("json_calls", "HERMES"),
    "jamba": ("json_calls", "JAMBA"),
    "kimi_xtml": ("kimi_xtml", "FORMAT"),
    "llama": ("llama", "FORMAT"),
    "mimo": ("function_tags", "MIMO"),
    "minimax": ("minimax", "FORMAT"),
    "mistral": ("mistral", "FORMAT"),
    "muse_atem": ("muse_atem", "FORMAT"),
    "qwen": ("function_tags", "QWEN"),
}
"""Module and member by a format's name. A server imports the one that its core needs."""

FORMATS = frozenset(_PLACES)

BARE = "{"
"""What an answer in JSON may begin with: under an output constraint a call that begins so cannot be told from it."""


@cache
def find_format(name: str) -> CallFormat | ReplyFormat:
    """Returns a format of FORMATS."""
    module, member = _PLACES[name]
    found: CallFormat | ReplyFormat = getattr(import_module(f"flare.output.{module}"), member)
    return found


def reply_markers(name: str) -> tuple[str, ...]:
    """Returns the texts that give a reply its structure in a format of replies; none for a format of calls."""
    found = find_format(name)
    return found.markers if isinstance(found, ReplyFormat) else ()


def require(syntax: OutputSyntax) -> None:
    """Imports a core's format and what it needs besides flare, at start-up. Raises InputError where that fails."""
    if syntax.tools is not None and isinstance(found := find_format(syntax.tools), ReplyFormat):
        found.require()


def closes_reasoning(syntax: OutputSyntax) -> bool:
    """Whether one token closes the reasoning of a reply, wherever it is put."""
    if syntax.close_token is None:
        return False
    found = None if syntax.tools is None else find_format(syntax.tools)
    return not isinstance(found, ReplyFormat) or found.delimited


def frames_reasoning(syntax: OutputSyntax) -> bool:
    """Whether a reply may begin with reasoning although the prompt does not end within it: the format's frames decide."""
    found = None if syntax.tools is None else find_format(syntax.tools)
    return isinstance(found, ReplyFormat) and not found.delimited


def make_output(
    syntax: OutputSyntax,
    tools: Tools,
    *,
    opens_reasoning: bool,
    call_prefix: str,
    continues: bool = False,
    structured: bool = False,
    breaks: bool = False,
) -> Output | None:
    """Returns a machine for one choice, None where all text is answer.

    `opens_reasoning`: the prompt ends within reasoning; `continues`: within an answer that is to be continued. Ids of calls
    begin with `call_prefix` and are unique in it. Without tools, and where none may be called, what looks like a call is
    text in formats of calls, and left out in formats of replies. `structured`: the answer is under an output constraint, so
    that it is verbatim, and a call is none that begins as JSON does; `breaks`: it may begin with line breaks.
    """
    found = None if syntax.tools is None else find_format(syntax.tools)
    rules = Rules(tools, call_prefix) if found is not None and tools.offered and tools.choice != "none" else None
    if isinstance(found, ReplyFormat):
        machine = found.machine(syntax, tools, rules, opens_reasoning=opens_reasoning, continues=continues)
        framed = found.frames is not None
        return _structured(machine, rules, breaks, framed=framed) if structured else machine
    calls = None
    if rules is not None:
        assert found is not None
        openers, reader = found
        if structured:
            openers = tuple(opener for opener in openers if opener.text[0] != BARE)
        calls = Calls(openers, lambda opener: reader(opener, tools))
    elif syntax.reasoning is None:
        return None
    plain = Machine(syntax, calls, rules, opens_reasoning=opens_reasoning)
    return _structured(plain, rules, breaks) if structured else plain


def _structured(machine: Output, rules: Rules | None, breaks: bool, *, framed: bool = False) -> Output:
    shows_text = rules is None or rules.shows_text
    return StructuredOutput(machine, shows_text=shows_text, breaks=breaks, framed=framed)
