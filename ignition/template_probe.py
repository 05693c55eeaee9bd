"""What a chat template can do, found by rendering small conversations with it and comparing the results.

Nothing here knows a model by name. The result is plain data for the manifest; what its fields mean is said once, where
they are made, in `probe_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from flare.errors import CoreError, InputError, RequestError
from flare.text.sandbox import Sandbox
from flare.text.template import ChatTemplate, TemplateFailure
from ignition.template_reading import compared, variables_read

TOGGLES = ("enable_thinking", "thinking")
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
MODE = "thinking_mode"
"""Variables by which templates in use are told about thinking: a switch, a named effort, and a named mode that is both."""

_MODES: Mapping[str, tuple[str, bool | None]] = {"disabled": ("none", False), "enabled": ("on", True)}
# Ids and switches of modes; another mode is a level of its own name.

# Texts that no template changes or contains by chance.
_SYSTEM, _LATER = "Probe system text", "Probe later system text"
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
) -> dict[str, Any]:
    """Returns the facts about a template; with `source` None those of a model without one.

    `file` is where the template was found. `special_tokens` are the variables `bos_token`, `eos_token` and so on, as
    spellings. `reasoning` are the opening and closing delimiters that mark a reply as reasoning.

    thinking                  the table of thinking levels, as `/v1/models` shows it
    generation_prompts        per level id, and "" for a request that names none: the text that opens the reply
    generation_prompt_switch  whether `add_generation_prompt` decides about that text
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
    return _Probe(template, source, name, special_tokens).facts(file, reasoning)


