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
from flare.errors import InputError, RequestError
from flare.output import FORMATS, OutputError, OutputSyntax, make_output, reply_markers, require
from flare.text.template import ChatTemplate
from ignition.thinking_probe import ends_within

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


def probe_output(template: ChatTemplate | None, probed: Mapping[str, Any], tokens: SpecialTokens) -> dict[str, Any]:
    """Returns the core's `template.facts.output`, whose fields `flare.output.OutputSyntax` describes.

    `probed` are the template's other facts. A format is named only if the template shows tools to the model. Of several
    pairs of delimiters the model's is the one that a prompt ends within, else the one that the template writes around a
    reply's reasoning, else one that it mentions.
    """
    facts: dict[str, Any] = {
        "tools": None, "reasoning": None, "open_token": None, "close_token": None, "spelled": []
    }  # fmt: skip
    if template is None:
        return facts
    tools, tail, parts = probed["tools"], probed["continuation"]["tail"], not probed["content"]["string"]
    spelled: dict[int, str] = {}
    if tools["declared"] and tools["calls"]:
        reply = _Replies(template, tools["arguments"], parts=parts)
        facts["tools"], written, left = reply.format()
        if facts["tools"] is not None and (markers := reply_markers(facts["tools"])):
            spelled |= tokens.special("".join(markers))
        elif written is not None:
            outside = reply.frame + (tail or "") + left
            spelled |= {id: text for id, text in tokens.special(written).items() if text not in outside}
    pair = _delimiters([*probed["generation_prompts"].values()], _reasoned(template, parts=parts), template.source)
    if pair is not None:
        opening, closing = (tokens.single(mark) for mark in pair)
        facts |= {"reasoning": list(pair), "open_token": opening, "close_token": closing}
        for mark, token in zip(pair, (opening, closing), strict=True):
            if token is None:
                spelled |= tokens.special(mark)
    facts["spelled"] = sorted(spelled)
    return facts


def _delimiters(openings: Sequence[str], reasoned: str, source: str) -> tuple[str, str] | None:
    """The pair of REASONING that the model uses. One that it merely strips from histories is mentioned, too."""
    for pair in REASONING:
        if any(ends_within(opening, [pair]) for opening in openings):
            return pair
    for shown in (reasoned, source + reasoned):
        for pair in REASONING:
            if all(mark in shown for mark in pair):
                return pair
    return None


class _Replies:
    """Renderings of a reply that calls the probe's tool. `frame` is what stands before any reply."""

    def __init__(self, template: ChatTemplate, arguments: str, *, parts: bool) -> None:
        self._template = template
        self._parts = parts
        self._dump: Callable[[Any], Any] = json.dumps if arguments == "string" else dict
        self.frame = ""

    def format(self) -> tuple[str | None, str | None, str]:
        """Returns the format's name, a rendering that it reads, and what it leaves of it as text; twice None without one.

        Raises InputError where the rendering is of a format whose package is missing.
        """
        for arguments in _ARGUMENTS:
            for count in (2, 1):  # some templates take one call a message
                written = self._written([arguments] * count)
                if written is None:
                    continue
                for name in sorted(FORMATS):
                    if not _readable(name, written):
                        continue
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
        messages = _in_form(messages, parts=self._parts)
        return self._template.render(messages, tools=_SHOWN, add_generation_prompt=add_generation_prompt)


def _in_form(messages: Sequence[Mapping[str, Any]], *, parts: bool) -> Sequence[Mapping[str, Any]]:
    """The messages, with contents in the form that the template takes."""
    if not parts:
        return messages
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in map(dict, messages)]


def _reasoned(template: ChatTemplate, *, parts: bool) -> str:
    """A reply with reasoning as the template renders it; nothing where the template refuses."""
    reply = {"role": "assistant", "content": _REPLY, "reasoning_content": "Probe reasoning"}
    try:
        return template.render(_in_form([{"role": "user", "content": _ASK}, reply], parts=parts))
    except RequestError:
        return ""


def _readable(name: str, written: str) -> bool:
    """Whether a format can be tried: one that needs a package may lack it. Raises InputError where the reply is of that one."""
    try:
        require(OutputSyntax(tools=name))
    except InputError:
        own = set(reply_markers(name)).difference(*REASONING)
        if any(marker in written for marker in own):
            raise
        return False
    return True


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
