"""Whole prompts of the model families that no other code renders here, written out by hand from what is known of them."""

from __future__ import annotations

import json

import pytest

from flare.conversation import Message, Tool, ToolCall, Tools
from flare.prompting import template_messages, template_tools
from flare.text.template import ChatTemplate
from tests.text import families

TOOL = Tool(
    "sky", "Says the sky's colour.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
)
SHOWN = (
    '{"name": "sky", "description": "Says the sky\'s colour.", "parameters": '
    '{"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}'
)
NOON = ToolCall("call00001", "sky", json.dumps({"at": "noon", "n": 1, "of": None}))
DUSK = ToolCall("call00002", "sky", json.dumps({"at": "dusk", "l": [True, {"k": 0.5}]}))
ASKED = Message("user", "Which colours?")
CALLED = Message("assistant", "Looking.", "Two times.", (NOON, DUSK))
RESULTS = (Message("tool", "red", call_id="call00002"), Message("tool", "blue", call_id="call00001"))
ANSWERED = Message("assistant", "Blue, then red.", "Both came.")
"""Reasoning, two calls, their results in the other order, an answer."""

WITHIN = [Message("system", "Be brief."), ASKED, CALLED, *RESULTS]
AFTER = [ASKED, CALLED, *RESULTS, ANSWERED, Message("user", "Thanks.")]


def prompt(family: str, messages: list[Message], *, tools: bool = False, **variables: object) -> str:
    template = ChatTemplate(families.source(family), special_tokens=families.SPECIAL.get(family, {}))
    offered = Tools((TOOL,) if tools else ())
    return template.render(
        template_messages(messages, inline_system=True, tools=offered),
        tools=template_tools(offered),
        add_generation_prompt=True,
        **variables,
    )


NS = "]<]minimax[>["
QWEN_CALLS = (
    "<tool_call>\n<function=sky>\n<parameter=at>\nnoon\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
    "<parameter=of>\nNone\n</parameter>\n</function>\n</tool_call><tool_call>\n<function=sky>\n<parameter=at>\ndusk\n"
    '</parameter>\n<parameter=l>\n[true, {"k": 0.5}]\n</parameter>\n</function>\n</tool_call>'
)
MIMO_CALLS = (
    "<tool_call><function=sky><parameter=at>noon</parameter><parameter=n>1</parameter><parameter=of>null</parameter>"
    "</function></tool_call><tool_call><function=sky><parameter=at>dusk</parameter>"
    '<parameter=l>[true, {"k": 0.5}]</parameter></function></tool_call>'
)
HERMES_CALLS = (
    '\n<tool_call>\n{"name": "sky", "arguments": {"at": "noon", "n": 1, "of": null}}\n</tool_call>'
    '\n<tool_call>\n{"name": "sky", "arguments": {"at": "dusk", "l": [true, {"k": 0.5}]}}\n</tool_call>'
)
MINIMAX_CALLS = (
    f'{NS}<tool_call>\n{NS}<invoke name="sky">{NS}<at>noon{NS}</at>{NS}<n>1{NS}</n>{NS}</invoke>\n'
    f'{NS}<invoke name="sky">{NS}<at>dusk{NS}</at>{NS}<l>{NS}<item>true{NS}</item>{NS}<item>{NS}<k>0.5{NS}</k>{NS}</item>'
    f"{NS}</l>{NS}</invoke>\n{NS}</tool_call>"
)
ATEM_NOON = (
    '<|start|>assistant to=sky<|message|><atem:function_calls>\n<atem:invoke name="sky">\n'
    '<atem:parameter name="at">noon</atem:parameter>\n<atem:parameter name="n">1</atem:parameter>\n'
    '<atem:parameter name="of">null</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
)
ATEM_DUSK = (
    '<|start|>assistant to=sky<|message|><atem:function_calls>\n<atem:invoke name="sky">\n'
    '<atem:parameter name="at">dusk</atem:parameter>\n<atem:parameter name="l">[true, {"k": 0.5}]</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eot|>"
)
GEMMA_CALLS = (
    '<|tool_call>call:sky{at:<|"|>noon<|"|>,n:1,of:null}<tool_call|>'
    '<|tool_call>call:sky{at:<|"|>dusk<|"|>,l:[true,{k:0.5}]}<tool_call|>'
)
GEMMA_RESULTS = (
    '<|tool_response>response:sky{value:<|"|>blue<|"|>}<tool_response|>'
    '<|tool_response>response:sky{value:<|"|>red<|"|>}<tool_response|>'
)
LAST, OVER = "<|close|>message<|sep|><|end_of_msg|>", "<|close|>argument<|sep|>"


