"""Outside truth for prompts: the native renderers and tokenizers of `tml-renderers`, and DeepSeek's own encoders.

Neither uses chat templates or the tokenizers library: they get a conversation and give a prompt's text or token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import deepseek_recipe as recipe
from tml_renderers import chat, renderers
from tml_renderers import tokenizers as native
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flare.conversation import Message, Tool
from flare.text.tokenizer import Tokenizer as Wrapped
from tests.support.shared import shared

# Pre-tokenizers as the checkpoints' tokenizer.json files have them.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NEMOTRON = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "deepseek4": (native.DeepSeekV4Tokenizer, _DEEPSEEK),
    "deepseek41": (native.DeepSeekV41Tokenizer, _DEEPSEEK),
    "glm53": (native.GlmTokenizer, (_GPT4 % r"\p{N}{1,3}",)),
    "nemotron_h": (native.Nemotron3Tokenizer, (_NEMOTRON,)),
    "qwen3": (native.Qwen3Tokenizer, (_GPT4 % r"\p{N}",)),
    "qwen38": (native.Qwen35Tokenizer, (_QWEN35,)),
}
TOKENIZERS = sorted(_KINDS)


@cache
def native_tokenizer(family: str) -> Any:
    return _KINDS[family][0]()


@cache
def library_tokenizer(family: str) -> Tokenizer:
    """The same tokenizer for the tokenizers library. To read one takes a fraction of the time that it takes to make it."""
    return Tokenizer.from_file(str(shared(f"{family}.json", lambda path: _made(family).save(str(path), pretty=False))))


def _made(family: str) -> Tokenizer:
    """Ranks become merges, all pairs that make a token."""
    base = native_tokenizer(family)
    special = {base.encode_special(name) for name in base.special_tokens()}
    ranks = {base.decode_bytes([id]): id for id in range(_ENOUGH) if id not in special and _known(base, id)}
    written = {data: "".join(_BYTES[byte] for byte in data) for data in ranks}
    merges = [
        (rank, ranks[data[:at]], ranks[data[at:]], written[data[:at]], written[data[at:]])
        for data, rank in ranks.items()
        for at in range(1, len(data))
        if data[:at] in ranks and data[at:] in ranks
    ]
    vocabulary = {written[data]: rank for data, rank in ranks.items()}
    # Special tokens among the vocabulary's ids have to be entries of it.
    highest = max(ranks.values())
    vocabulary |= {base.decode([id]): id for id in special if id < highest}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [(left, right) for *_, left, right in sorted(merges)], ignore_merges=True)
    )
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _KINDS[family][1]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(base.decode([id]), special=True, normalized=False) for id in sorted(special)]
    )
    assert all(tokenizer.token_to_id(base.decode([id])) == id for id in special)
    return tokenizer


@cache
def wrapped(family: str) -> Wrapped:
    return Wrapped(library_tokenizer(family))


_ENOUGH = 250_000
"""More than any of the vocabularies has."""


def _known(base: Any, id: int) -> bool:
    try:
        return bool(base.decode_bytes([id]))
    except ValueError:
        return False


def _byte_letters() -> dict[int, str]:
    """The letters by which byte-level vocabularies write bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(rest)}


_BYTES = _byte_letters()

RENDERERS: dict[tuple[str, str], Any] = {
    ("qwen38", "none"): renderers.Qwen38.disable_thinking,
    ("qwen38", "low"): renderers.Qwen38.low,
    ("qwen38", "medium"): renderers.Qwen38.medium,
    ("qwen38", ""): renderers.Qwen38,
    ("glm53", "low"): lambda: renderers.Glm53Flash.low(clear_thinking=False),
    ("glm53", "high"): lambda: renderers.Glm53Flash.high(clear_thinking=False),
    ("glm53", ""): lambda: renderers.Glm53Flash(clear_thinking=False),
    ("nemotron_h", ""): renderers.Nemotron3,
    ("nemotron_h", "none"): renderers.Nemotron3.disable_thinking,
    ("qwen3", ""): renderers.Qwen3,
    ("qwen3", "none"): renderers.Qwen3.disable_thinking,
    ("deepseek4", "none"): renderers.DeepSeekV4.chat,
    ("deepseek4", "low"): lambda: renderers.DeepSeekV4("low"),
    ("deepseek4", "high"): lambda: renderers.DeepSeekV4("high"),
    ("deepseek4", "max"): lambda: renderers.DeepSeekV4("max"),
    ("deepseek41", "none"): renderers.DeepSeekV41.chat,
    ("deepseek41", "low"): lambda: renderers.DeepSeekV41("low"),
    ("deepseek41", ""): lambda: renderers.DeepSeekV41("high"),
    ("deepseek41", "max"): lambda: renderers.DeepSeekV41("max"),
}
"""Renderers by family and level of thinking; "" where a request names none."""


