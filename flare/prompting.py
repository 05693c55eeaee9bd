"""From a neutral conversation to its prompt: what the chat template renders of system texts, results and tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flare.conversation import Constraint, Conversation, Message, Tool, ToolCall, Tools, qualified
from flare.errors import RequestError
from flare.served import ServedModel
from flare.thinking import opens_reasoning, template_variables

if TYPE_CHECKING:
    from flare.text.template import ChatTemplate
    from flare.text.tokenizer import Tokenizer

CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""How a custom tool, which takes one text, is shown to the model."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

ANSWER_IN_JSON = "Your answer must be a JSON object and nothing else, without a code block around it."
ANSWER_IN_SCHEMA = (
    "Your answer must be JSON of the following JSON Schema and nothing else, without a code block around it.\n\n"
)
"""What the system message says in addition where the answer is bound to JSON."""

CALL_A_TOOL = "Your next message must call a tool."
"""What the system message says in addition where a call is required."""


class Prompt(NamedTuple):
    """A prompt in tokens. `opens_reasoning`: it ends within reasoning."""

    tokens: list[int]
    opens_reasoning: bool = False


def render_conversation(
    conversation: Conversation,
    field: str,
    model: ServedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    constraint: Constraint | None = None,
    least: int | None = None,
) -> Prompt:
    """Returns the prompt of a conversation, which the request has in `field`. `least` are the tokens that a reply has at least,
    None where nothing replies and a prompt may have any length.

    Raises RequestError where there is no prompt, and where its length shows that it leaves no room for the reply.
    """
    from flare.text.prompt import render_prompt
    from flare.text.template import TemplateError

    check_tools(conversation.tools)
    tail = model.continuation
    if conversation.continue_final and tail is None:
        raise _cannot_continue(field)
    if conversation.continue_final and not conversation.messages[-1].text.strip():
        text = "the last one is to be continued and has no text; give it some, or end with a user's message"
        raise RequestError(f"{field}: {text}", param=field)
    messages = template_messages(
        conversation.messages,
        inline_system=model.inline_system,
        leading_system=model.leading_system,
        parts=model.content_parts,
        arguments=model.tool_arguments,
        tools=conversation.tools,
        default_system=model.default_system,
        constraint=constraint,
    )
    tools = template_tools(conversation.tools)
    controls = template_variables(conversation.thinking, model.thinking)

    def render(reply: bool, *, bare: bool = False) -> tuple[str, str]:
        variables = controls if bare else conversation.variables | controls
        return render_prompt(
            tokenizer, template, messages, tools=tools, add_generation_prompt=reply, variables=variables
        )

    replies = conversation.add_generation_prompt and not conversation.continue_final
    try:
        text, mark = render(replies)
    except TemplateError as error:
        raise _not_rendered(error, field, conversation, lambda: render(replies, bare=True)) from None
    begins = (replies or not model.generation_prompt_switch) and not conversation.continue_final
    opens = begins and opens_reasoning(conversation.thinking, model.thinking, otherwise=model.opens_reasoning)
    if replies and conversation.variables and model.output.reasoning is not None and model.generation_prompt_switch:
        # Nobody has probed what these variables do to the end of the prompt.
        opens = ends_within(_without(*render(False)), _without(text, mark), model.output.reasoning, otherwise=opens)
    if conversation.continue_final:
        assert tail is not None
        text = _continued(text, tail, conversation.messages[-1].text, mark, field)
    if least is not None:
        model.check_room(tokenizer.fewest_tokens(text, mark), field, least=least, counted=False)
    tokens = tokenizer.encode_rendered(text, mark)
    if not tokens:
        text = "the chat template makes nothing of it; send text, or leave out add_generation_prompt"
        raise RequestError(f"{field}: {text}", param=field)
    return Prompt(tokens, opens)


def _not_rendered(
    error: RequestError, field: str, conversation: Conversation, bare: Callable[[], object]
) -> RequestError:
    """Returns the refusal of what the template does not render: of the further variables, where it renders without them."""
    if conversation.variables:
        try:
            bare()
        except RequestError:
            pass
        else:
            names = ", ".join(name[:80] for name in sorted(conversation.variables))
            text = f"chat_template_kwargs: {error}; it does without {names}: change or leave out what it cannot take"
            return RequestError(text, param="chat_template_kwargs")
    return RequestError(str(error), param=field)


def _continued(rendered: str, tail: str, said: str, mark: str, field: str) -> str:
    """Returns a prompt that ends with the last message as it was sent, white space included, which templates may strip."""
    if rendered.endswith(tail):
        rendered = rendered[: len(rendered) - len(tail)]
        stripped = said.rstrip()
        ends = rendered.rstrip()
        if stripped and _without(ends, mark).endswith(stripped[-1]):
            return ends + said[len(stripped) :]
    raise _cannot_continue(field)


def _cannot_continue(field: str) -> RequestError:
    text = "this model's chat template cannot continue this message; end with a user's message"
    return RequestError(f"{field}: {text}", param=field)


def ends_within(closed: str, opened: str, reasoning: tuple[str, str], *, otherwise: bool) -> bool:
    """Whether what `add_generation_prompt` adds to a prompt ends within reasoning; `otherwise` where that cannot be told."""
    if not opened.startswith(closed):
        return otherwise
    added = opened[len(closed) :]
    return added.rfind(reasoning[0]) > added.rfind(reasoning[1])


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "") if mark else text


def template_messages(
    messages: Sequence[Message],
    *,
    inline_system: bool,
    leading_system: bool = True,
    parts: bool = False,
    arguments: str = "mapping",
    tools: Tools | None = None,
    default_system: str | None = None,
    constraint: Constraint | None = None,
) -> list[dict[str, Any]]:
    """Returns the messages as the template's plain dictionaries.

    With a developer message present, all system and developer texts become one leading system message whose sections
    keep their role as a tag, in request order. Otherwise a system message after the first position stays where it is if
    the template has `inline_system`, and else becomes a user message with its text in <system> tags. Empty system
    messages are left out. Where the template has no `leading_system`, what would be one stands in <system> tags before the
    text of the user's message behind it, or is one of its own: such templates often want users and assistants to take turns.
    A result without a name has that of the tool whose call it answers. `arguments` is the form of a call's arguments:
    "mapping" or "string" (JSON), `parts` that of contents: a list of one text part instead of a string.

    Where `tools` require a call, or a `constraint` says so, the leading system message ends with instructions. If there is
    none, `default_system`, what the template says without a system message, is said before them.
    """
    messages = [m for m in in_call_order(messages) if m.text or m.role not in ("system", "developer")]
    rendered: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    tagged = any(message.role == "developer" for message in messages)
    if tagged:
        sections = [m for m in messages if m.role in ("system", "developer")]
        leading = "\n\n".join(f"<{m.role}>\n{m.text}\n</{m.role}>" for m in sections)
        rendered.append({"role": "system", "content": leading})
        messages = [m for m in messages if m.role not in ("system", "developer")]
    for message in messages:
        if message.role == "system" and rendered and not inline_system:
            rendered.append({"role": "user", "content": _tagged(message.text)})
        else:
            names |= {call.id: qualified(call.namespace, call.name) for call in message.calls}
            rendered.append(_plain(message, arguments, names))
    if constraint is not None and constraint.instruct:
        _instruct(rendered, default_system, answer_instruction(constraint))
    if tools is not None and tools.choice == "required":
        _instruct(rendered, default_system, CALL_A_TOOL)
    if not leading_system and rendered and rendered[0]["role"] == "system":
        _lead_by_user(rendered, tagged=tagged)
    if parts:
        for plain in rendered:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
    return rendered


def answer_instruction(constraint: Constraint) -> str:
    """What a model is told of the JSON that it has to answer with; members of the schema stay in the order that they have."""
    if constraint.kind == "json_object":
        return ANSWER_IN_JSON
    return ANSWER_IN_SCHEMA + msgspec.json.encode(constraint.definition).decode()


def _tagged(text: str) -> str:
    return f"<system>\n{text}\n</system>"


def _lead_by_user(rendered: list[dict[str, Any]], *, tagged: bool) -> None:
    """Makes the leading system message, whose sections may be `tagged` by their roles, the beginning of a user's."""
    text = rendered[0]["content"] if tagged else _tagged(rendered[0]["content"])
    if len(rendered) > 1 and rendered[1]["role"] == "user":
        del rendered[0]
        text += f"\n\n{rendered[0]['content']}"
    rendered[0] = {"role": "user", "content": text}


