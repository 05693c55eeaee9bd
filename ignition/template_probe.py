"""What a chat template can do, found by rendering small conversations with it and comparing the results.

Nothing here knows a model by name. The result is plain data for the manifest; what its fields mean is said once, where
they are made, in `probe_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flare.errors import CoreError, InputError, RequestError
from flare.text.controls import Controls
from flare.text.sandbox import Sandbox
from flare.text.template import ChatTemplate, TemplateFailure
from ignition.template_reading import variables_read
from ignition.thinking_probe import SYSTEM as _SYSTEM
from ignition.thinking_probe import ThinkingProbe, ends_within, level_variables, thinking_table

# Texts that no template changes or contains by chance.
_LATER = "Probe later system text"
_ASK, _REPLY, _ASK_AGAIN, _REPLY_AGAIN = "Probe question", "Probe reply", "Probe question again", "Probe reply again"
_RESULT, _TOOL, _ARGUMENT, _VALUE = "Probe result", "probe_tool", "probe_argument", "probe value"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {_ARGUMENT: {"type": "string", "description": "A value."}},
                "required": [_ARGUMENT],
            },
        },
    }
]
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}

Messages = list[dict[str, Any]]


def probe_template(
    source: str | None,
    *,
    file: str | None,
    special_tokens: Mapping[str, str],
    reasoning: Sequence[tuple[str, str]] = (("<think>", "</think>"),),
    controls: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the facts about a template; with `source` None those of a model without one.

    `file` is where the template was found. `special_tokens` are the variables `bos_token`, `eos_token` and so on, as
    spellings. `reasoning` are the opening and closing delimiters that mark a reply as reasoning, `controls` the spellings
    of the tokenizer's control tokens, which are no part of what a template says.

    thinking                  the table of thinking levels, as `/v1/models` shows it
    generation_prompts        per level id, and "" for a request that names none: what a prompt that asks for a reply ends
                              with, from what `add_generation_prompt` adds on, or else from the question's end on
    generation_prompt_switch  whether `add_generation_prompt` adds something
    opens_reasoning           whether that text ends within reasoning where a request names no level
    inline_system             whether a system message after the first position renders in its place
    system                    leading, inline: "renders", "moves", "omits" or "raises"; default: the text that stands in
                              when no system message is given, or None
    developer                 what becomes of a developer message: "renders", "omits" or "raises"
    continuation              supported: whether a final assistant message can be continued; tail: the text to cut off
                              behind it; trims: whether the template strips white space at its end
    tools                     declared, calls, results: whether each reaches the prompt; arguments: "mapping" or
                              "string", the form that calls in the history must have, None without calls
    content                   string, parts: the forms of a message's content that render
    variables                 further variables that the template reads, sorted
    special_tokens            as given

    Raises InputError naming file, line and construct when the template cannot be parsed or cannot render one plain
    question.
    """
    if source is None:
        return _without_template(special_tokens)
    name = file or "chat template"
    try:
        template = ChatTemplate(source, special_tokens=special_tokens, name=name)
    except CoreError as error:
        raise InputError(str(error)) from None
    return _Probe(template, source, name, special_tokens, controls).facts(file, reasoning)


def _without_template(special_tokens: Mapping[str, str]) -> dict[str, Any]:
    return {
        "thinking": thinking_table(None, None, None, []),
        "generation_prompts": {"": ""},
        "generation_prompt_switch": False,
        "opens_reasoning": False,
        "inline_system": False,
        "system": {"leading": "omits", "inline": "omits", "default": None},
        "developer": "omits",
        "continuation": {"supported": False, "tail": None, "trims": False},
        "tools": {"declared": False, "calls": False, "results": False, "arguments": None},
        "content": {"string": False, "parts": False},
        "variables": [],
        "special_tokens": dict(special_tokens),
    }


