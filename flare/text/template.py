"""The core's chat template: a conversation in, the prompt's text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from flare.errors import CoreError, RequestError

MAX_SOURCE = 1024 * 1024
"""Most characters of a template's source."""

TOGGLES = ("enable_thinking", "thinking")
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
"""Variables by which templates in use are told about thinking: a switch, and a named effort."""

_MAX_MESSAGE = 300  # most characters of a template author's own words in an error


def fixed_clock() -> datetime:
    """The date that templates see unless the caller gives one: prompts must not change with the day."""
    return datetime(2025, 1, 1)


class TemplateError(RequestError):
    """The template does not render the conversation."""


class TemplateRefusal(TemplateError):
    """The template refuses the conversation in its author's words (`raise_exception`)."""


class TemplateFailure(TemplateError):
    """The template cannot render the conversation. `line` is where in the template, None where that is unknown."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message, param="messages")
        self.line = line


class ChatTemplate:
    """A compiled template. `render` may be called from several threads at once."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "chat_template.jinja",
        clock: Callable[[], datetime] = fixed_clock,
    ) -> None:
        """`special_tokens` are further variables such as `pad_token`. `name` is what errors call the template.

        Raises CoreError naming file, line and construct when the template cannot be read.
        """
        # Jinja takes 40 ms to import: only where a template is really used.
        from jinja2 import TemplateSyntaxError

        from flare.text.sandbox import Sandbox

        self.source = source
        self._name = name
        self._clock = clock
        self._variables: dict[str, Any] = dict(special_tokens or {})
        for variable, token in (("bos_token", bos_token), ("eos_token", eos_token)):
            if token is not None:
                self._variables[variable] = token
        if len(source) > MAX_SOURCE:
            raise CoreError(f"{name}: {len(source)} characters, a template may have {MAX_SOURCE}")
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise CoreError(f"{name} line {error.lineno}: {_one_line(error.message or 'cannot be parsed')}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError):
            raise CoreError(f"{name}: nested or repeated too deeply to be compiled") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        clock: Callable[[], datetime] | None = None,
        mark: str = "",
        **variables: Any,
    ) -> str:
        """The prompt's text. `variables` are the template's own (`enable_thinking`, ...); they cannot take the place of
        the conversation or of special tokens. `mark`: see `flare.text.controls`.

        Raises TemplateRefusal or TemplateFailure, both HTTP 400.
        """
        from flare.text.sandbox import MAX_CHARS, LimitExceeded, Refused

        values = {
            **variables,
            **self._variables,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        self._sandbox.begin(mark, clock or self._clock)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_CHARS:
                    raise LimitExceeded(f"more than {MAX_CHARS} characters")
                pieces.append(piece)
        except Refused as refusal:
            text = _one_line(str(refusal))
            raise TemplateRefusal(f"the chat template refuses this conversation: {text}", param="messages") from None
        except LimitExceeded as limit:
            raise TemplateFailure(f"rendering this conversation takes {limit}; shorten it", None) from None
        except Exception as error:
            # The library's words may quote values or internals; the line is enough to find the fault.
            line = _template_line(error.__traceback__)
            where = self._name if line is None else f"{self._name} line {line}"
            raise TemplateFailure(f"the chat template cannot render this conversation ({where})", line) from None
        return "".join(pieces)


def _template_line(trace: TracebackType | None) -> int | None:
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
