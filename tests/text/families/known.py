"""What is known of the model families' templates: every fact that an export finds out, written down by hand."""

from __future__ import annotations

from typing import NamedTuple

CHATML = "<|im_start|> <|im_end|>"
# Control tokens of each family: those that tokenizers call special, and those that they only add.
CONTROLS = {
    "deepseek4": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> ｜DSML｜ <think> </think>",
        "",
    ),
    "deepseek41": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜System｜> <｜User｜> <｜Assistant｜> ｜DSML｜ <think> </think>",
        "",
    ),
    "gemma4": (
        "<bos> <|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "
        '<|tool_response> <tool_response|> <|"|>',
        "",
    ),
    "glm53": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> "
        "</arg_value>",
    ),
    "kimi3": ("<|open|> <|close|> <|sep|> <|end_of_msg|>", ""),
    "llama3": ("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>", ""),
    "mimo_v2": (CHATML, "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"),
    "minimax_m3": ("]~!b[ ]~b] [e~[ ]<]minimax[>[", "<mm:think> </mm:think>"),
    "mistral": (
        "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]",
        "",
    ),
    "muse_spark": ("<|begin_of_text|> <|start|> <|message|> <|eom|> <|eot|>", ""),
    "nemotron_h": (CHATML, "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"),
    "qwen25": (CHATML, "<tool_call> </tool_call>"),
    "qwen3": (CHATML, "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"),
    "step5": (f"<s> {CHATML}", "<think> </think> <tool_call> </tool_call>"),
}
CONTROLS |= {
    "gemma4_edge": CONTROLS["gemma4"],
    "kimi31": CONTROLS["kimi3"],
    "qwen38": CONTROLS["qwen3"],
    "qwen38_dense": CONTROLS["qwen3"],
}


class Level(NamedTuple):
    """One row of the table of thinking levels; `prompt` opens a reply, behind the family's `opening`."""

    id: str
    switch: bool | None
    effort: str | None
    instruction: str | None = None
    opens: bool = False
    prompt: str = ""


class Family(NamedTuple):
    opening: str  # of a reply
    levels: tuple[Level, ...] = ()
    toggle: str | None = None
    effort: str | None = None
    default: str | None = None
    unnamed: str = ""  # what a request that names no level gets behind `opening`
    opens: bool = False
    inline: str = "renders"
    leading: str = "renders"
    developer: str = "omits"
    system: str | None = None
    tail: str = ""
    trims: bool = False
    parts: bool = True
    variables: str = ""
    format: str = "qwen"
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    single: tuple[str | None, str | None] = ("<think>", "</think>")
    spelled: str = ""


IM = "<|im_start|>assistant\n"
IM_TAIL = "<|im_end|>\n"
XHIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
)
LOW = (
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
    "unnecessary elaboration."
)
QWEN38 = Family(
    IM,
    (
        Level("none", False, None, prompt="<think>\n\n</think>\n\n"),
        Level("xhigh", True, "xhigh", XHIGH, True, "<think>\n"),
        Level("low", True, "low", LOW, True, "<think>\n"),
        Level("medium", True, "medium", None, True, "<think>\n"),
    ),
    "enable_thinking",
    "reasoning_effort",
    "xhigh",
    "<think>\n",
    True,
    inline="raises",
    developer="raises",
    tail=IM_TAIL,
    trims=True,
    variables="enable_thinking preserve_thinking reasoning_effort",
)


def score(number: int) -> str:
    return f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)"


DEEPSEEK41 = Family(
    "<｜Assistant｜>",
    (
        Level("none", False, None, prompt="</think>"),
        Level("low", True, "low", score(50), True, "<think>"),
        Level("high", True, "high", score(75), True, "<think>"),
        Level("xhigh", True, "xhigh", score(75), True, "<think>"),
        Level("max", True, "max", score(100), True, "<think>"),
    ),
    "thinking",
    "reasoning_effort",
    "high",
    "<think>",
    True,
    developer="renders",
    tail="<｜end▁of▁sentence｜>",
    parts=False,
    variables="reasoning_effort thinking",
    format="deepseek_dsml",
    spelled="｜DSML｜ <think> </think>",
)
ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and "
    "comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all "
    "potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, "
    "documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked."
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason with the utmost depth "
    "and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental "
    "components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "
    "assumption remains unchecked and no error remains undiscovered."
)
GUIDE = "`thinking_effort` says how much to think, one of `low`, `medium`, `high`, and `max`."
KIMI = Family(
    '<|open|>message role="assistant"<|sep|>',
    tuple(
        Level(
            name,
            None,
            name,
            f"It is `thinking_effort={name}` now.",  # the line that tells the levels apart
            True,
            "<|open|>think<|sep|>",
        )
        for name in ("low", "high", "max")
    ),
    None,
    "thinking_effort",
    "max",
    "<|open|>think<|sep|>",
    True,
    tail="<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    variables="thinking thinking_effort",
    format="kimi_xtml",
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    single=(None, None),
    spelled="<|open|> <|close|> <|sep|> <|end_of_msg|>",
)
GEMMA = Family(
    "<|turn>model\n",
    (
        Level("none", False, None, prompt="<|channel>thought\n<channel|>"),
        Level("on", True, None, "<|think|>"),
    ),
    "enable_thinking",
    None,
    "none",
    "<|channel>thought\n<channel|>",
    developer="renders",
    tail="<turn|>\n",
    trims=True,
    variables="enable_thinking preserve_thinking",
    format="gemma4",
    reasoning=("<|channel>thought", "<channel|>"),
    single=(None, "<channel|>"),
    spelled='<|channel> <|tool_call> <tool_call|> <|"|>',
)
NAMES = ("minimal", "low", "medium", "high", "xhigh")
SWITCHED = (Level("none", False, None, prompt="<think>\n\n</think>\n\n"), Level("on", True, None))