class _Probe:
    def __init__(
        self,
        template: ChatTemplate,
        source: str,
        name: str,
        special_tokens: Mapping[str, str],
        controls: Sequence[str],
    ) -> None:
        self._template = template
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._source = source
        self._parts = False
        self._tree = Sandbox().parse(source)
        self._variables = sorted(variables_read(source) - _GIVEN - special_tokens.keys())
        self._controls = Controls([text for text in controls if text])

    def facts(self, file: str | None, reasoning: Sequence[tuple[str, str]]) -> dict[str, Any]:
        content = self._content()
        thinking = ThinkingProbe(self, self._tree, self._variables, reasoning, self._controls).table(file)
        openings = {"": self.opening({})}
        openings |= {level["id"]: self.opening(level_variables(level, thinking)) for level in thinking["levels"]}
        leading, inline = self._leading("system"), self._inline_system()
        return {
            "thinking": thinking,
            "generation_prompts": openings,
            "generation_prompt_switch": bool(self._generation_prompt({})),
            "opens_reasoning": ends_within(openings[""], reasoning),
            "inline_system": inline == "renders",
            "system": {"leading": leading, "inline": inline, "default": self._default_system()},
            "developer": self._leading("developer"),
            "continuation": self._continuation(),
            "tools": self._tools(),
            "content": content,
            "variables": self._variables,
            "special_tokens": self._special_tokens,
        }

    # Rendering

    def _message(self, role: str, text: str, **more: Any) -> dict[str, Any]:
        content: Any = [{"type": "text", "text": text}] if self._parts else text
        return {"role": role, "content": content, **more}

    def render(self, messages: Messages, *, reply: bool = False, tools: bool = False, **variables: Any) -> str | None:
        """The prompt's text; None when the template refuses or cannot render."""
        try:
            return self._template.render(
                messages, tools=_TOOLS if tools else None, add_generation_prompt=reply, **variables
            )
        except RequestError:
            return None

    def _question(self) -> Messages:
        return [self._message("user", _ASK)]

    def instructed(self) -> Messages:
        return [self._message("system", _SYSTEM), self._message("user", _ASK)]

    def conversations(self) -> list[Messages]:
        """The conversations by which levels of thinking are compared. A role that the template refuses anyway is left out."""
        conversations = [self._question(), self._dialogue()]
        if self.render(self.instructed()) is not None:
            conversations.append(self.instructed())
        return conversations

    def _dialogue(self) -> Messages:
        return [
            self._message("user", _ASK),
            self._message("assistant", _REPLY, reasoning_content="Probe reasoning"),
            self._message("user", _ASK_AGAIN),
        ]

    # One fact each

    def _content(self) -> dict[str, bool]:
        """Finds a form of content that renders, and keeps it for what follows."""
        forms: dict[str, bool] = {}
        refused: RequestError | None = None
        for form, parts in (("string", False), ("parts", True)):
            self._parts = parts
            try:
                text = self._template.render(self._question())
            except RequestError as error:
                refused = refused or error
                text = ""
            # Printing a list of parts as Python would is not rendering it.
            forms[form] = _ASK in text and "'type'" not in text and '"type"' not in text
        self._parts = not forms["string"]
        if any(forms.values()):
            return forms
        if isinstance(refused, TemplateFailure) and refused.line is not None:
            line = self._source.splitlines()[refused.line - 1].strip()
            raise InputError(f"{self._name} line {refused.line}: a plain question cannot be rendered: {line[:120]}")
        reason = "its text is left out" if refused is None else str(refused)
        raise InputError(f"{self._name}: a plain question cannot be rendered: {reason}")

    def _generation_prompt(self, variables: Mapping[str, Any]) -> str | None:
        """What `add_generation_prompt` appends; None when that cannot be told from the rest."""
        closed = self.render(self._question(), **variables)
        opened = self.render(self._question(), reply=True, **variables)
        if closed is None or opened is None or not opened.startswith(closed):
            return None
        return opened[len(closed) :]

    def opening(self, variables: Mapping[str, Any]) -> str:
        """What a prompt that asks for a reply ends with: where `add_generation_prompt` appends nothing, or something that
        cannot be told from the rest, all that stands behind the question."""
        opened = self.render(self._question(), reply=True, **variables)
        return self._generation_prompt(variables) or (opened or "").rpartition(_ASK)[2]

    def _leading(self, role: str) -> str:
        text = self.render([self._message(role, _SYSTEM), self._message("user", _ASK)], reply=True)
        if text is None:
            return "raises"
        return "renders" if _SYSTEM in text else "omits"

    def _inline_system(self) -> str:
        later = [self._message("system", _LATER), self._message("user", _ASK_AGAIN)]
        outcomes = set()
        for start in (self._question(), self.instructed()):
            text = self.render([*start, self._message("assistant", _REPLY), *later], reply=True)
            if text is None:
                outcomes.add("raises")
            elif _LATER not in text:
                outcomes.add("omits")
            elif text.find(_REPLY) < text.find(_LATER) < text.find(_ASK_AGAIN):
                outcomes.add("renders")
            else:
                outcomes.add("moves")
        return next(outcome for outcome in ("raises", "omits", "moves", "renders") if outcome in outcomes)

    def _default_system(self) -> str | None:
        """The text that takes a system message's place when there is none."""
        without, instructed = self.render(self._question()), self.render(self.instructed())
        if without is None or instructed is None or _SYSTEM not in instructed:
            return None
        before, after = instructed.split(_SYSTEM, 1)
        if len(without) > len(before) + len(after) and without.startswith(before) and without.endswith(after):
            return without[len(before) : len(without) - len(after)]
        return None

    def _continuation(self) -> dict[str, Any]:
        tails = set()
        trims = False
        for reply in (_REPLY, _REPLY_AGAIN):
            text = self.render([*self._question(), self._message("assistant", reply)])
            if text is None or reply not in text:
                return {"supported": False, "tail": None, "trims": False}
            tails.add(text[text.rfind(reply) + len(reply) :])
            spaced = self.render([*self._question(), self._message("assistant", reply + " \n")])
            trims = trims or spaced == text
        if len(tails) != 1:
            return {"supported": False, "tail": None, "trims": False}
        return {"supported": True, "tail": tails.pop(), "trims": trims}

    def _tools(self) -> dict[str, Any]:
        declared = _TOOL in (self.render(self._question(), reply=True, tools=True) or "")
        facts: dict[str, Any] = {"declared": declared, "calls": False, "results": False, "arguments": None}
        # Printing a mapping as Python would, or a string as a JSON string, is the wrong form.
        for form, arguments, wrong in (
            ("mapping", {_ARGUMENT: _VALUE}, f"'{_ARGUMENT}'"),
            ("string", f'{{"{_ARGUMENT}": "{_VALUE}"}}', f'\\"{_ARGUMENT}'),
        ):
            call = {"id": "probe0001", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
            history = [*self._question(), self._message("assistant", "", tool_calls=[call])]
            text = self.render(history, tools=True)
            if text is None or _VALUE not in text or wrong in text:
                continue
            facts |= {"calls": True, "arguments": form}
            result = self._message("tool", _RESULT, name=_TOOL, tool_call_id="probe0001")
            facts["results"] = _RESULT in (self.render([*history, result], reply=True, tools=True) or "")
            break
        return facts
