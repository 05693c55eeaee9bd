"""From a neutral conversation to the messages that the chat template renders: where system text may stand."""

from __future__ import annotations

from collections.abc import Sequence

from flare.conversation import Message


def template_messages(messages: Sequence[Message], *, inline_system: bool) -> list[dict[str, str]]:
    """Returns the messages as the template's plain dictionaries.

    With a developer message present, all system and developer texts become one leading system message whose sections
    keep their role as a tag, in request order. Otherwise a system message after the first position stays where it is if
    the template has `inline_system`, and else becomes a user message with its text in <system> tags.
    """
    if any(message.role == "developer" for message in messages):
        sections = [m for m in messages if m.role in ("system", "developer")]
        leading = "\n\n".join(f"<{m.role}>\n{m.text}\n</{m.role}>" for m in sections)
        rest = [_plain(m) for m in messages if m.role not in ("system", "developer")]
        return [{"role": "system", "content": leading}, *rest]
    rendered = []
    for position, message in enumerate(messages):
        if message.role == "system" and position and not inline_system:
            rendered.append({"role": "user", "content": f"<system>\n{message.text}\n</system>"})
        else:
            rendered.append(_plain(message))
    return rendered


def _plain(message: Message) -> dict[str, str]:
    plain = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    return plain