KNOWN = {
    "qwen38": QWEN38,
    "qwen38_dense": QWEN38,
    "glm53": Family(
        "<|assistant|>",
        tuple(
            Level(name, None, name, f"Reasoning Effort: {name.title()}", True, "<think>")
            for name in ("low", "high", "max")
        ),
        None,
        "reasoning_effort",
        "max",
        "<think>",
        True,
        tail="",
        trims=True,
        variables="clear_thinking reasoning_effort",
        format="glm",
    ),
    "deepseek4": DEEPSEEK41._replace(
        levels=(
            Level("none", False, None, prompt="</think>"),
            Level("low", True, "low", None, True, "<think>"),
            Level("high", True, "high", ABSOLUTE, True, "<think>"),
            Level("xhigh", True, "xhigh", ABSOLUTE, True, "<think>"),
            Level("max", True, "max", BEYOND, True, "<think>"),
        ),
        inline="moves",
    ),
    "deepseek41": DEEPSEEK41,
    "mimo_v2": Family(
        IM,
        (Level("none", False, None, prompt="<think></think>"), Level("on", True, None)),
        "enable_thinking",
        None,
        "on",
        system="You are MiMo, a helpful AI assistant engineered by Xiaomi.",
        tail="<|im_end|>",
        variables="enable_thinking keep_all_reasoning",
        format="mimo",
    ),
    "kimi3": KIMI._replace(variables="thinking thinking_effort"),
    "kimi31": KIMI._replace(
        levels=(
            Level("none", False, None, prompt="<|open|>response<|sep|>"),
            # Against a prompt without any effort all of the message is what a level says.
            *(level._replace(switch=True, instruction=f"{GUIDE}\n{level.instruction}") for level in KIMI.levels),
        ),
        toggle="thinking",
    ),
    "step5": Family(
        IM,
        tuple(Level(name, None, name, f"Reasoning: {name}", True, "<think>\n") for name in NAMES),
        None,
        "reasoning_effort",
        None,
        "<think>\n",
        True,
        tail=IM_TAIL,
        variables="preserve_thinking reasoning_effort",
    ),
    "nemotron_h": Family(
        IM,
        (Level("none", False, None, prompt="<think></think>"), Level("on", True, None, None, True, "<think>\n")),
        "enable_thinking",
        None,
        "on",
        "<think>\n",
        True,
        developer="renders",
        tail=IM_TAIL,
        trims=True,
        parts=False,
        variables="enable_thinking truncate_history_thinking",
    ),
    "minimax_m3": Family(
        "]~b]ai\n",
        (
            Level("none", False, "disabled", "Current thinking mode: disabled. Do not think.", False, "</mm:think>"),
            Level(
                "on",
                True,
                "enabled",
                "Current thinking mode: enabled. Think before every response.",
                True,
                "<mm:think>",
            ),
            Level("adaptive", None, "adaptive", "Current thinking mode: adaptive. Think where it helps."),
        ),
        None,
        "thinking_mode",
        "adaptive",
        inline="omits",
        developer="renders",
        system="You are a helpful assistant.",
        tail="[e~[\n",
        variables="thinking_mode",
        format="minimax",
        reasoning=("<mm:think>", "</mm:think>"),
        single=("<mm:think>", "</mm:think>"),
        spelled="]<]minimax[>[",
    ),
    "muse_spark": Family(
        "<|start|>assistant",
        tuple(Level(name, None, name) for name in NAMES),
        None,
        "reasoning_strength",
        "high",
        system="You are a helpful AI assistant.",
        tail="<|eot|>",
        variables="reasoning_strength",
        format="muse_atem",
        reasoning=None,
        spelled="<|start|> <|message|> <|eom|> <|eot|>",
    ),
    "gemma4": GEMMA,
    "gemma4_edge": GEMMA._replace(levels=(GEMMA.levels[0]._replace(prompt=""), GEMMA.levels[1]), unnamed=""),
    "qwen3": Family(
        IM,
        SWITCHED,
        "enable_thinking",
        None,
        "on",
        tail=IM_TAIL,
        parts=False,
        variables="enable_thinking",
        format="hermes",
    ),
    "qwen25": Family(
        IM,
        system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        tail=IM_TAIL,
        parts=False,
        format="hermes",
        reasoning=None,
    ),
    "llama3": Family(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        developer="renders",
        tail="<|eot_id|>",
        trims=True,
        parts=False,
        variables="date_string",
        format="llama",
        reasoning=None,
    ),
    "mistral": Family(
        "",
        inline="raises",
        developer="raises",
        tail="</s>",
        parts=False,
        format="mistral",
        reasoning=None,
        spelled="[TOOL_CALLS]",
        unnamed="[/INST]",
    ),
}
