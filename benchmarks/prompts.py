"""A long conversation to token ids: flare's template and tokenizer against transformers' apply_chat_template.

    python -m benchmarks.prompts CORE

Both sides get the same messages, template and tokenizer.json, and must give the same ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import machine

TOKENS = 30_000
"""How long the conversation is, about."""

WORDS = "the file reads its lines and counts every word that the parser returns before a value is stored again".split()


def conversation(turns: int) -> list[dict[str, Any]]:
    """What a coding agent sends: instructions, questions, long pieces of code and short answers; always the same."""
    messages = [{"role": "system", "content": "You edit files. " + prose(0, 400)}]
    for turn in range(turns):
        code = "\n".join(f"    value_{turn}_{line} = call({line}, '{prose(line, 4)}')  # {line}" for line in range(40))
        messages.append({"role": "user", "content": f"{prose(turn, 30)}\n\ndef step_{turn}():\n{code}\n"})
        messages.append({"role": "assistant", "content": f"{prose(turn + 7, 60)}."})
    return [*messages, {"role": "user", "content": "What is left to do?"}]


def prose(start: int, count: int) -> str:
    return " ".join(WORDS[(start + step * step) % len(WORDS)] for step in range(count))


def compare(core: Path, rounds: int) -> list[dict[str, Any]]:
    """Times both sides once a round, the order reversed every other round. Raises RuntimeError where the ids differ."""
    sides = {"flare": flare(core), "transformers": transformers(core)}
    turns = 1
    while len(sides["flare"](conversation(turns))) < TOKENS:
        turns += 1 + turns // 8
    messages = conversation(turns)
    ids = {name: side(messages) for name, side in sides.items()}
    if ids["flare"] != ids["transformers"]:
        raise RuntimeError("the two sides give different tokens for the same conversation")
    results = []
    for round_number in range(rounds):
        machine.wait_for_quiet()
        load = machine.ForeignLoad()
        order = list(sides) if round_number % 2 == 0 else list(reversed(sides))
        taken: dict[str, float] = {}
        for name in order:
            started = perf_counter()
            sides[name](messages)
            taken[name] = perf_counter() - started
        share = load.share()
        for name in sides:
            head = {"engine": name, "weights": "", "round": round_number, "foreign": share}
            results.append(head | {"messages": len(messages), "tokens": len(ids[name]), "seconds": taken[name]})
    return results


def flare(core: Path) -> Callable[[list[dict[str, Any]]], list[int]]:
    from flare.core.directory import open_core
    from flare.loading import load_text
    from flare.text.prompt import encode_prompt

    tokenizer, template = load_text(open_core(core))
    assert template is not None
    return lambda messages: encode_prompt(tokenizer, template, messages)


def transformers(core: Path) -> Callable[[list[dict[str, Any]]], list[int]]:
    from transformers import PreTrainedTokenizerFast

    manifest = json.loads((core / "core.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(core / "tokenizer.json"),
        chat_template=(core / manifest["template"]["file"]).read_text(),
        **manifest["template"]["facts"]["special_tokens"],
    )

    def ids(messages: list[dict[str, Any]]) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    return ids


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=__doc__.splitlines()[0])
    parser.add_argument("core", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for row in compare(arguments.core, arguments.rounds):
        print(f"  {row['engine']:13} {row['tokens']} tokens, {row['messages']} messages  {row['seconds'] * 1e3:.1f} ms")