def _instruct(rendered: list[dict[str, Any]], default_system: str | None, instruction: str) -> None:
    """Adds an instruction to the leading system message."""
    if rendered and rendered[0]["role"] == "system":
        rendered[0]["content"] += f"\n\n{instruction}"
    else:
        said = f"{default_system}\n\n{instruction}" if default_system else instruction
        rendered.insert(0, {"role": "system", "content": said})


def check_tools(tools: Tools) -> None:
    """Raises RequestError for tools that the model could not tell apart."""
    if len(tools.declared) < len(tools.offered):
        ((name, _),) = Counter(qualified(tool.namespace, tool.name) for tool in tools.offered).most_common(1)
        text = f"tools: the model would know two tools as {name[:100]!r}; rename one of them or its namespace"
        raise RequestError(text, param="tools")


def template_tools(tools: Tools) -> list[dict[str, Any]] | None:
    """Returns what the template shows of the tools: all of them, only the selected one, or none."""
    if tools.choice == "none" or not tools.offered:
        return None
    shown = _selected(tools) if tools.choice == "named" else tools.offered
    return [
        {
            "type": "function",
            "function": {
                "name": qualified(tool.namespace, tool.name),
                "description": _description(tool),
                "parameters": CUSTOM_PARAMETERS if tool.custom else tool.parameters or NO_PARAMETERS,
            },
        }
        for tool in shown
    ]


