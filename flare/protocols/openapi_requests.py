"""The bodies of requests as JSON Schemas: made from the types that decode them, narrowed by what is refused after that.

A body that breaks its schema is refused. One that keeps it is served, unless the model, its context or the template are
against it, or parts of the body disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flare.core.manifest import MAX_EXPLICIT_IDS
from flare.core.sampling import VALID
from flare.protocols import (
    chat,
    chat_messages,
    completions,
    decisions,
    formats,
    messages_decoding,
    messages_fields,
    responses_fields,
    tools,
)
from flare.protocols import fields as shared
from flare.protocols import responses_decoding as items
from flare.protocols.ollama import ShowRequest
from flare.protocols.schemas import (
    ANY,
    MAYBE_TEXT,
    NULL,
    REF,
    SOME_TEXT,
    TEXT,
    Schema,
    any_of,
    array_of,
    ref,
    word,
    words,
)
from flare.protocols.thinking import SWITCH_WORDS
from flare.served import ServedModel

NOT_SERVED = "Not served: only values that ask for nothing pass."


def nullable_object(**properties: Schema) -> Schema:
    """An object, or null, with these members; others must be null."""
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": NULL}


STOP = any_of(SOME_TEXT, array_of(SOME_TEXT, maxItems=shared.MAX_STOP_STRINGS), NULL)
SWITCH: Schema = {"type": ["boolean", "null"]}
MODES = words(tools.MODES, null=True)
FUNCTION = word("function")
FORMS: Mapping[str, Mapping[str, Schema]] = {name: {"type": words(formats.TYPES)} for name in ("Format", "FlatFormat")}

THINKING: Mapping[str, Schema] = {
    "reasoning_effort": MAYBE_TEXT,
    "thinking_level": MAYBE_TEXT,
    "reasoning": nullable_object(effort=MAYBE_TEXT, summary=MAYBE_TEXT),
    "enable_thinking": SWITCH,
    "thinking": any_of(
        SWITCH,
        {
            "type": "object",
            "properties": {"type": words(SWITCH_WORDS)},
            "required": ["type"],
            "additionalProperties": False,
        },
    ),
}


@dataclass(frozen=True)
class Kind:
    """The bodies of one protocol. `roots` are their types; `name` begins the names of the types inside them.

    By the name of a type: `refused` has its fields that only take values that ask for nothing, `narrow` the schemas of
    fields that take less than their type says, `required` the fields that must be there although the type has a default.
    `inert` are fields of the roots without an effect, with the reason.
    """

    name: str
    roots: Sequence[type[msgspec.Struct]]
    parts: Sequence[type[msgspec.Struct]] = ()
    refused: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    inert: Mapping[str, str] = field(default_factory=dict)
    narrow: Mapping[str, Mapping[str, Schema]] = field(default_factory=dict)
    required: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def full(self, name: str) -> str:
        """Returns the name of a type in the document."""
        return name if name.startswith(self.name) else self.name + name


def _response_parts() -> Mapping[str, Mapping[str, Schema]]:
    """What types say with `dict` in Responses, and decode one by one."""

    def own(name: str) -> Schema:
        return ref(f"Responses{name}")

    def part(kinds: Sequence[str], said: str = "text") -> Schema:
        narrowed: Schema = {"properties": {"type": words(kinds), said: TEXT}, "required": ["type", said]}
        return {"allOf": [own("TextPart"), narrowed]}

    offered = any_of(own("FunctionTool"), own("CustomTool"))
    given = (
        own("MessageItem"),
        own("ReasoningItem"),
        own("FunctionCallItem"),
        own("CustomCallItem"),
        own("OutputItem"),
    )
    texts = any_of(TEXT, array_of(any_of(part(items.TEXT_PARTS), part(["refusal"], "refusal"))))
    thoughts = any_of(array_of(part(items.REASONING_PARTS)), NULL)
    return {
        "ResponsesRequest": {
            "input": any_of(TEXT, array_of(any_of(*given), minItems=1)),
            "tools": any_of(array_of(any_of(offered, own("NamespaceTool"))), NULL),
            "tool_choice": any_of(MODES, own("SelectedTool")),
            "stop": STOP,
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": responses_fields.MAX_METADATA,
                "propertyNames": {"maxLength": responses_fields.MAX_METADATA_NAME},
                "additionalProperties": {"type": "string", "maxLength": responses_fields.MAX_METADATA_VALUE},
            },
        },
        "MessageItem": {"type": word("message"), "role": words(items.ROLES), "content": texts},
        "ReasoningItem": {"type": word("reasoning"), "content": thoughts, "summary": thoughts},
        "FunctionCallItem": {"type": word("function_call")},
        "CustomCallItem": {"type": word("custom_tool_call")},
        "OutputItem": {"type": words(["function_call_output", "custom_tool_call_output"]), "output": texts},
        "FunctionTool": {"type": FUNCTION, "async": {"enum": [None, False]}},
        "CustomTool": {
            "type": word("custom"),
            "async": {"enum": [None, False]},
            "format": any_of(own("TextFormat"), own("GrammarFormat"), NULL),
        },
        "TextFormat": {"type": word("text")},
        "GrammarFormat": {"type": word("grammar")},
        "NamespaceTool": {"type": word("namespace"), "tools": array_of(offered)},
        "SelectedTool": {"type": words(["function", "custom"])},
    }


CHAT = Kind(
    "Chat",
    [chat.ChatRequest],
    refused={
        "OutputForm": formats.UNBUILT_OPTIONS,
        "ChatRequest": chat.UNBUILT,
        "ChatMessage": chat_messages.UNBUILT_MESSAGE,
        "ContentPart": chat_messages.UNBUILT_PART,
    },
    inert=shared.INERT,
    narrow={
        **FORMS,
        "ChatRequest": {
            **THINKING,
            "stop": STOP,
            "tool_choice": any_of(MODES, ref("ChatToolChoice")),
        },
        "ChatMessage": {"role": words(chat_messages.ROLES)},
        "ContentPart": {"type": word("text"), "text": TEXT},
        "MadeCall": {
            "type": words(["function"], null=True),
            "custom": NULL,
            "function": ref("ChatCalledFunction"),
        },
        "OfferedTool": {"type": FUNCTION, "custom": NULL, "function": ref("ChatFunctionDefinition")},
        "ToolChoice": {
            "type": FUNCTION,
            "custom": NULL,
            "allowed_tools": NULL,
            "function": ref("ChatNamedFunction"),
        },
    },
    required={
        "ContentPart": ["type", "text"],
        "MadeCall": ["id", "function"],
        "OfferedTool": ["type", "function"],
        "ToolChoice": ["type", "function"],
    },
)
COMPLETION = Kind(
    "Completion",
    [completions.CompletionRequest],
    refused={"OutputForm": formats.UNBUILT_OPTIONS, "CompletionRequest": completions.UNBUILT},
    inert=shared.INERT,
    narrow={
        **FORMS,
        "CompletionRequest": {
            **THINKING,
            "stop": STOP,
            "prompt": any_of(
                TEXT,
                array_of(TEXT, minItems=1),
                array_of({"type": "integer", "minimum": 0}, minItems=1),
                array_of(array_of({"type": "integer", "minimum": 0}, minItems=1), minItems=1),
            ),
        },
    },
)
MESSAGES = Kind(
    "Messages",
    [messages_fields.MessagesRequest, messages_fields.CountRequest],
    refused={
        "OutputForm": formats.UNBUILT_OPTIONS,
        "MessagesRequest": messages_fields.UNBUILT,
        "CountRequest": messages_fields.UNBUILT,
        "InputTool": messages_fields.UNBUILT_TOOL,
        "OutputConfig": messages_fields.UNBUILT_OUTPUT,
    },
    inert=messages_fields.INERT,
    narrow={
        **FORMS,
        "InputMessage": {"role": words(messages_decoding.ROLES)},
        **{
            name: {
                "stop_sequences": any_of(array_of(SOME_TEXT, maxItems=shared.MAX_STOP_STRINGS), NULL),
            }
            for name in ("MessagesRequest", "CountRequest")
        },
    },
)
RESPONSES = Kind(
    "Responses",
    [responses_fields.ResponsesRequest],
    parts=[
        responses_fields.MessageItem,
        responses_fields.ReasoningItem,
        responses_fields.FunctionCallItem,
        responses_fields.CustomCallItem,
        responses_fields.OutputItem,
        responses_fields.TextPart,
        responses_fields.FunctionTool,
        responses_fields.CustomTool,
        responses_fields.TextFormat,
        responses_fields.GrammarFormat,
        responses_fields.NamespaceTool,
        responses_fields.SelectedTool,
    ],
    refused={
        "OutputForm": formats.UNBUILT_OPTIONS,
        "ResponsesRequest": responses_fields.UNBUILT,
        "ReasoningFields": responses_fields.UNBUILT_REASONING,
        "TextFields": responses_fields.UNBUILT_TEXT,
        "FunctionTool": responses_fields.UNBUILT_TOOL,
        "CustomTool": responses_fields.UNBUILT_TOOL,
    },
    inert=responses_fields.INERT,
    narrow={**FORMS, **_response_parts()},
)
DECISION = Kind(
    "Decision",
    [decisions.DecisionRequest],
    parts=[
        decisions.InputMessage,
        decisions.InputPart,
        *decisions.QUESTIONS.values(),
    ],
    inert=decisions.INERT,
    narrow={
        "DecisionRequest": {
            "input": any_of(TEXT, array_of(ref("DecisionInputMessage"), minItems=1)),
            "questions": array_of(
                any_of(*(ref(f"Decision{kind.__name__}") for kind in decisions.QUESTIONS.values())),
                minItems=1,
                maxItems=decisions.MAX_QUESTIONS,
            ),
            "safety_identifier": {"type": ["string", "null"], "maxLength": decisions.MAX_IDENTIFIER},
        },
        "InputMessage": {
            "type": word("message"),
            "role": word("user"),
            "content": any_of(TEXT, array_of(ref("DecisionInputPart"))),
        },
        "InputPart": {"type": words(decisions.PARTS)},
        "PredicateQuestion": {"type": word("predicate")},
        "ChoiceQuestion": {
            "type": word("choice"),
            "choices": array_of(ref("DecisionChoice"), minItems=decisions.MIN_OPTIONS, maxItems=decisions.MAX_CHOICES),
        },
        "ScoreQuestion": {
            "type": word("score"),
            "levels": array_of(ref("DecisionLevel"), minItems=decisions.MIN_OPTIONS, maxItems=decisions.MAX_LEVELS),
        },
    },
)
SHOW = Kind("Show", [ShowRequest], narrow={"ShowRequest": {"model": SOME_TEXT, "name": SOME_TEXT}})
KINDS = (CHAT, COMPLETION, MESSAGES, RESPONSES, DECISION, SHOW)


def request_schemas(model: ServedModel) -> dict[str, Schema]:
    """Returns the schemas of all bodies and of the types inside them, by their names in the document."""
    schemas: dict[str, Schema] = {}
    for kind in KINDS:
        _, found = msgspec.json.schema_components([*kind.roots, *kind.parts], ref_template=REF + "{name}")
        roots = {root.__name__ for root in kind.roots}
        for name, schema in found.items():
            schema = _renamed(schema, kind)
            properties = schema.get("properties", {})
            properties.update(kind.narrow.get(name, {}))
            if name in roots:
                schema.pop("description", None)  # it speaks of the program
                properties.update(_of_model(model, properties))
                for inert, reason in kind.inert.items():
                    if inert in properties:
                        properties[inert] = {**properties[inert], "description": f"Without an effect: {reason}."}
            for refused, neutral in kind.refused.get(name, {}).items():
                properties[refused] = {"enum": [None, *neutral], "description": NOT_SERVED}
            schema["required"] = list(kind.required.get(name, schema.get("required", [])))
            schemas[kind.full(name)] = {**schema, "title": kind.full(name)}
    return schemas


def _of_model(model: ServedModel, properties: Mapping[str, Schema]) -> dict[str, Schema]:
    """Returns the fields whose values depend on the model. Where an author gave ranges, sampling values are moved into them."""
    fields: dict[str, Schema] = {}
    if model.ranges is None:
        for name, (low, high) in VALID.items():
            number = "integer" if name == "top_k" else "number"
            fields[name] = {"type": [number, "null"], "minimum": low, "maximum": high}
    token = {"type": "integer", "minimum": 0, "maximum": model.vocabulary - 1}
    fields["stop_token_ids"] = any_of(array_of(token, maxItems=shared.MAX_TOKEN_STOPS), NULL)
    sequence = array_of(token, minItems=1, maxItems=shared.MAX_STOP_SEQUENCE)
    fields["stop_token_sequences"] = any_of(array_of(sequence, maxItems=shared.MAX_TOKEN_STOPS), NULL)
    fields["logprob_token_ids"] = any_of(array_of(token, maxItems=MAX_EXPLICIT_IDS), NULL)
    variables = dict.fromkeys(sorted(model.variables), ANY)
    variables |= dict.fromkeys(["reasoning_effort", model.thinking["effort"] or "reasoning_effort"], MAYBE_TEXT)
    variables |= dict.fromkeys(["enable_thinking", model.thinking["toggle"] or "enable_thinking"], SWITCH)
    fields["chat_template_kwargs"] = nullable_object(**variables)
    return {name: schema for name, schema in fields.items() if name in properties}


def _renamed(value: Any, kind: Kind) -> Any:
    """Returns a schema with the document's names in its references, and without defaults that only say "not sent"."""
    if isinstance(value, list):
        return [_renamed(item, kind) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return ref(kind.full(value["$ref"].removeprefix(REF)))
    if "discriminator" in value:
        names = value["discriminator"]["mapping"]
        mapping = {tag: REF + kind.full(target.removeprefix(REF)) for tag, target in names.items()}
        return {
            **_renamed({key: item for key, item in value.items() if key != "discriminator"}, kind),
            "discriminator": {**value["discriminator"], "mapping": mapping},
        }
    return {key: _renamed(item, kind) for key, item in value.items() if not (key == "default" and item is None)}
