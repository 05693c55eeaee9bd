"""The cost of reading what models write: a token of prose and of a call, and megabytes that are written to be slow.

python -m benchmarks.outputs [--formats NAME ...] [--megabytes 1 2 4]

One thread, no server: the machine of `flare.output` alone, fed as generation feeds it, the best of some runs. Writes the table
of docs/performance.md, "Reading what models write".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from time import process_time
from typing import NamedTuple

from flare.conversation import Tool, Tools
from flare.output import FORMATS, OutputError, OutputSyntax, make_output

TAGS = ("<think>", "</think>")
TOKEN = 7
"""Any token that no format gives a meaning."""
RUNS = 5
PROSE = "The rain in Oslo will stop by noon, and the wind turns west; take the early train.\n"
PROSE_TOKENS = re.findall(r" ?\w+|[^\w\s]|\n", PROSE) * 1000
"""As tokenizers cut it: words with the space before them, punctuation, line breaks."""
CALL_TOKENS = 4_000
PIECE = 4
"""Characters a token of a call."""
HOSTILE_PIECE = 24

SCHEMA = {"type": "object", "properties": {"p": {"type": "string"}, "a": {"type": "array"}}}
TOOLS = Tools((Tool("f", parameters=SCHEMA),))


class Written(NamedTuple):
    """How a format writes a call of `f`: up to within its value, a text `p` or an array `a`, and from there to its end.

    `opener` may begin a call, `closer` closes the value.
    """

    opener: str
    text: str
    array: str
    end: str
    closer: str
    prose: str = ""
    """What stands before answer text."""

    @property
    def call(self) -> str:
        return f"{self.text}a city of some size{self.end}"


def json_call(opener: str, closer: str, key: str = "arguments", end: str = "}}") -> Written:
    head = f'{opener}{{"name": "f", "{key}": '
    return Written(opener or '{"name": "', head + '{"p": "', head + '{"a": ', f'"{end}{closer}', "}")


def function_tags(newline: str) -> Written:
    head = f"<tool_call>{newline}<function=f>{newline}<parameter="
    end = f"{newline}</parameter>{newline}</function>{newline}</tool_call>"
    return Written("<tool_call>", f"{head}p>{newline}", f"{head}a>{newline}", end, "</parameter>")


MINIMAX = "]<]minimax[>[<"
MUSE = ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="'
KIMI = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="'
DSML = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="'

WRITTEN = {
    "deepseek_dsml": Written(
        "<｜DSML｜tool_calls>",
        f'{DSML}p" string="true">',
        f'{DSML}a" string="false">',
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "</｜DSML｜parameter>",
    ),
    "gemma4": Written(
        "<|tool_call>",
        '<|tool_call>call:f{p:<|"|>',
        "<|tool_call>call:f{a:",
        '<|"|>}<tool_call|>',
        '<|"|>',
    ),
    "glm": Written(
        "<tool_call>",
        "<tool_call>f<arg_key>p</arg_key><arg_value>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "</arg_value></tool_call>",
        "</arg_value>",
    ),
    "granite": json_call("<|tool_call|>[", "]", end="}}"),
    "hermes": json_call("<tool_call>", "</tool_call>"),
    "jamba": json_call("<tool_calls>[", "]</tool_calls>"),
    "kimi_xtml": Written(
        "<|open|>call",
        f'{KIMI}p" type="string"<|sep|>',
        f'{KIMI}a" type="array"<|sep|>',
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        "<|close|>argument<|sep|>",
    ),
    "llama": json_call("", "", key="parameters"),
    "mimo": function_tags(""),
    "minimax": Written(
        f"{MINIMAX}tool_call>",
        f'{MINIMAX}tool_call>\n{MINIMAX}invoke name="f">{MINIMAX}p>',
        f'{MINIMAX}tool_call>\n{MINIMAX}invoke name="f">{MINIMAX}a>',
        f"{MINIMAX}/p>{MINIMAX}/invoke>\n{MINIMAX}/tool_call>",
        f"{MINIMAX}/p>",
    ),
    "mistral": Written("[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"p": "', '[TOOL_CALLS]f[ARGS]{"a": ', '"}', "}"),
    "muse_atem": Written(
        "<|start|>assistant to=f<|message|>",
        f'{MUSE}p">',
        f'{MUSE}a">',
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant",
        "</atem:parameter>",
        " to=user<|message|>",
    ),
    "qwen": function_tags("\n"),
}


def hostile(written: Written) -> dict[str, tuple[str, str]]:
    """Names of outputs that are written to be slow: what they begin with, and what is repeated behind it."""
    return {
        "openers": ("", written.opener),
        "openers with space": ("", written.opener + " " * 20),
        "half openers": (written.prose, written.opener[:-1]),
        "calls": ("", written.call),
        "a text without end": (written.text, "x < "),
        "half closers": (written.text, written.closer[:-1] or "{"),
        "quotes": (written.text, '\\" "'),
        "a deep array": (written.array, "["),
        "a wide array": (written.array + "[", "[],"),
        "line breaks": (written.prose, "\n"),
        "brackets": (written.prose, "<"),
    }


def run(format: str, pieces: Sequence[str], *, opens_reasoning: bool = False, best_of: int = 1) -> float:
    """Processor seconds that a machine takes for an output. Where it gives up on one, what is left takes no time."""
    times = []
    syntax = OutputSyntax(tools=format, reasoning=TAGS)
    for _ in range(best_of):
        machine = make_output(syntax, TOOLS, opens_reasoning=opens_reasoning, call_prefix="call")
        assert machine is not None
        push = machine.push
        begun = process_time()
        try:
            for piece in pieces:
                for _piece in push(TOKEN, piece):
                    pass
            for _piece in machine.end(natural=False):
                pass
        except OutputError:
            pass
        times.append(process_time() - begun)
    return min(times)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def per_token(format: str) -> tuple[float, float, float]:
    """Microseconds a token of an answer, of reasoning, and of calls."""
    written = WRITTEN[format]
    words = [written.prose, *PROSE_TOKENS]
    answer = run(format, words, best_of=RUNS) / len(words)
    reasoning = run(format, PROSE_TOKENS, opens_reasoning=True, best_of=RUNS) / len(words)
    calls = cut(written.call * (CALL_TOKENS * PIECE // len(written.call)), PIECE)
    return answer * 1e6, reasoning * 1e6, run(format, calls, best_of=RUNS) / len(calls) * 1e6


def worst(format: str, sizes: Sequence[int]) -> tuple[str, list[float]]:
    """The hostile output that takes longest at the first size, and its seconds at each size in MB."""
    outputs = hostile(WRITTEN[format])

    def seconds(name: str, size: int) -> float:
        head, unit = outputs[name]
        return run(format, cut(head + unit * (size * 1_000_000 // len(unit)), HOSTILE_PIECE))

    first = {name: seconds(name, sizes[0]) for name in outputs}
    name = max(first, key=lambda name: first[name])
    return name, [first[name], *(seconds(name, size) for size in sizes[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outputs", description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=sorted(FORMATS), default=sorted(FORMATS))
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 2, 4])
    arguments = parser.parse_args()
    sizes = arguments.megabytes
    print(
        "| format | answer, µs | reasoning, µs | calls, µs | slowest output |" + "".join(f" {n} MB, s |" for n in sizes)
    )
    print("|---|---:|---:|---:|---|" + "---:|" * len(sizes))
    for format in arguments.formats:
        costs = " | ".join(f"{cost:.2f}" for cost in per_token(format))
        name, seconds = worst(format, sizes)
        print(f"| {format} | {costs} | {name} |" + "".join(f" {second:.2f} |" for second in seconds), flush=True)


if __name__ == "__main__":
    main()
