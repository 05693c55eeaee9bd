"""The real server as a process, over scripted replies: `python -m tests.support.scripted_server --replies FILE`.

FILE is a JSON array of texts. A request that offers tools gets the text whose number is the number of tool results in
its conversation (the last one from then on), so that an agent is led through a task; any other request gets `--plain`.
$TOOL in a text stands for the name of the first tool that the request offers.
A reply may also be an array: texts, and {"tok": TEXT} for a special token of that spelling, which `--special` lists.
With `--named FILE`, a JSON object, a request gets the reply whose name its users mention last, and `--plain` once a tool's
result is the last thing said; null in place of a reply is a step that fails. With `--prompts FILE` every prompt is
written there, a JSON text a line, each control token as one NUL.
With `--endless` every reply is one letter for ever: what is measured then is the server alone.

The first line on standard output is the server's address; it stops when its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flare.config import ServerSettings
from flare.http.server import Server
from flare.http.startup import SWITCH_INTERVAL_S, bind
from flare.output import OutputSyntax
from flare.runtime import Runtime
from flare.text.template import ChatTemplate
from tests.support.fast_replay import FastReplay
from tests.support.live_server import EOS, IM_START, VOCABULARY, byte_tokenizer, make_model

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYNTAX = OutputSyntax(tools="hermes", reasoning=("<think>", "</think>"))
Reply = str | list[Any]
TOOL = "$TOOL"
FAILURE = "a secret of /the/model"
"""The text of the exception of a step that fails: no client may see it."""
LEVELS = [
    {"id": id, "enable_thinking": None, "reasoning_effort": id, "instruction": None, "opens_reasoning": False}
    for id in ("low", "high")
]
THINKING = {
    "supported": True,
    "source": "chat_template.jinja",
    "toggle": None,
    "effort": "reasoning_effort",
    "default_level": "low",
    "levels": [level | {"default": level["id"] == "low"} for level in LEVELS],
}


def sections(prompt: Sequence[int], role: str) -> int:
    """How many messages of a role the prompt has; control tokens mark them, so that no text can pretend to be one."""
    name = list(role.encode())
    return sum(
        1 for place, token in enumerate(prompt) if token == IM_START and list(prompt[place + 1 :][: len(name)]) == name
    )


def spoken(prompt: Sequence[int]) -> str:
    """A prompt's text; control tokens become one letter that no message holds."""
    return bytes(token if token < 256 else 0 for token in prompt).decode(errors="replace")


def first_tool(prompt: Sequence[int]) -> str:
    """The name of the first tool that the template showed."""
    return json.loads(spoken(prompt).partition("tools\n")[2].partition("\0")[0])[0]["function"]["name"]


def tokens_of(reply: Reply, special: Sequence[str]) -> list[int]:
    """A reply's tokens, its end token included."""
    tokens: list[int] = []
    for piece in [reply] if isinstance(reply, str) else reply:
        tokens += piece.encode() if isinstance(piece, str) else [VOCABULARY + special.index(piece["tok"])]
    return [*tokens, EOS]


def named_reply(prompt: Sequence[int], replies: Mapping[str, Reply | None], plain: str) -> Reply:
    """The reply whose name was mentioned last since the last result of a tool. Raises ValueError for one that fails."""
    said = ""
    for section in spoken(prompt).split("\0"):
        role, _, words = section.partition("\n")
        said = f"{said}\n{words}" if role == "user" else "" if role == "tool" else said
    name = max(replies, key=said.rfind, default=None)
    if name is None or name not in said:
        return plain
    text = replies[name]
    if text is None:
        raise ValueError(FAILURE)
    return text


def make_runtime(
    replies: Sequence[Reply],
    plain: str,
    *,
    endless: bool,
    context: int,
    slots: int,
    aliases: Sequence[str] = (),
    named: Mapping[str, Reply | None] | None = None,
    special: Sequence[str] = (),
    prompts: Path | None = None,
    **model: Any,
) -> Runtime:
    """A runtime whose replies are scripted, with tools and reasoning. `model` are further fields of the served model."""
    if "output" in model:
        model["output"] = msgspec.convert(model["output"], OutputSyntax)

    def reply(prompt: list[int], choice: int) -> list[int]:
        if endless:
            return [ord("a")]
        if prompts is not None:
            with prompts.open("a") as file:
                file.write(json.dumps(spoken(prompt)) + "\n")
        if named is not None:
            return tokens_of(named_reply(prompt, named, plain), special)
        text: Reply = plain
        if replies and sections(prompt, "tools"):
            text = replies[min(sections(prompt, "tool\n"), len(replies) - 1)]
            text = text.replace(TOOL, first_tool(prompt)) if isinstance(text, str) and TOOL in text else text
        return tokens_of(text, special)

    return Runtime(
        replay=FastReplay(reply, vocabulary=VOCABULARY + len(special), max_context=context, slots=slots),
        tokenizer=byte_tokenizer(*special),
        template=ChatTemplate(TEMPLATE, bos_token="<|bos|>", eos_token="<|im_end|>"),
        model=make_model(
            names=("org/tiny", *aliases),
            context_length=context,
            max_concurrency=slots,
            vocabulary=VOCABULARY + len(special),
            **({"thinking": THINKING, "output": OutputSyntax() if endless else SYNTAX} | model),
        ),
    )


async def serve(runtime: Runtime, settings: ServerSettings) -> None:
    sock = bind("127.0.0.1", settings.port)
    server = Server(runtime, settings)
    await server.start(sock)
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()
    sock.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replies", type=Path)
    parser.add_argument("--named", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--settings", type=json.loads, default={}, help="server settings, as JSON")
    parser.add_argument("--model", type=json.loads, default={}, help="fields of the served model, as JSON")
    parser.add_argument("--special", type=json.loads, default=[], help="more special tokens, as JSON")
    parser.add_argument("--plain", default="Fine.")
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    replies = json.loads(options.replies.read_text()) if options.replies else []
    runtime = make_runtime(
        replies,
        options.plain,
        endless=options.endless,
        context=options.context,
        slots=options.slots,
        named=json.loads(options.named.read_text()) if options.named else None,
        special=options.special,
        prompts=options.prompts,
        **options.model,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(serve(runtime, ServerSettings(**{"port": options.port, **options.settings})))
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
