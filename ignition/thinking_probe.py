"""The levels of thinking that a chat template offers, found by giving its variables values and comparing the renderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Protocol

from jinja2 import nodes

from flare.text.controls import Controls
from flare.text.template import EFFORTS, TOGGLES
from ignition.template_reading import compared

MODE = "thinking_mode"
"""The variable by which templates in use are told a named mode, which is a switch and an effort."""

NAMES = ("minimal", "low", "medium", "high", "xhigh")
"""The API's efforts, which a template gets that prints whatever it is given."""

SYSTEM = "Probe system text"
"""The text of the system message in `Renderings.instructed`."""

_MODES: Mapping[str, tuple[str, bool | None]] = {"disabled": ("none", False), "enabled": ("on", True)}
# Ids and switches of modes; another mode is a level of its own name.

_UNHEARD = ("probeeffort", "probevalue")
# Efforts that no template compares with.

Messages = list[dict[str, Any]]


class Renderings(Protocol):
    """What is asked of a template."""

    def render(self, messages: Messages, *, reply: bool = False, **variables: Any) -> str | None:
        """The prompt's text, with the beginning of a reply; None when the template refuses or cannot render."""
        ...

    def opening(self, variables: Mapping[str, Any]) -> str:
        """What a prompt that asks for a reply ends with."""
        ...

    def conversations(self) -> list[Messages]:
        """Conversations by which levels are compared."""
        ...

    def instructed(self) -> Messages:
        """A conversation that begins with the system message SYSTEM."""
        ...


