"""What a request allows of calls, checked while they come, and the client's own names put back."""

from __future__ import annotations

import msgspec

from flare.conversation import MAX_TOOL_NAME, Tool, ToolCall, Tools, name_fault, qualified
from flare.grammar import MatchError, TextGrammar
from flare.output.interface import OutputError

LONGEST_NAME = 2 * MAX_TOOL_NAME + len("__")
"""Most characters of the name by which the model knows a declared tool."""


class Rules:
    """The calls of one choice. `shows_text`: answer text beside calls belongs to the answer."""

    __slots__ = ("_begun", "_completed", "_prefix", "_selected", "_tools", "shows_text")

    def __init__(self, tools: Tools, prefix: str) -> None:
        """`prefix` begins every call's id."""
        self._tools = tools
        self._prefix = prefix
        self._selected = qualified(tools.namespace, tools.name or "") if tools.choice == "named" else None
        self._begun = 0
        self._completed = 0
        self.shows_text = tools.choice != "named"

    def begin(self) -> None:
        """Takes note that the model has begun a call. Raises OutputError for one too many."""
        self._begun += 1
        if self._begun > 1 and not self._tools.parallel:
            raise OutputError("the model began a second tool call, and the request allows one")

    @property
    def begun(self) -> bool:
        """Whether the model has begun a call."""
        return self._begun > 0

    def complete(self, name: str, arguments: str) -> ToolCall:
        """Returns the call that the client gets. Raises OutputError for one that must not reach it."""
        if self._selected is not None and name != self._selected:
            raise OutputError(f"the model called {name[:80]!r}, and the request selected {self._selected[:80]!r}")
        id = f"{self._prefix}_{self._begun}"
        tool = self._tools.declared.get(name)
        if tool is None:
            if fault := name_fault(name):
                raise OutputError(f"the model called a tool by a name that could not be sent back: {fault}")
            return ToolCall(id, name, arguments)
        self._completed += 1
        if tool.custom:
            arguments = _custom_input(tool, arguments)
        return ToolCall(id, tool.name, arguments, tool.namespace, tool.custom)

    def end(self) -> None:
        """Raises OutputError when the answer lacks a call that the request demands."""
        if self._completed:
            return
        if self._selected is not None:
            raise OutputError(f"the model completed no call of {self._selected[:80]!r}, and the request selected it")
        if self._tools.choice == "required":
            raise OutputError("the model completed no call of a declared tool, and the request demands one")


def _custom_input(tool: Tool, arguments: str) -> str:
    members = msgspec.json.decode(arguments)
    text = members.get("input")
    if len(members) != 1 or not isinstance(text, str):
        raise OutputError(f"the model called {tool.name[:80]!r} with something else than one text as its input")
    if tool.grammar is not None:
        _check_grammar(tool.grammar, tool.name, text)
    return text


def _check_grammar(grammar: TextGrammar, name: str, text: str) -> None:
    try:
        matches = grammar.matches(text)
    except MatchError as error:
        raise OutputError(f"the model called {name[:80]!r} with an input {error}") from None
    if not matches:
        raise OutputError(f"the model called {name[:80]!r} with an input that is not of the tool's grammar")