def xtml(role: str, text: str) -> str:
    return f"<|open|>message {role}<|sep|>{text}{LAST}"


def argument(key: str, kind: str, text: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}{OVER}'


def channel(name: str, text: str) -> str:
    return f"<|open|>{name}<|sep|>{text}<|close|>{name}<|sep|>"


KIMI_CALLS = (
    '<|open|>call tool="sky" index="1"<|sep|>'
    + argument("at", "string", "noon")
    + argument("n", "number", "1")
    + argument("of", "null", "null")
    + '<|close|>call<|sep|><|open|>call tool="sky" index="2"<|sep|>'
    + argument("at", "string", "dusk")
    + argument("l", "array", '[true, {"k": 0.5}]')
    + "<|close|>call<|sep|>"
)
KIMI_TURN = xtml(
    'role="assistant"', channel("think", "Two times.") + channel("response", "Looking.") + channel("tools", KIMI_CALLS)
)
KIMI_RESULTS = xtml('role="tool" tool="sky" index="1"', "blue") + xtml('role="tool" tool="sky" index="2"', "red")
KIMI_EFFORT = xtml(
    'role="system" type="thinking-effort"',
    "`thinking_effort` says how much to think, one of `low`, `medium`, `high`, and `max`.\n"
    "It is `thinking_effort=max` now.",
)
KIMI_REPLY = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'


def chatml(role: str, text: str, end: str = "<|im_end|>\n") -> str:
    return f"<|im_start|>{role}\n{text}{end}"


def muse(role: str, text: str, end: str = "<|eot|>") -> str:
    return f"<|start|>{role}<|message|>{text}{end}"


STRENGTH = '\n\nReasoning strength: high.\n\n# Valid recipients: "self", "user".'


def output_of(text: str) -> str:
    return muse("tool sky", f'<tool_output name="sky">\n{text}\n</tool_output>')


MINIMAX_HEAD = (
    "]~!b[]~b]system\nYou are a model of MiniMax.\n\n<thinking_instructions>\nThoughts stand between <mm:think> and "
    "</mm:think>.\nCurrent thinking mode: adaptive. Think where it helps.\n</thinking_instructions>[e~[\n]~b]developer\n"
)
MINIMAX_TURNS = (
    "]~b]user\nWhich colours?[e~[\n]~b]ai\n<mm:think>Two times.</mm:think>Looking."
    f"{MINIMAX_CALLS}[e~[\n]~b]tool\n<response>blue</response>\n<response>red</response>[e~[\n"
)
MIMO = "You are MiMo, a helpful AI assistant engineered by Xiaomi."

