"""Rendering a conversation so that no message can write the template's control tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from flare.errors import RequestError
from flare.text.template import ChatTemplate
from flare.text.tokenizer import Tokenizer

_RESERVED = {"self", "messages", "tools", "documents", "add_generation_prompt", "clock", "mark"}


class Rendered(NamedTuple):
    """A prompt's text, and the mark that breaks control spellings in it ("" when it has none).

    Its token ids are `tokenizer.encode_rendered(*rendered)`. `text` may be cut before that, but not between a mark and
    the character before it.
    """

    text: str
    mark: str


def render_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    clock: Callable[[], datetime] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """Renders with every control spelling in messages, tools and variables broken (see `flare.text.controls`).

    A template could join or shorten strings and so form a spelling out of harmless parts. Where the request holds the
    beginning of one, the prompt is rendered a second time with all beginnings broken; if the two differ in their
    controls, the second one counts. What is left to the template's author is to print the beginning of a control right
    before a message's text, as in `"<" ~ name ~ ">"`.

    Raises RequestError as `ChatTemplate.render` does, and for variables that would replace the conversation.
    """
    for name in variables or {}:
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param}: not a variable that a request can set; leave it out", param=param)
    request = [list(messages), None if tools is None else list(tools), dict(variables or {})]

    def render(strict: bool) -> tuple[Rendered, bool]:
        (said, offered, given), mark, loose = tokenizer.controls.protect(request, strict=strict, avoid=template.source)
        text = template.render(
            said, tools=offered, add_generation_prompt=add_generation_prompt, clock=clock, mark=mark, **given
        )
        return Rendered(text, mark), loose

    rendered, loose = render(strict=False)
    if loose:
        strict, _ = render(strict=True)
        controls = tokenizer.controls.sequence
        if controls(rendered.text) != controls(strict.text):
            return strict
    return rendered


def encode_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of `render_prompt` with the same options."""
    return tokenizer.encode_rendered(*render_prompt(tokenizer, template, messages, **options))
