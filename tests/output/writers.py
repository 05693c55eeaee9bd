"""Writes neutral replies as each format's models do: reasoning, text and calls, for tests that all formats share."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flare.conversation import Tool, Tools
from flare.output import OutputSyntax
from tests.output.feeding import TAGS

Part = tuple[str, ...]
"""("reasoning", TEXT), ("text", TEXT) or ("call", NAME, ARGUMENTS), the arguments as JSON text: what comes out, too."""


class Number(str):
    """A number as it is written."""


def decoded(arguments: str) -> Any:
    """JSON with its numbers as written and its members in order: what a call means."""
    return json.loads(arguments, parse_int=Number, parse_float=Number)


def dumped(value: Any, gap: str = "") -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, Mapping):
        members = (f"{json.dumps(key, ensure_ascii=False)}:{gap}{dumped(member, gap)}" for key, member in value.items())
        return "{" + f",{gap}".join(members) + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(dumped(item, gap) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def schema(value: Any) -> dict[str, Any]:
    """The JSON Schema of one value."""
    if isinstance(value, Number):
        return {"type": "number" if set(value) & set(".eE") else "integer"}
    if isinstance(value, Mapping):
        return {"type": "object", "properties": {key: schema(member) for key, member in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema(item) for item in value]}
    return {"type": "null" if value is None else "boolean" if isinstance(value, bool) else "string"}


def offering(*parts: Part, **request: Any) -> Tools:
    """Declares the tools that a reply's calls need, each with the types of its arguments."""
    found = {part[1]: schema(decoded(part[2])) for part in parts if part[0] == "call"}
    return Tools(tuple(Tool(name, parameters=parameters) for name, parameters in found.items()), **request)


def text_of(value: Any) -> str:
    """A value between tags: a text as it is, all else as JSON."""
    return value if type(value) is str else dumped(value)


def function_tags(name: str, arguments: Mapping[str, Any], newline: str) -> str:
    n = newline
    written = (f"<parameter={k}>{n}{text_of(v)}{n}</parameter>{n}" for k, v in arguments.items())
    return f"<tool_call>{n}<function={name}>{n}{''.join(written)}</function>{n}</tool_call>"


