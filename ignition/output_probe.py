"""How a model marks calls and reasoning in what it writes, found by having flare read what the chat template writes.

A template renders an assistant's earlier calls as the model writes them. Each format that flare can read is tried on the
rendering of a probe conversation; the one that gives back exactly the probe's calls is the model's. Nothing here knows a
model by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Protocol

from flare.conversation import Tool, Tools
from flare.errors import RequestError
from flare.output import FORMATS, OutputError, OutputSyntax, make_output, reply_markers
from flare.text.template import ChatTemplate

REASONING = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
"""Delimiters of reasoning in use, the opening and the closing one."""

_ASK, _REPLY = "Probe question", "Probe reply"
_STRING = {"type": "string", "description": "A value."}
_TOOL = Tool(
    "probe_tool",
    "A tool.",
    {
        "type": "object",
        "properties": {
            "probe_text": _STRING,
            "probe_count": {"type": "integer", "description": "A value."},
        },
        "required": ["probe_text", "probe_count"],
    },
)
_SHOWN = [
    {
        "type": "function",
        "function": {"name": _TOOL.name, "description": _TOOL.description, "parameters": _TOOL.parameters},
    }
]
# Line breaks at both ends tell formats that keep them from formats that wrap values in them. Templates that strip values
# are tried with the plain ones.
_ARGUMENTS = ({"probe_text": "\nprobe value\n", "probe_count": 7}, {"probe_text": "probe value", "probe_count": 7})


class SpecialTokens(Protocol):
    """What is asked of a tokenizer."""

    def single(self, text: str) -> int | None:
        """The token that is this text, as an added token or as an entry of the vocabulary."""
        ...

    def special(self, text: str) -> Mapping[int, str]:
        """The special tokens whose spellings occur in a text."""
        ...


def probe_output(
    template: ChatTemplate | None, tools: Mapping[str, Any], tokens: SpecialTokens, *, tail: str | None
) -> dict[str, Any]:
    """Returns the core's `template.facts.output`, whose fields `flare.output.OutputSyntax` describes.

    `tools` are the template's probed facts of tools, `tail` what it puts behind an assistant's message. A format is named
    only if the template shows tools to the model; a pair of delimiters only if the template mentions both or writes them.
    """
    facts: dict[str, Any] = {
        "tools": None, "reasoning": None, "open_token": None, "close_token": None, "spelled": []
    }  # fmt: skip
    if template is None:
        return facts
    spelled: dict[int, str] = {}
    if tools["declared"] and tools["calls"]:
        reply = _Replies(template, tools["arguments"])
        facts["tools"], written, left = reply.format()
        if facts["tools"] is not None and (markers := reply_markers(facts["tools"])):
            spelled |= tokens.special("".join(markers))
        elif written is not None:
            outside = reply.frame + (tail or "") + left
            spelled |= {id: text for id, text in tokens.special(written).items() if text not in outside}
    shown = template.source + _reasoned(template)
    pair = next((pair for pair in REASONING if all(mark in shown for mark in pair)), None)
    if pair is not None:
        opening, closing = (tokens.single(mark) for mark in pair)
        facts |= {"reasoning": list(pair), "open_token": opening, "close_token": closing}
        for mark, token in zip(pair, (opening, closing), strict=True):
            if token is None:
                spelled |= tokens.special(mark)
    facts["spelled"] = sorted(spelled)
    return facts


class _Replies:
    """Renderings of a reply that calls the probe's tool. `frame` is what stands before any reply."""

    def __init__(self, template: ChatTemplate, arguments: str) -> None:
        self._template = template
        self._dump: Callable[[Any], Any] = json.dumps if arguments == "string" else dict
        self.frame = ""

    def format(self) -> tuple[str | None, str | None, str]:
        """Returns the format's name, a rendering that it reads, and what it leaves of it as text; twice None without one."""
        for arguments in _ARGUMENTS:
            for count in (2, 1):  # some templates take one call a message
                written = self._written([arguments] * count)
                if written is None:
                    continue
                for name in sorted(FORMATS):
                    calls, left = _read(name, written)
                    if calls == [("probe_tool", arguments)] * count:
                        return name, written, left
        return None, None, ""

    def _written(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """The reply as the template renders it, with what ends it; None where the template refuses."""
        question = [{"role": "user", "content": _ASK}]
        listed = [
            {
                "id": f"probe{index:04}",
                "type": "function",
                "function": {"name": _TOOL.name, "arguments": self._dump(arguments)},
            }
            for index, arguments in enumerate(calls)
        ]
        try:
            closed = self._render(question)
            opened = self._render(question, add_generation_prompt=True)
            told = self._render([*question, {"role": "assistant", "content": _REPLY}])
            whole = self._render([*question, {"role": "assistant", "content": "", "tool_calls": listed}])
        except RequestError:
            return None
        if not all(text.startswith(closed) for text in (opened, told, whole)):
            return None
        whole, told = whole[len(closed) :], told[len(closed) :]
        # The prompt may open, and a told reply begin, with what a reply of calls lacks, such as empty reasoning.
        shared = commonprefix([told, whole])
        shared = shared[: max(shared.rfind(end) for end in "\n>]|") + 1]
        frames = (opened[len(closed) :], told.partition(_REPLY)[0], shared)
        self.frame = next(frame for frame in frames if whole.startswith(frame))
        return whole[len(self.frame) :]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return self._template.render(messages, tools=_SHOWN, add_generation_prompt=add_generation_prompt)


def _reasoned(template: ChatTemplate) -> str:
    """A reply with reasoning as the template renders it; nothing where the template refuses."""
    reply = {"role": "assistant", "content": _REPLY, "reasoning_content": "Probe reasoning"}
    try:
        return template.render([{"role": "user", "content": _ASK}, reply])
    except RequestError:
        return ""


def _read(name: str, written: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls that a format finds in a reply, and the text that is none of them; nothing where it finds fault with it."""
    syntax = OutputSyntax(tools=name)
    try:
        machine = make_output(syntax, Tools((_TOOL,)), opens_reasoning=False, call_prefix="probe")
        if machine is None:
            return [], ""
        pieces = [*machine.push(-1, written), *machine.end(natural=True)]
    except OutputError:
        return [], ""
    calls = [(piece.call.name, json.loads(piece.call.arguments)) for piece in pieces if piece.call is not None]
    return calls, "".join(piece.text for piece in pieces)