def _description(tool: Tool) -> str:
    """What the model is told about a tool, the contract of its input included."""
    if tool.grammar is None:
        return tool.description or ""
    kind = "this Lark grammar" if tool.grammar.syntax == "lark" else "this regular expression"
    contract = f"The whole input must match {kind}:\n{tool.grammar.definition}"
    return f"{tool.description}\n\n{contract}" if tool.description else contract


def _selected(tools: Tools) -> tuple[Tool, ...]:
    return tuple(tool for tool in tools.offered if (tool.namespace, tool.name) == (tools.namespace, tools.name))


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with the results of parallel calls in the order of the calls.

    Only where their ids are unique and are exactly those of the assistant message before; what stands between two
    results stays where it is, and no result moves across another assistant message.
    """
    ordered = list(messages)
    for index, message in enumerate(messages):
        if not message.calls:
            continue
        end = next((i for i in range(index + 1, len(messages)) if messages[i].role == "assistant"), len(messages))
        places = [i for i in range(index + 1, end) if messages[i].role == "tool"]
        results = {messages[i].call_id: messages[i] for i in places}
        ids = [call.id for call in message.calls]
        if len(results) == len(places) == len(set(ids)) == len(ids) and results.keys() == set(ids):
            for place, id in zip(places, ids, strict=True):
                ordered[place] = results[id]
    return ordered


def _plain(message: Message, arguments: str, names: Mapping[str | None, str]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": qualified(call.namespace, call.name),
                    "arguments": _arguments(call, arguments),
                },
            }
            for call in message.calls
        ]
    if message.role == "tool":
        plain["tool_call_id"] = message.call_id
        name = message.name if message.name is not None else names.get(message.call_id)
        if name is not None:
            plain["name"] = name
    return plain


def _arguments(call: ToolCall, form: str) -> Any:
    """Returns the arguments in the form that the template takes: a mapping, or its JSON text."""
    if call.custom:
        value = {"input": call.arguments}
        return value if form == "mapping" else msgspec.json.encode(value).decode()
    return msgspec.json.decode(call.arguments) if form == "mapping" else call.arguments