@cache
def _renderer(family: str, level: str) -> Any:
    return RENDERERS[family, level]()


def native_ids(family: str, level: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """Token ids of the prompt that the native renderer makes of a conversation, the beginning of a reply included."""
    kinds = {"system": chat.AuthorKind.System, "user": chat.AuthorKind.User, "assistant": chat.AuthorKind.Model}
    rendered: list[chat.Message] = []
    names: dict[str | None, str] = {}

    def add(content: Any, kind: Any, name: str | None = None, id: str | None = None) -> None:
        metadata = None if id is None else chat.MessageMetadata(tool_call_id=id)
        rendered.append(chat.Message(content, chat.Author(kind, name), message_metadata=metadata))

    for index, message in enumerate(messages):
        if message.role == "tool":
            add(chat.Text(message.text), chat.AuthorKind.Tool, names[message.call_id], message.call_id)
            continue
        kind = kinds[message.role]
        if message.reasoning is not None:
            add(chat.Thinking(message.reasoning), kind)
        if message.text or not message.calls:
            add(chat.Text(message.text), kind)
        for call in message.calls:
            names[call.id] = call.name
            arguments = [chat.ToolArg(key, json.dumps(value)) for key, value in json.loads(call.arguments).items()]
            add(chat.InvokeTool(chat.StructuredToolCall(call.name, arguments, [], call.id)), kind)
        if index == 0 and tools and message.role == "system":
            add(_declared(tools), kind)
    if tools and messages[0].role != "system":
        rendered.insert(0, chat.Message(_declared(tools), chat.Author(chat.AuthorKind.System)))
    spans, _ = _renderer(family, level).render_for_completion(rendered)
    return [token for span in spans for token in span.span.tokens]


def _declared(tools: Sequence[Tool]) -> Any:
    return chat.ToolDeclareJson(
        [
            chat.ToolSpecJson("function", tool.name, tool.description or "", dict(tool.parameters or {}))
            for tool in tools
        ]
    )


@cache
def _encoding(family: str) -> Any:
    tokenizer = recipe.Tokenizer.from_str(library_tokenizer(family).to_str())
    encoding = recipe.DeepseekV4Encoding() if family == "deepseek4" else recipe.DeepseekV41Encoding()
    return encoding.with_tokenizer(tokenizer)


def recipe_prompt(
    family: str, level: str | int, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> tuple[str, list[int]]:
    """Text and token ids of the prompt that DeepSeek's own encoder makes of a conversation.

    Where a thinking model's reply has no reasoning it is empty, as the package's requests have it by default.
    """
    missing = None if level == "none" else ""
    given: list[Any] = []
    for message in messages:
        if message.role == "system":
            given.append(recipe.SystemMessage(message.text))
        elif message.role == "user":
            given.append(recipe.UserMessage(message.text))
        elif message.role == "tool":
            given.append(recipe.ToolMessage(message.text, message.call_id))
        else:
            reasoning = missing if message.reasoning is None else message.reasoning
            calls = [recipe.ToolCall(call.id, call.name, call.arguments) for call in message.calls]
            given.append(recipe.AssistantMessage(message.text, reasoning, calls or None))
    declared = [recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in tools]
    conversation = recipe.Conversation(
        given,
        thinking_mode=level != "none",
        tools=declared or None,
        reasoning_effort=None if level in ("", "none") else level,
    )
    encoding = _encoding(family)
    return encoding.render_conversation(conversation).prompt, encoding.encode(conversation)
