"""Which recorded requests are refused, and why."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """`status` and a part of the message, which `names` the field; `why` is for people."""

    status: int
    names: str
    why: str


STRICT = "schemas of functions are not enforced, and the server is not told to take such tools as ordinary ones"
MARKER = "the recording's marker of the thinking block was made up, so it does not belong to its text"
IMAGE = "the model takes text only"
UNKNOWN = "no field of the protocol; the client sends the request again without it"
HOSTED = "tools of a provider are not run here"
FAULT = "the client sends a body that the schema of System One forbids"
MANY = "a choice has more options than System One takes here"
LABELS = "the tests' tokenizer knows single bytes, which make 62 labels"
REQUIRED = "the protocol requires it; the client tests that"

REFUSED: dict[tuple[str, int], Refusal] = {
    ("agents", 1): Refusal(400, "tools[0].function.strict:", STRICT),
    ("agents", 2): Refusal(400, "tools[0].function.strict:", STRICT),
    ("agents", 3): Refusal(400, "tools[0].strict:", STRICT),
    ("agents", 4): Refusal(400, "tools[0].strict:", STRICT),
    ("anthropic-sdk-0.125.0", 4): Refusal(400, "messages[0].content[1].type:", IMAGE),
    ("claude-code", 2): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code", 3): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code", 4): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-agent", 4): Refusal(400, "tools[0].type:", HOSTED),
    ("claude-code-bare", 3): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("claude-code-bare", 4): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("claude-code-bare", 5): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("claude-code-default", 3): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-default", 4): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-default", 5): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-image", 1): Refusal(400, "messages[0].content[3].type:", IMAGE),
    ("claude-code-image", 2): Refusal(400, "messages[0].content[3].type:", IMAGE),
    ("claude-code-latest", 2): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-latest", 3): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-latest", 4): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-nothink", 3): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-nothink", 4): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-nothink", 5): Refusal(400, "messages[2].content[0].signature:", MARKER),
    ("claude-code-schema", 1): Refusal(400, "safeguards:", UNKNOWN),
    ("claude-code-sonnet45", 3): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("claude-code-sonnet45", 4): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("claude-code-sonnet45", 5): Refusal(400, "messages[1].content[0].signature:", MARKER),
    ("codex-image", 1): Refusal(400, "input[3].content[1].type:", IMAGE),
    ("codex-image", 2): Refusal(400, "input[3].content[1].type:", IMAGE),
    ("codex-image", 3): Refusal(400, "input[3].content[1].type:", IMAGE),
    ("codex-websearch", 1): Refusal(400, "tools[9].type:", HOSTED),
    ("compatcanary", 4): Refusal(400, "tools[0].function.strict:", STRICT),
    ("fault-cc-400", 1): Refusal(400, "safeguards:", UNKNOWN),
    ("fault-cc-sse", 1): Refusal(400, "safeguards:", UNKNOWN),
    ("fault-cc-sse", 2): Refusal(400, "safeguards:", UNKNOWN),
    ("inspect", 1): Refusal(400, "tools[0].function.strict:", STRICT),
    ("jevcompat", 14): Refusal(400, "questions.queue.criteria: 64 options", LABELS),
    ("jevcompat", 15): Refusal(400, "questions.queue.criteria: 128 options", LABELS),
    ("jevcompat", 16): Refusal(422, "body.questions.queue.choice.criteria", MANY),
    ("jevcompat", 35): Refusal(400, "the body is not valid JSON", FAULT),
    ("jevcompat", 36): Refusal(422, "body.state", FAULT),
    ("jevcompat", 37): Refusal(422, "body.questions", FAULT),
    ("jevcompat", 38): Refusal(422, "body.questions", FAULT),
    ("jevcompat", 39): Refusal(422, "body.questions.refund", FAULT),
    ("jevcompat", 40): Refusal(422, "body.questions.refund", FAULT),
    ("jevcompat", 41): Refusal(422, "body.questions.team.choice.criteria", FAULT),
    ("jevcompat", 42): Refusal(422, "body.questions.anger.score.criteria", FAULT),
    ("jevcompat", 44): Refusal(422, "body.questions.queue.choice.criteria", FAULT),
    ("jevcompat", 46): Refusal(422, "body.questions.anger.score.criteria", FAULT),
    ("jevcompat", 47): Refusal(422, "body.questions.anger.score.criteria.1", FAULT),
    ("jevcompat", 48): Refusal(422, "body.state", FAULT),
    ("llm", 4): Refusal(400, "messages[0].content[1].type:", IMAGE),
    ("llm-comply-anthropic", 7): Refusal(400, "messages[0].content[1].type:", IMAGE),
    ("llm-comply-anthropic", 8): Refusal(400, "max_tokens:", REQUIRED),
    ("llm-comply-open-responses", 7): Refusal(400, "input[0].content[1].type:", IMAGE),
    ("llm-comply-openai-chat", 7): Refusal(400, "messages[0].content[1].type:", IMAGE),
    ("openai-sdk", 5): Refusal(400, "messages[1].content[1].type:", IMAGE),
    ("openai-sdk", 12): Refusal(400, "input[0].content[1].type:", IMAGE),
    ("opencode-image", 1): Refusal(400, "messages[2].content[2].type:", IMAGE),
    ("opencode-image", 2): Refusal(400, "messages[1].content[2].type:", IMAGE),
    ("pydai", 3): Refusal(400, "tools[0].function.strict:", STRICT),
    ("typesafe-sdk", 3): Refusal(400, "TypeSafe-Danger-Zone-Images", IMAGE),
    ("typesafe-sdk", 4): Refusal(400, "TypeSafe-Danger-Zone-Images", IMAGE),
}