class ThinkingProbe:
    """`tree` and `variables` are the template's source and what it reads, `reasoning` the delimiters of reasoning."""

    def __init__(
        self,
        renderings: Renderings,
        tree: nodes.Template,
        variables: Sequence[str],
        reasoning: Sequence[tuple[str, str]],
        controls: Controls,
    ) -> None:
        self._renderings = renderings
        self._tree = tree
        self._variables = variables
        self._reasoning = reasoning
        self._controls = controls
        self._conversations = renderings.conversations()
        self._untouched = self._views({})

    def table(self, file: str | None) -> dict[str, Any]:
        """Returns the levels in the order none, efforts as the template names them; `on` when it has no efforts.

        A mode is an effort, too, whose values `disabled` and `enabled` are the levels none and on.
        """
        toggle = next((name for name in TOGGLES if self._switches(name)), None)
        thinks = None if toggle is None else True
        given = {} if toggle is None else {toggle: True}
        for effort in EFFORTS:
            names = [name for name in self._efforts(effort, given) if name != "none" or toggle is None]
            if names:
                break
        levels = [_level(name, thinks, name) for name in names]
        if toggle is not None:
            levels = [_level("none", False, None), *(levels or [_level("on", True, None)])]
        elif not names:
            effort = MODE
            levels = [_level(*_MODES.get(mode, (mode, None)), mode) for mode in self._compared(MODE, {})]
            levels.sort(key=lambda level: level["id"] != "none")
        named = any(level["reasoning_effort"] is not None for level in levels)
        table = thinking_table(file, toggle, effort if named else None, levels)
        for level in levels:
            opening = self._renderings.opening(level_variables(level, table))
            level["opens_reasoning"] = ends_within(opening, self._reasoning)
        default = next(
            (level for level in levels if self._views(level_variables(level, table)) == self._untouched), None
        )
        if default is not None:
            default["default"] = True
            table["default_level"] = default["id"]
        self._add_instructions(table)
        return table

    def _views(self, variables: Mapping[str, Any]) -> list[str | None]:
        """A level's renderings of the conversations."""
        return [self._renderings.render(messages, reply=True, **variables) for messages in self._conversations]

    def _renders(self, variables: Mapping[str, Any]) -> bool:
        """Whether the variables let everything render that renders without them."""
        return not any(
            view is None and plain is not None
            for view, plain in zip(self._views(variables), self._untouched, strict=True)
        )

    def _switches(self, variable: str) -> bool:
        """Whether a variable switches thinking: both of its values render, and differently."""
        if variable not in self._variables:
            return False
        on, off = {variable: True}, {variable: False}
        return self._renders(on) and self._renders(off) and self._views(on) != self._views(off)

    def _efforts(self, variable: str, given: Mapping[str, Any]) -> list[str]:
        """The efforts that a variable can be given, as the template compares or, where it prints any, as the API has them."""
        if variable not in self._variables:
            return []
        names = self._compared(variable, given)
        if names:
            return names + self._unnamed(variable, names, given)
        said = [self._views({**given, variable: name}) for name in _UNHEARD]
        printed = all(
            one is not None and other is not None and one.replace(_UNHEARD[0], _UNHEARD[1]) == other and one != other
            for one, other in zip(*said, strict=True)
        )
        return list(NAMES) if printed else []

    def _compared(self, variable: str, given: Mapping[str, Any]) -> list[str]:
        """The values that the template compares a variable with, without those that make it refuse."""
        if variable not in self._variables:
            return []
        return [value for value in compared(self._tree, variable) if self._renders({**given, variable: value})]

    def _unnamed(self, variable: str, names: Sequence[str], given: Mapping[str, Any]) -> list[str]:
        """The effort that stands where no other is named, by the word that the template says in place of another's name.

        Such a template compares with all efforts but one, and says that one whatever else it is given.
        """
        plain = self._untouched[0]
        if plain is None or any(self._views({**given, variable: name}) == self._untouched for name in names):
            return []
        for name in names:
            text = self._views({**given, variable: name})[0] or ""
            start = len(commonprefix([text, plain]))
            end = len(commonprefix([text[start:][::-1], plain[start:][::-1]]))
            while start and text[start - 1].isalnum():
                start -= 1
            while end and text[-end].isalnum():
                end -= 1
            said, word = text[start : len(text) - end], plain[start : len(plain) - end].lower()
            if said.lower() == name and word.isalnum() and self._views({**given, variable: word}) == self._untouched:
                return [word]
        return []

    def _add_instructions(self, table: dict[str, Any]) -> None:
        """What each level puts between the system message's opening and its text."""
        levels = table["levels"]
        if not levels:
            return
        instructed = self._renderings.instructed()
        views = [self._renderings.render(instructed, reply=True, **level_variables(level, table)) for level in levels]
        openings = [text.split(SYSTEM, 1)[0] for text in views if text is not None and SYSTEM in text]
        if len(openings) != len(levels):
            return
        untouched = self._renderings.render(instructed, reply=True) or ""
        known = [*openings, untouched.split(SYSTEM, 1)[0]] if SYSTEM in untouched else openings
        shared = commonprefix(known)
        if shared not in known:
            # Every level says something, perhaps in the same first words: what they share ends with the opening itself.
            shared = shared[: max(shared.rfind(end) for end in "\n>]") + 1]
        said = [opening[len(shared) :] for opening in openings]
        closing = min(said, key=len)  # of a level that says nothing, if all others end with it
        if not closing or not all(text.endswith(closing) for text in said):
            speaking = {text for text in said if text}
            closing = _line_end(commonprefix([text[::-1] for text in speaking])[::-1]) if len(speaking) > 1 else ""
        for level, text in zip(levels, said, strict=True):
            level["instruction"] = self._instruction(text.removesuffix(closing)) or None

    def _instruction(self, said: str) -> str:
        """The text among the controls and their attributes: the longest run, or the controls where there is no text."""
        runs, rest = [], said
        for control in self._controls.sequence(said):
            run, _, rest = rest.partition(control)
            runs.append(run.strip())
        longest = max([*runs, rest.strip()], key=len)
        return longest or said.strip()


def thinking_table(
    file: str | None, toggle: str | None, effort: str | None, levels: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "supported": bool(levels),
        "source": file,
        "toggle": toggle,
        "effort": effort,
        "default_level": None,
        "levels": levels,
    }


def level_variables(level: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The template variables that a level sets."""
    given = {table["toggle"]: level["enable_thinking"], table["effort"]: level["reasoning_effort"]}
    return {name: value for name, value in given.items() if name is not None and value is not None}


def ends_within(prompt: str, reasoning: Sequence[tuple[str, str]]) -> bool:
    """Whether a text ends within reasoning."""
    return any(prompt.rfind(begin) > prompt.rfind(end) for begin, end in reasoning)


def _level(id: str, thinks: bool | None, effort: str | None) -> dict[str, Any]:
    level = {"id": id, "enable_thinking": thinks, "reasoning_effort": effort, "instruction": None}
    return level | {"opens_reasoning": False, "default": False}


def _line_end(text: str) -> str:
    """The part of an end that texts share from which on it is structure: behind the words of its first line."""
    at = min((place for place in (text.find(begin) for begin in "\n<[") if place >= 0), default=len(text))
    return text[at:]
