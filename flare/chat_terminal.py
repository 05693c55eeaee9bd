"""`flare chat`: a conversation in the terminal, or one answer on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, TextIO

from flare.config import MIB, RuntimeSettings
from flare.conversation import (
    Conversation,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Message,
    Reasoning,
    SamplingRequest,
    Text,
)
from flare.errors import InputError, RequestError
from flare.generation import Answer
from flare.runtime import Runtime
from flare.settings import seen

CLEAR = "/clear"
LEAVE = ("/exit", "/quit")
HELP = "Ctrl-C stops an answer, /clear forgets the conversation, /exit leaves."
MAX_PIPED_BYTES = 32 * MIB
AS_PREPARED = SamplingRequest()
"""The core's own sampling."""
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""C0 and C1 control characters, by which a model's text could drive the terminal; for `str.translate`."""
CUT = {"max_tokens": "cut at the token limit", "context_full": "the context is full; /clear starts again"}


class Terminal:
    """One conversation with a runtime. `out` gets the answers, `notes` (None: nobody) what is said about them."""

    def __init__(
        self, runtime: Runtime, out: TextIO, notes: TextIO | None, sampling: SamplingRequest = AS_PREPARED
    ) -> None:
        self.runtime = runtime
        self.sampling = sampling
        self.out = out
        self.notes = notes
        self.messages: list[Message] = []
        self._batches: SimpleQueue[list] = SimpleQueue()
        runtime.start(self._batches.put)

    def ask(self, text: str) -> bool:
        """Answers `text` and remembers both. An interrupted answer is kept as far as it came.

        Returns whether the answer came to its end. Raises RequestError when the request is refused or fails; the
        conversation is then as before.
        """
        asked = [*self.messages, Message("user", text)]
        request = GenerationRequest(prompts=[Conversation(asked)], prompt_field="messages", sampling=self.sampling)
        arrived_at = time.monotonic()
        events: list[Event] = []
        answer: Answer | None = None
        pieces: list[str] = []
        thoughts: list[str] = []
        end: Finished | None = None
        try:
            answer = self.runtime.submit(self.runtime.prepare(request), events.append, arrived_at)
            while not answer.ended:
                self.runtime.receive(self._batches.get())
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Reasoning):
                        self.out.write(event.text.translate(CONTROLS))
                        thoughts.append(event.text)
                    elif isinstance(event, Text | Finished) and event.text:
                        between = "\n\n" if thoughts and not pieces else ""
                        self.out.write(between + event.text.translate(CONTROLS))
                        pieces.append(event.text)
                    if isinstance(event, Finished):
                        end = event
                self.out.flush()
                events.clear()
        except KeyboardInterrupt:
            if answer is not None:
                answer.cancel()
        self.out.write("\n")
        self.out.flush()
        self.messages = [*asked, Message("assistant", "".join(pieces), "".join(thoughts) or None)]
        self._note(end)
        return end is not None

    def _note(self, end: Finished | None) -> None:
        if self.notes is None:
            return
        if end is None:
            print("(stopped)", file=self.notes)
            return
        times = end.timings
        parts = [f"{end.completion_tokens} tokens", f"first after {times.first_token * 1e3:.0f} ms"]
        if times.predicted > 0 and end.completion_tokens > 1:
            parts.append(f"{(end.completion_tokens - 1) / times.predicted:.1f} tokens/s")
        if end.cause in CUT:
            parts.append(CUT[end.cause])
        print(f"({', '.join(parts)})", file=self.notes)

    def converse(self) -> None:
        """Reads turns until /exit or the end of input."""
        print(f"{self.runtime.model.id}: {HELP}", file=self.notes)
        while True:
            try:
                line = input("> ")
            except EOFError:
                print(file=self.notes)
                return
            except UnicodeDecodeError:
                print("flare: that line is not UTF-8", file=self.notes)
                continue
            except KeyboardInterrupt:
                print(file=self.notes)
                continue
            text = line.strip()
            if text in LEAVE:
                return
            if text == CLEAR:
                self.messages = []
            elif line.startswith("/"):
                print(f"flare: {seen(text)} is no command, a space before it makes it text; {HELP}", file=self.notes)
            elif text:
                try:
                    self.ask(checked(text, "that line"))
                except (InputError, RequestError) as error:
                    print(f"flare: {error}", file=self.notes)


def checked(text: str, name: str) -> str:
    """Returns `text`. Raises InputError when it stands for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} is not UTF-8 text") from None
    return text


def read_piped() -> str | None:
    """Returns what is piped in, nothing where standard input is closed, None where it is a terminal.

    Raises InputError when it is not UTF-8, or longer than any prompt.
    """
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(data) > MAX_PIPED_BYTES:
        raise InputError(f"standard input: longer than {MAX_PIPED_BYTES} bytes; pipe less")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: byte {error.start} is not UTF-8 text") from None


def run(settings: RuntimeSettings, prompt: str | None, sampling: Mapping[str, Any]) -> None:
    """Answers what is piped in and `prompt` behind it, once; with neither, talks. `sampling` are fields of SamplingRequest.

    Raises FlareError when it cannot, KeyboardInterrupt when the one answer was interrupted.
    """
    piped = read_piped()
    talking = prompt is None and piped is None
    prompt = "\n\n".join(text for text in (piped, checked(prompt or "", "the prompt")) if text and text.strip())
    if not talking and not prompt:
        raise InputError("the prompt is empty; give it as an argument or on standard input")
    runtime = Runtime.load(settings)
    if not runtime.model.has_template:
        runtime.close()
        raise InputError(
            f"{settings.core}: this core has no chat template; `flare serve` answers /v1/completions with it"
        )
    try:
        terminal = Terminal(runtime, sys.stdout, sys.stderr if talking else None, SamplingRequest(**sampling))
        if talking:
            import readline  # noqa: F401  line editing and history for input()

            terminal.converse()
        elif not terminal.ask(prompt):
            raise KeyboardInterrupt
    finally:
        runtime.close()