def _without_template(special_tokens: Mapping[str, str]) -> dict[str, Any]:
    return {
        "thinking": _thinking_table(None, None, None, []),
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


def _thinking_table(
    file: str | None, toggle: str | None, effort: str | None, levels: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "supported": bool(levels),
        "source": file,
        "toggle": toggle,
        "effort": effort,
        "default_level": next((level["id"] for level in levels if level["default"]), None),
        "levels": levels,
    }


class _Probe:
    def __init__(self, template: ChatTemplate, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._source = source
        self._parts = False
        self._tree = Sandbox().parse(source)
        self._variables = sorted(variables_read(source) - _GIVEN - special_tokens.keys())

    def facts(self, file: str | None, reasoning: Sequence[tuple[str, str]]) -> dict[str, Any]:
        content = self._content()
        thinking = self._thinking(file, reasoning)
        prompts = {"": self._generation_prompt({})}
        prompts |= {level["id"]: self._generation_prompt(_variables(level, thinking)) for level in thinking["levels"]}
        leading, inline = self._leading("system"), self._inline_system()
        return {
            "thinking": thinking,
            "generation_prompts": {level: text or "" for level, text in prompts.items()},
            "generation_prompt_switch": bool(prompts[""]),
            "opens_reasoning": _opens(prompts[""] or "", reasoning),
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

    def _render(self, messages: Messages, *, reply: bool = False, tools: bool = False, **variables: Any) -> str | None:
        """The prompt's text; None when the template refuses or cannot render."""
        try:
            return self._template.render(
                messages, tools=_TOOLS if tools else None, add_generation_prompt=reply, **variables
            )
        except RequestError:
            return None

    def _question(self) -> Messages:
        return [self._message("user", _ASK)]

    def _instructed(self) -> Messages:
        return [self._message("system", _SYSTEM), self._message("user", _ASK)]

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
        closed = self._render(self._question(), **variables)
        opened = self._render(self._question(), reply=True, **variables)
        if closed is None or opened is None or not opened.startswith(closed):
            return None
        return opened[len(closed) :]

    def _leading(self, role: str) -> str:
        text = self._render([self._message(role, _SYSTEM), self._message("user", _ASK)], reply=True)
        if text is None:
            return "raises"
        return "renders" if _SYSTEM in text else "omits"

    def _inline_system(self) -> str:
        later = [self._message("system", _LATER), self._message("user", _ASK_AGAIN)]
        outcomes = set()
        for start in (self._question(), self._instructed()):
            text = self._render([*start, self._message("assistant", _REPLY), *later], reply=True)
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
        without, instructed = self._render(self._question()), self._render(self._instructed())
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
            text = self._render([*self._question(), self._message("assistant", reply)])
            if text is None or reply not in text:
                return {"supported": False, "tail": None, "trims": False}
            tails.add(text[text.rfind(reply) + len(reply) :])
            spaced = self._render([*self._question(), self._message("assistant", reply + " \n")])
            trims = trims or spaced == text
        if len(tails) != 1:
            return {"supported": False, "tail": None, "trims": False}
        return {"supported": True, "tail": tails.pop(), "trims": trims}

    def _tools(self) -> dict[str, Any]:
        declared = _TOOL in (self._render(self._question(), reply=True, tools=True) or "")
        facts: dict[str, Any] = {"declared": declared, "calls": False, "results": False, "arguments": None}
        # Printing a mapping as Python would, or a string as a JSON string, is the wrong form.
        for form, arguments, wrong in (
            ("mapping", {_ARGUMENT: _VALUE}, f"'{_ARGUMENT}'"),
            ("string", f'{{"{_ARGUMENT}": "{_VALUE}"}}', f'\\"{_ARGUMENT}'),
        ):
            call = {"id": "probe0001", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
            history = [*self._question(), self._message("assistant", "", tool_calls=[call])]
            text = self._render(history, tools=True)
            if text is None or _VALUE not in text or wrong in text:
                continue
            facts |= {"calls": True, "arguments": form}
            result = self._message("tool", _RESULT, name=_TOOL, tool_call_id="probe0001")
            facts["results"] = _RESULT in (self._render([*history, result], reply=True, tools=True) or "")
            break
        return facts

    # Thinking levels

    def _thinking(self, file: str | None, reasoning: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The table of levels, in the order none, efforts as the template names them; `on` when it has no efforts.

        A mode is an effort, too, whose values `disabled` and `enabled` are the levels none and on.
        """
        untouched = self._views({})
        toggle = next((name for name in TOGGLES if self._views({name: True}) != self._views({name: False})), None)
        thinks = None if toggle is None else True
        given = {} if toggle is None else {toggle: True}
        for effort in EFFORTS:
            names = [name for name in self._accepted(effort, given, untouched) if name != "none" or toggle is None]
            if names:
                break
        levels = [_level(name, thinks, name) for name in names]
        if toggle is not None:
            levels = [_level("none", False, None), *(levels or [_level("on", True, None)])]
        elif not names:
            effort = MODE
            levels = [_level(*_MODES.get(mode, (mode, None)), mode) for mode in self._accepted(MODE, {}, untouched)]
            levels.sort(key=lambda level: level["id"] != "none")
        named = any(level["reasoning_effort"] is not None for level in levels)
        table = _thinking_table(file, toggle, effort if named else None, levels)
        for level in levels:
            level["opens_reasoning"] = _opens(self._generation_prompt(_variables(level, table)) or "", reasoning)
        default = next((level for level in levels if self._views(_variables(level, table)) == untouched), None)
        if default is not None:
            default["default"] = True
            table["default_level"] = default["id"]
        self._add_instructions(table)
        return table

    def _accepted(self, variable: str, given: Mapping[str, Any], untouched: list[str | None]) -> list[str]:
        """The values that the template compares a variable with, without those that make it refuse."""
        if variable not in self._variables:
            return []
        return [
            value
            for value in compared(self._tree, variable)
            if not any(
                view is None and plain is not None
                for view, plain in zip(self._views({**given, variable: value}), untouched, strict=True)
            )
        ]

    def _views(self, variables: Mapping[str, Any]) -> list[str | None]:
        """A level's renderings of the probe conversations. A role that the template refuses anyway is left out."""
        conversations = [self._question(), self._dialogue()]
        if self._render(self._instructed()) is not None:
            conversations.append(self._instructed())
        return [self._render(messages, reply=True, **variables) for messages in conversations]

    def _add_instructions(self, table: dict[str, Any]) -> None:
        """What each level puts between the system message's opening and its text."""
        levels = table["levels"]
        texts = [self._render(self._instructed(), reply=True, **_variables(level, table)) for level in levels]
        openings = [text.split(_SYSTEM, 1)[0] for text in texts if text is not None and _SYSTEM in text]
        if len(openings) != len(levels):
            return
        untouched = self._render(self._instructed(), reply=True) or ""
        known = [*openings, untouched.split(_SYSTEM, 1)[0]] if _SYSTEM in untouched else openings
        shared = commonprefix(known)
        if shared not in known:
            # Every level says something, perhaps in the same first words: what they share ends with the opening itself.
            shared = shared[: max(shared.rfind(end) for end in "\n>]") + 1]
        for level, opening in zip(levels, openings, strict=True):
            level["instruction"] = opening[len(shared) :].strip() or None


def _level(id: str, thinks: bool | None, effort: str | None) -> dict[str, Any]:
    level = {"id": id, "enable_thinking": thinks, "reasoning_effort": effort, "instruction": None}
    return level | {"opens_reasoning": False, "default": False}


def _variables(level: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The template variables that a level sets."""
    given = {table["toggle"]: level["enable_thinking"], table["effort"]: level["reasoning_effort"]}
    return {name: value for name, value in given.items() if name is not None and value is not None}


def _opens(prompt: str, reasoning: Sequence[tuple[str, str]]) -> bool:
    """Whether a text ends within reasoning."""
    return any(prompt.rfind(begin) > prompt.rfind(end) for begin, end in reasoning)