def glm(name: str, arguments: Mapping[str, Any]) -> str:
    written = (f"<arg_key>{k}</arg_key><arg_value>{text_of(v)}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{''.join(written)}</tool_call>"


def gemma_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{gemma_value(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return f'<|"|>{value}<|"|>' if type(value) is str else dumped(value)


def gemma4(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


def minimax(name: str, arguments: Mapping[str, Any]) -> str:
    def tag(text: str) -> str:
        return f"]<]minimax[>[<{text}>"

    def element(key: str, value: Any) -> str:
        if isinstance(value, Mapping):
            inner = "".join(element(name, member) for name, member in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", item) for item in value)
        else:
            inner = text_of(value)
        return f"{tag(key)}{inner}{tag('/' + key)}"

    inner = "".join(element(key, value) for key, value in arguments.items())
    called = f"{tag(f'invoke name={chr(34)}{html.escape(name)}{chr(34)}')}{inner}{tag('/invoke')}"
    return f"{tag('tool_call')}\n{called}\n{tag('/tool_call')}"


def kimi(name: str, arguments: Mapping[str, Any]) -> str:
    def tag(text: str, close: bool = False) -> str:
        return f"<|{'close' if close else 'open'}|>{text}<|sep|>"

    types = {key: schema(value)["type"] for key, value in arguments.items()}
    written = (
        tag(f'argument key="{html.escape(key)}" type="{types[key]}"') + text_of(value) + tag("argument", close=True)
        for key, value in arguments.items()
    )
    return tag(f'call tool="{html.escape(name)}" index="1"') + "".join(written) + tag("call", close=True)


def attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def muse(name: str, arguments: Mapping[str, Any]) -> str:
    written = "".join(
        f'<atem:parameter name="{attribute(k)}">{text_of(v)}</atem:parameter>\n' for k, v in arguments.items()
    )
    called = f'<atem:invoke name="{attribute(name)}">\n{written}</atem:invoke>'
    return f"<atem:function_calls>\n{called}\n</atem:function_calls>"


def dsml(name: str, arguments: Mapping[str, Any]) -> str:
    written = "".join(
        f'<｜DSML｜parameter name="{k}" string="{"true" if type(v) is str else "false"}">{text_of(v)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{written}</｜DSML｜invoke>\n'


def named_object(key: str, gap: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, arguments: dumped({"name": name, key: arguments}, gap)


class Writer:
    """One format."""

    def __init__(
        self,
        call: Callable[[str, Mapping[str, Any]], str],
        *,
        block: tuple[str, str, str] = ("", "", ""),
        opener: str = "",
        mentions: bool = True,
    ) -> None:
        """`call` writes one call; `block` is what stands before, between and behind calls that come together. `opener` is
        how they begin; `mentions`: where no call follows it, it is text."""
        self._call = call
        self._block = block
        self.opener = opener
        self.mentions = mentions

    def named(self, format: str) -> Writer:
        self.format = format
        self.syntax = OutputSyntax(tools=format, reasoning=TAGS)
        return self

    def calls(self, *calls: Part) -> str:
        """Some calls, as parallel ones are written."""
        before, between, behind = self._block
        return before + between.join(self._call(name, decoded(arguments)) for _, name, arguments in calls) + behind

    def reply(self, *parts: Part) -> str:
        """A reply. A first reasoning is what the prompt has opened, see `opens`."""
        return "".join(self.segment(kind, list(parts), at) for at, (kind, *_) in enumerate(parts))

    def segment(self, kind: str, parts: Sequence[Part], at: int) -> str:
        if kind == "call":
            return "" if at and parts[at - 1][0] == "call" else self.calls(*run(parts, at))
        text = parts[at][1]
        return text if kind == "text" else ("" if at == 0 else TAGS[0]) + text + TAGS[1]

    def opens(self, *parts: Part) -> bool:
        return bool(parts) and parts[0][0] == "reasoning"

    @property
    def goes_on(self) -> bool:
        """Whether anything may follow a block of calls."""
        return self.format != "deepseek_dsml"

    @property
    def in_frames(self) -> bool:
        """Whether the format gives the whole reply its structure by control tokens, which are never shown."""
        return self.format in ("kimi_xtml", "muse_atem")


class LlamaWriter(Writer):
    def segment(self, kind: str, parts: Sequence[Part], at: int) -> str:
        written = super().segment(kind, parts, at)
        behind_text = kind == "call" and at and parts[at - 1][0] == "text"
        return f"<|python_tag|>{written}" if behind_text else written


class KimiWriter(Writer):
    def segment(self, kind: str, parts: Sequence[Part], at: int) -> str:
        channel = {"reasoning": "think", "text": "response", "call": "tools"}[kind]
        if kind == "call" and at and parts[at - 1][0] == "call":
            return ""
        inner = self.calls(*run(parts, at)) if kind == "call" else parts[at][1]
        opened = at == 0 and kind != "call"
        return ("" if opened else f"<|open|>{channel}<|sep|>") + inner + f"<|close|>{channel}<|sep|>"


class MuseWriter(Writer):
    def segment(self, kind: str, parts: Sequence[Part], at: int) -> str:
        to = {"reasoning": "self", "text": "user", "call": parts[at][1]}[kind]
        inner = self.calls(parts[at]) if kind == "call" else parts[at][1]
        return f"{'<|start|>assistant' if at else ''} to={to}<|message|>{inner}<|eom|>"

    def opens(self, *parts: Part) -> bool:
        return False


def run(parts: Sequence[Part], at: int) -> list[Part]:
    """The calls from one place on, up to what is none."""
    end = next((i for i in range(at, len(parts)) if parts[i][0] != "call"), len(parts))
    return list(parts[at:end])


def array(opener: str, closer: str) -> Writer:
    return Writer(named_object("arguments", " "), block=(f"{opener}[", ", ", f"]{closer}"), opener=opener)


WRITERS = {
    format: writer.named(format)
    for format, writer in {
        "deepseek_dsml": Writer(
            dsml, block=("<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"), opener="<｜DSML｜", mentions=False
        ),
        "gemma4": Writer(gemma4, opener="<|tool_call>", mentions=False),
        "glm": Writer(glm, opener="<tool_call>"),
        "granite": array("<|tool_call|>", "<|/tool_call|>"),
        "hermes": Writer(
            lambda name, arguments: f"<tool_call>\n{named_object('arguments', ' ')(name, arguments)}\n</tool_call>",
            block=("", "\n", ""),
            opener="<tool_call>",
        ),
        "jamba": array("<tool_calls>", "</tool_calls>"),
        "kimi_xtml": KimiWriter(kimi, opener="<|open|>tools<|sep|>", mentions=False),
        "llama": LlamaWriter(named_object("parameters", " "), block=("", "; ", ""), opener='{"name": '),
        "mimo": Writer(lambda name, arguments: function_tags(name, arguments, ""), opener="<tool_call>"),
        "minimax": Writer(minimax, block=("", "\n", ""), opener="]<]minimax[>[<tool_call>", mentions=False),
        "mistral": Writer(
            lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments, ' ')}", opener="[TOOL_CALLS]"
        ),
        "muse_atem": MuseWriter(muse, opener="<|start|>assistant to=f<|message|>", mentions=False),
        "qwen": Writer(
            lambda name, arguments: function_tags(name, arguments, "\n"), block=("", "\n", ""), opener="<tool_call>"
        ),
    }.items()
}
