"""`flare chat`: one answer or a conversation at a terminal, what is piped in, and how both end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flare.config import MIB

CHAT = """
import os, signal, sys, threading
from flare import cli, runtime
from tests.support.live_server import LiveServer, reply

text, mode = sys.argv[1].encode().decode("unicode_escape"), sys.argv[2]
special = {256: "<|im_start|>", 257: "<|im_end|>"}

def script(prompt, choice):
    if mode == "prompt" and made.replay.steps == 1:
        sys.stderr.write("".join(special.get(token) or chr(token) for token in prompt))
    return [*text.encode()] * 40 if mode == "interrupt" else reply(text)

def sample(*given):
    if mode == "sampling":
        print(made.replay.sampling[0].temperature, made.replay.sampling[0].seed, file=sys.stderr)
    return sampled(*given)

made = LiveServer(script=script)
made.sock.close()
sampled, made.replay.sample = made.replay.sample, sample
noticed = threading.Event()

def interrupted(number, frame):
    noticed.set()
    raise KeyboardInterrupt

def press(tokens, rows):
    if made.replay.steps == 3:
        os.kill(os.getpid(), signal.SIGINT)
        noticed.wait(30)  # or the answer might end before

signal.signal(signal.SIGINT, interrupted)  # a shell's background jobs begin with it ignored
if mode == "interrupt":
    made.replay.on_step = press
if mode == "interrupt early":
    def submit(*given):
        submitted(*given)
        raise KeyboardInterrupt
    submitted, made.runtime.submit = made.runtime.submit, submit
runtime.Runtime.load = classmethod(lambda cls, settings: made.runtime)
cli.main(["chat", "c", *sys.argv[3:]])
"""


def chat(repository: Path, text: str, *arguments: str, mode: str = "", **options: Any) -> Any:
    """Runs `flare chat` over a scripted model that says `text` (with its escapes).

    `mode`: "interrupt" presses ^C in the third step, "interrupt early" before the request has been handed over; "prompt" and
    "sampling" write to standard error what the model gets.
    """
    command = [sys.executable, "-c", CHAT, text, mode, *arguments]
    return subprocess.run(command, cwd=repository, stderr=subprocess.PIPE, timeout=60, **options)


def test_one_answer(repository: Path) -> None:
    result = chat(repository, "Hi", "hello", stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hi\n", b"")
    result = chat(repository, "Hi", input="né".encode(), stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hi\n", b"")


def test_what_is_piped_in_stands_before_the_prompt(repository: Path) -> None:
    for piped, prompt, asked in (
        (b"some text", "sum it up", "some text\n\nsum it up"),
        (b" \n", "hello", "hello"),
        (b"some text\n", " ", "some text\n"),
    ):
        result = chat(repository, "Hi", prompt, input=piped, stdout=subprocess.PIPE, mode="prompt")
        assert result.returncode == 0, result
        assert result.stderr.decode() == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def test_without_standard_input_there_is_no_conversation(repository: Path) -> None:
    result = chat(repository, "Hi", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(0))
    assert result.returncode == 2 and result.stderr.startswith(b"flare: the prompt is empty")
    result = chat(repository, "Hi", "hello", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(0))
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hi\n", b"")


def test_what_is_piped_in_is_bounded(repository: Path) -> None:
    result = chat(repository, "x", "sum it up", input=b"a" * (32 * MIB + 1), stdout=subprocess.PIPE)
    assert result.returncode == 2 and result.stdout == b""
    assert result.stderr == b"flare: standard input: longer than 33554432 bytes; pipe less\n"


def test_temperature_and_seed_reach_the_sampler(repository: Path) -> None:
    """The scripted model's own temperature is 0; the replay sees what each row is drawn with."""
    for options, drawn in (
        ((), (0.0, None)),
        (("--temperature", "0.5", "--seed", "7"), (0.5, 7)),
        (("--seed", "7"), (0.0, 7)),
        (("--temperature", "0"), (0.0, None)),
    ):
        result = chat(repository, "Hi", "hello", *options, stdout=subprocess.PIPE, mode="sampling")
        rows = [line.split() for line in result.stderr.decode().splitlines()]
        assert result.returncode == 0 and len(rows) == 3  # two letters and the end
        assert {float(temperature) for temperature, _ in rows} == {drawn[0]}
        assert drawn[1] is None or {int(seed) for _, seed in rows} == {drawn[1]}


