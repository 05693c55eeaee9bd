"""The real server as a process, over scripted replies: `python -m tests.support.scripted_server --replies FILE`.

FILE is a JSON array of texts. A request that offers tools gets the text whose number is the number of tool results in
its conversation (the last one from then on), so that an agent is led through a task; any other request gets `--plain`.
$TOOL in a text stands for the name of the first tool that the request offers.
With `--endless` every reply is one letter for ever: what is measured then is the server alone.

The first line on standard output is the server's address; it stops when its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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
TOOL = "$TOOL"
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


def first_tool(prompt: Sequence[int]) -> str:
    """The name of the first tool that the template showed."""
    text = bytes(token if token < 256 else 0 for token in prompt).decode()
    return json.loads(text.partition("tools\n")[2].partition("\0")[0])[0]["function"]["name"]


def make_runtime(
    replies: Sequence[str], plain: str, *, endless: bool, context: int, slots: int, aliases: Sequence[str] = ()
) -> Runtime:
    """A runtime whose replies are scripted, with tools and reasoning."""

    def reply(prompt: list[int], choice: int) -> list[int]:
        if endless:
            return [ord("a")]
        text = plain
        if replies and sections(prompt, "tools"):
            text = replies[min(sections(prompt, "tool\n"), len(replies) - 1)]
            text = text.replace(TOOL, first_tool(prompt)) if TOOL in text else text
        return [*text.encode(), EOS]

    return Runtime(
        replay=FastReplay(reply, vocabulary=VOCABULARY, max_context=context, slots=slots),
        tokenizer=byte_tokenizer(),
        template=ChatTemplate(TEMPLATE, bos_token="<|bos|>", eos_token="<|im_end|>"),
        model=make_model(
            names=("org/tiny", *aliases),
            context_length=context,
            max_concurrency=slots,
            output=OutputSyntax() if endless else SYNTAX,
            thinking=THINKING,
        ),
    )


async def serve(runtime: Runtime, port: int) -> None:
    sock = bind("127.0.0.1", port)
    server = Server(runtime, ServerSettings(port=port))
    await server.start(sock)
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()
    sock.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replies", type=Path)
    parser.add_argument("--plain", default="Fine.")
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    replies = json.loads(options.replies.read_text()) if options.replies else []
    runtime = make_runtime(
        replies, options.plain, endless=options.endless, context=options.context, slots=options.slots
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(serve(runtime, options.port))
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