PROMPTS = {
    "mimo_v2": (
        chatml("system", "Be brief.", "<|im_end|>")
        + chatml("user", "Which colours?", "<|im_end|>")
        + chatml("assistant", f"<think>Two times.</think>Looking.{MIMO_CALLS}", "<|im_end|>")
        + chatml("tool", "<tool_response>blue</tool_response>", "<|im_end|>")
        + chatml("tool", "<tool_response>red</tool_response>", "<|im_end|>")
        + "<|im_start|>assistant\n",
        chatml("system", MIMO, "<|im_end|>")
        + chatml("user", "Which colours?", "<|im_end|>")
        + chatml("assistant", f"<think>Two times.</think>Looking.{MIMO_CALLS}", "<|im_end|>")
        + chatml("tool", "<tool_response>blue</tool_response>", "<|im_end|>")
        + chatml("tool", "<tool_response>red</tool_response>", "<|im_end|>")
        + chatml("assistant", "<think>Both came.</think>Blue, then red.", "<|im_end|>")
        + chatml("user", "Thanks.", "<|im_end|>")
        + "<|im_start|>assistant\n",
    ),
    "kimi3": (
        KIMI_EFFORT
        + xtml('role="system"', "Be brief.")
        + xtml('role="user"', "Which colours?")
        + KIMI_TURN
        + KIMI_RESULTS
        + KIMI_REPLY,
        KIMI_EFFORT
        + xtml('role="user"', "Which colours?")
        + KIMI_TURN
        + KIMI_RESULTS
        + xtml('role="assistant"', channel("think", "Both came.") + channel("response", "Blue, then red."))
        + xtml('role="user"', "Thanks.")
        + KIMI_REPLY,
    ),
    "step5": (
        "<s>"
        + chatml("system", "Be brief.")
        + chatml("user", "Which colours?")
        + chatml("assistant", f"<think>\nTwo times.\n</think>\nLooking.{QWEN_CALLS}")
        + chatml("tool_response", "<tool_response>blue</tool_response><tool_response>red</tool_response>")
        + "<|im_start|>assistant\n<think>\n",
        "<s>"
        + chatml("user", "Which colours?")
        + chatml("assistant", f"Looking.{QWEN_CALLS}")
        + chatml("tool_response", "<tool_response>blue</tool_response><tool_response>red</tool_response>")
        + chatml("assistant", "Blue, then red.")
        + chatml("user", "Thanks.")
        + "<|im_start|>assistant\n<think>\n",
    ),
    "minimax_m3": (
        MINIMAX_HEAD + "Be brief.[e~[\n" + MINIMAX_TURNS + "]~b]ai\n",
        MINIMAX_HEAD
        + "You are a helpful assistant.[e~[\n"
        + MINIMAX_TURNS
        + "]~b]ai\n<mm:think>Both came.</mm:think>Blue, then red.[e~[\n]~b]user\nThanks.[e~[\n]~b]ai\n",
    ),
    "muse_spark": (
        "<|begin_of_text|>"
        + muse("system", "Be brief." + STRENGTH)
        + muse("user", "Which colours?")
        + muse("assistant to=self", "Two times.", "<|eom|>")
        + muse("assistant to=user", "Looking.", "<|eom|>")
        + ATEM_NOON
        + ATEM_DUSK
        + output_of("blue")
        + output_of("red")
        + "<|start|>assistant",
        "<|begin_of_text|>"
        + muse("system", "You are a helpful AI assistant." + STRENGTH)
        + muse("user", "Which colours?")
        + muse("assistant to=self", "Two times.", "<|eom|>")
        + muse("assistant to=user", "Looking.", "<|eom|>")
        + ATEM_NOON
        + ATEM_DUSK
        + output_of("blue")
        + output_of("red")
        + muse("assistant to=self", "Both came.", "<|eom|>")
        + muse("assistant to=user", "Blue, then red.")
        + muse("user", "Thanks.")
        + "<|start|>assistant",
    ),
    "gemma4": (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWhich colours?<turn|>\n<|turn>model\n"
        f"<|channel>thought\nTwo times.\n<channel|>{GEMMA_CALLS}{GEMMA_RESULTS}Looking.<turn|>\n"
        "<|turn>model\n<|channel>thought\n<channel|>",
        f"<bos><|turn>user\nWhich colours?<turn|>\n<|turn>model\n{GEMMA_CALLS}{GEMMA_RESULTS}Looking.<turn|>\n"
        "<|turn>model\nBlue, then red.<turn|>\n<|turn>user\nThanks.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    ),
    "qwen25": (
        chatml("system", "Be brief.")
        + chatml("user", "Which colours?")
        + chatml("assistant", f"Looking.{HERMES_CALLS}")
        + chatml("user", "<tool_response>\nblue\n</tool_response>\n<tool_response>\nred\n</tool_response>")
        + "<|im_start|>assistant\n",
        chatml("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
        + chatml("user", "Which colours?")
        + chatml("assistant", f"Looking.{HERMES_CALLS}")
        + chatml("user", "<tool_response>\nblue\n</tool_response>\n<tool_response>\nred\n</tool_response>")
        + chatml("assistant", "Blue, then red.")
        + chatml("user", "Thanks.")
        + "<|im_start|>assistant\n",
    ),
    "mistral": (
        "<s>[INST]Be brief.\n\nWhich colours?[/INST]"
        '[TOOL_CALLS][{"name": "sky", "arguments": {"at": "noon", "n": 1, "of": null}, "id": "call00001"}, '
        '{"name": "sky", "arguments": {"at": "dusk", "l": [true, {"k": 0.5}]}, "id": "call00002"}]</s>'
        '[TOOL_RESULTS]{"content": "blue", "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "red", "call_id": "call00002"}[/TOOL_RESULTS]',
        "<s>[INST]Which colours?[/INST]"
        '[TOOL_CALLS][{"name": "sky", "arguments": {"at": "noon", "n": 1, "of": null}, "id": "call00001"}, '
        '{"name": "sky", "arguments": {"at": "dusk", "l": [true, {"k": 0.5}]}, "id": "call00002"}]</s>'
        '[TOOL_RESULTS]{"content": "blue", "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "red", "call_id": "call00002"}[/TOOL_RESULTS]'
        "Blue, then red.</s>[INST]Thanks.[/INST]",
    ),
}


@pytest.mark.parametrize("family", PROMPTS)
def test_a_conversation_with_calls_within_the_turn_and_after_it(family: str) -> None:
    within, after = PROMPTS[family]
    assert prompt(family, WITHIN) == within
    assert prompt(family, AFTER) == after


DECLARED = {
    "mimo_v2": "<function>\n<name>sky</name>\n<description>Says the sky's colour.</description>\n<parameter>\n<name>at</name>",
    "kimi3": '[{"function":{"description":"Says the sky\'s colour.","name":"sky","parameters":{"properties":{"at":'
    '{"type":"string"}},"required":["at"],"type":"object"}},"type":"function"}]',
    "step5": f'<tools>\n{{"type": "function", "function": {SHOWN}}}\n</tools>',
    "minimax_m3": f"<tools>\n<tool>{SHOWN}</tool>\n</tools>",
    "muse_spark": f'{SHOWN}\n\n# Valid recipients: "self", "sky", "user".',
    "gemma4": '<|turn>system\n<|tool>declaration:sky{description:<|"|>Says the sky\'s colour.<|"|>,parameters:'
    '{properties:{at:{type:<|"|>STRING<|"|>}},required:[<|"|>at<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>',
    "llama3": '{\n    "type": "function",\n    "function": {\n        "name": "sky"',
    "mistral": f'[AVAILABLE_TOOLS][{{"type": "function", "function": {SHOWN}}}][/AVAILABLE_TOOLS][INST]Which colours?',
}


@pytest.mark.parametrize("family", DECLARED)
def test_tools_are_declared_in_the_familys_manner(family: str) -> None:
    assert DECLARED[family] in prompt(family, [ASKED], tools=True)


def test_variants_of_a_family() -> None:
    off = prompt("kimi31", WITHIN, thinking=False)
    assert "thinking-effort" not in off and "think<|sep|>" not in off and off.endswith("<|open|>response<|sep|>")
    assert prompt("kimi31", WITHIN) == prompt("kimi3", WITHIN) == prompt("kimi3", WITHIN, thinking=False)
    assert prompt("kimi3", [ASKED], thinking_effort=None) == xtml('role="user"', "Which colours?") + KIMI_REPLY
    assert prompt("gemma4_edge", WITHIN) == PROMPTS["gemma4"][0].removesuffix("<|channel>thought\n<channel|>")
    for family in ("gemma4", "gemma4_edge"):
        assert prompt(family, [ASKED], enable_thinking=True) == (
            "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nWhich colours?<turn|>\n<|turn>model\n"
        )
    step = prompt("step5", WITHIN, reasoning_effort="low")
    assert step.startswith("<s><|im_start|>system\nReasoning: low\nBe brief.<|im_end|>\n")
    kept = prompt("step5", AFTER, preserve_thinking=True)
    assert "<think>\nTwo times.\n</think>\nLooking." in kept and "<think>\nBoth came.\n</think>\nBlue" in kept
    strong = prompt("muse_spark", [ASKED], reasoning_strength="low")
    assert strong.count("Reasoning strength: low.") == 1


def test_a_call_of_llama_stands_alone_in_its_message() -> None:
    one = [ASKED, Message("assistant", "", None, (NOON,)), Message("tool", "blue", call_id="call00001")]
    assert prompt("llama3", one).endswith(
        "<|start_header_id|>user<|end_header_id|>\n\nWhich colours?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "sky", "parameters": {"at": "noon", "n": 1, "of": null}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"blue"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
