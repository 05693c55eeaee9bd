"""The formats that a core may name in `template.facts.output.tools`, and what each is read with.

A *format of calls* marks calls within a reply that otherwise is reasoning and answer: `Machine` finds its openers, and a
reader of its own reads what follows one. A *format of replies* gives all of a reply its structure, and has a machine of
its own, which also runs where a request offers no tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flare.conversation import Tools
from flare.output import deepseek, hermes, json_calls, llama, mistral
from flare.output.interface import CallReader, Output, OutputSyntax
from flare.output.machine import Machine
from flare.output.openers import Calls, Opener
from flare.output.rules import Rules


class CallFormat(NamedTuple):
    """`reader` makes what reads on behind an opener, given its text and the request's tools."""

    openers: tuple[Opener, ...]
    reader: Callable[[str, Tools], CallReader]


CALL_FORMATS: Mapping[str, CallFormat] = {
    "granite": CallFormat(
        json_calls.GRANITE, lambda opener, _tools: json_calls.JsonCallsReader(opener, json_calls.GRANITE_CLOSER)
    ),
    "hermes": CallFormat(hermes.OPENERS, lambda _opener, _tools: hermes.HermesReader()),
    "jamba": CallFormat(
        json_calls.JAMBA, lambda opener, _tools: json_calls.JsonCallsReader(opener, json_calls.JAMBA_CLOSER)
    ),
    "llama": CallFormat(llama.OPENERS, lambda opener, _tools: llama.LlamaReader(opener)),
    "mistral": CallFormat(mistral.OPENERS, lambda _opener, tools: mistral.MistralReader(tools)),
}

ReplyMachine = Callable[[OutputSyntax, Tools, "Rules | None", bool], Output]
"""Makes the machine of a format of replies: of a core's syntax, the request's tools, the rules for its calls (None where
none may come), and whether the prompt ends within reasoning."""

REPLY_FORMATS: Mapping[str, ReplyMachine] = {
    "deepseek_dsml": lambda _syntax, _tools, rules, opens: deepseek.DeepseekMachine(rules, opens_reasoning=opens),
}

FORMATS = frozenset(CALL_FORMATS) | frozenset(REPLY_FORMATS)

_REQUIREMENTS: Mapping[str, Callable[[], None]] = {"deepseek_dsml": deepseek.require}


def require(syntax: OutputSyntax) -> None:
    """Imports what a core's format needs besides flare; to be called at start-up. Raises InputError where that fails."""
    if syntax.tools in _REQUIREMENTS:
        _REQUIREMENTS[syntax.tools]()


def make_output(syntax: OutputSyntax, tools: Tools, *, opens_reasoning: bool, call_prefix: str) -> Output | None:
    """Returns a machine for one choice, None where all text is answer.

    `opens_reasoning`: the prompt ends within reasoning. Ids of calls begin with `call_prefix` and are unique in it.
    Without tools, and where none may be called, what looks like a call is text.
    """
    callable_ = syntax.tools is not None and bool(tools.offered) and tools.choice != "none"
    rules = Rules(tools, call_prefix) if callable_ else None
    if syntax.tools in REPLY_FORMATS:
        return REPLY_FORMATS[syntax.tools](syntax, tools, rules, opens_reasoning)
    calls = None
    if rules is not None:
        assert syntax.tools is not None
        openers, reader = CALL_FORMATS[syntax.tools]
        calls = Calls(openers, lambda opener: reader(opener, tools))
    elif syntax.reasoning is None:
        return None
    return Machine(syntax, calls, rules, opens_reasoning=opens_reasoning)