def test_the_server_s_temperature_and_check_are_not_the_terminal_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with all of [server]; and what is asked with is no setting."""
    from flare import chat_terminal
    from flare.cli import main

    taken = []
    monkeypatch.setattr(chat_terminal, "run", lambda settings, prompt, asked: taken.append((settings, asked)))
    monkeypatch.setenv("FLARE_TEMPERATURE", "0.25")
    monkeypatch.setenv("FLARE_CHECK", "1")
    for options, asked in (([], {}), (["--temperature", "0.5"], {"temperature": 0.5})):
        with pytest.raises(SystemExit):
            main(["chat", "core", "hello", *options])
        assert taken[-1][0].temperature is None and not taken[-1][0].check and taken[-1][1] == asked


TALK = """
import sys
from flare.chat_terminal import Terminal
from tests.support.live_server import LiveServer, reply

made = LiveServer(script=lambda prompt, choice: reply("Hi"))
made.sock.close()
Terminal(made.runtime, sys.stdout, sys.stderr).converse()
made.runtime.close()
"""


def test_an_unknown_command_is_said_to_be_none(repository: Path) -> None:
    lines = ["/bye", "/clear it", " /usr is a path", "/clear", "/exit", "not read"]
    result = subprocess.run(
        [sys.executable, "-c", TALK], cwd=repository, input="\n".join(lines), capture_output=True, text=True, timeout=60
    )
    notes = result.stderr.splitlines()
    assert notes[1].startswith("flare: '/bye' is no command, a space before it makes it text; Ctrl-C stops")
    assert notes[2].startswith("flare: '/clear it' is no command")
    assert notes[3].startswith("(3 tokens") and len(notes) == 4
    assert result.stdout == "> > > Hi\n> > "


def test_a_reader_that_has_enough_is_no_failure(repository: Path) -> None:
    """As in `flare chat CORE PROMPT | head -1`."""
    end, out = os.pipe()
    os.close(end)
    try:
        result = chat(repository, "some text", "hello", stdout=out)
    finally:
        os.close(out)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("data", [b"\xff", b"text \x80", bytes(range(256))])
def test_what_is_piped_in_must_be_text(repository: Path, data: bytes) -> None:
    result = chat(repository, "x", input=data, stdout=subprocess.PIPE)
    assert result.returncode == 2 and result.stdout == b""
    assert result.stderr.startswith(b"flare: ") and b"UTF-8" in result.stderr and result.stderr.count(b"\n") == 1


def test_a_prompt_must_be_text() -> None:
    result = subprocess.run([sys.executable, "-m", "flare.cli", "chat", "c", b"\xff"], capture_output=True)
    assert result.returncode == 2 and b"UTF-8" in result.stderr and result.stderr.count(b"\n") == 1


def test_an_interrupted_answer_exits_with_130(repository: Path) -> None:
    result = chat(repository, "aaaaaaaaaa", "hello", mode="interrupt", stdout=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (130, b"")
    assert re.fullmatch(rb"a*\n", result.stdout) and len(result.stdout) < 400


def test_an_answer_interrupted_before_it_began_exits_with_130(repository: Path) -> None:
    result = chat(repository, "aaaaaaaaaa", "hello", mode="interrupt early", stdout=subprocess.PIPE)
    assert (result.returncode, result.stderr, result.stdout) == (130, b"", b"\n")


def test_a_model_does_not_drive_the_terminal(repository: Path) -> None:
    """C0 and C1 controls are left out, but for the newline and the tab."""
    text = r"a\x1b[2Jb\x9b31mc\x07\x08\r\x7f\x00d\n\te\x85\xa0\xe9"
    result = chat(repository, text, "hello", stdout=subprocess.PIPE)
    assert result.stdout.decode() == "a[2Jb31mcd\n\te\xa0é\n"
