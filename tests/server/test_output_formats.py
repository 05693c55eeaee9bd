"""Every format of what models write, through every protocol: the same calls, texts, ends and counts, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.output.writers import WRITERS, Part, decoded, dumped, schema
from tests.server.process import Process, scripted
from tests.server.test_known_faults import (
    CHAT,
    ENDED,
    LIMIT_REACHED,
    MESSAGES,
    RESPONSES,
    TALKS,
    VERSION,
    ask,
    body,
    ends_in_failure,
    events,
    named,
)
from tests.support.live_server import VOCABULARY
from tests.support.scripted_server import THINKING

CALLED = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed"}

A: Part = ("call", "look.up", '{"q":"rain \\"oslo\\" ü🙂","n":7,"deep":{"a":[1.50,null]},"on":true}')
B: Part = ("call", "clock", "{}")
REPLIES: dict[str, list[Part]] = {
    "BOTH": [("reasoning", "Hm."), ("text", "I look."), A, B],
    "ONLY": [("reasoning", "Hm."), A],
    "PLAIN": [("reasoning", "Hm."), ("text", "No call.")],
    "TWICE": [("reasoning", "Hm."), B, B],
}
PATCH = '*** 1\n"é" <b>\n'


class Case(NamedTuple):
    """A running server whose model writes one format."""

    server: Process
    format: str
    written: dict[str, str]


def asked(path: str, *offered: str) -> dict[str, Any]:
    """What a request says of its tools, and that its prompt shall end within reasoning."""
    schemas = {part[1]: schema(decoded(part[2])) for part in (A, B)}
    if path == MESSAGES:
        tools: list[Any] = [{"name": name, "input_schema": schemas[name]} for name in offered]
        return {"tools": tools, "output_config": {"effort": "high"}}
    functions = [{"name": name, "parameters": schemas[name]} for name in offered]
    if path == RESPONSES:
        return {"tools": [{"type": "function", **one} for one in functions], "reasoning": {"effort": "high"}}
    return {"tools": [{"type": "function", "function": one} for one in functions], "reasoning_effort": "high"}


def thinking(opens: bool) -> dict[str, Any]:
    """With effort `high` a prompt ends within reasoning, where the format's prompts can."""
    levels: list[Any] = THINKING["levels"]  # type: ignore[assignment]
    return THINKING | {"levels": [level | {"opens_reasoning": opens and level["id"] == "high"} for level in levels]}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    format: str = request.param
    writer = WRITERS[format]
    parts = {
        name: [part for part in reply if format != "llama" or part[0] != "text" or len(reply) == 2]
        for name, reply in REPLIES.items()
    }
    written = {name: writer.reply(*reply) for name, reply in parts.items()}
    written["CUSTOM"] = writer.reply(("reasoning", "Hm."), ("call", "patch", dumped({"input": PATCH})))
    written["WRONG"] = writer.reply(("reasoning", "Hm."), ("call", "clock", '{"one":"1","two":"2"}')).replace(
        "two", "one"
    )
    opens = writer.opens(("reasoning", ""))
    model = {"output": {"tools": format, "reasoning": writer.syntax.reasoning}, "thinking": thinking(opens)}
    with scripted(tmp_path_factory.mktemp(format), written, context=8192, model=model) as server:
        yield Case(server, format, written)


def calls_of(path: str, data: bytes, streamed: bool) -> list[tuple[str, Any]]:
    """Names and arguments of the calls of an answer."""
    if path == RESPONSES:
        whole = events(data)[-1]["response"] if streamed else json.loads(data)
        items = [item for item in whole["output"] if item["type"] == "function_call"]
        return [(item["name"], meant(item["arguments"])) for item in items]
    if path == CHAT and not streamed:
        calls = json.loads(data)["choices"][0]["message"].get("tool_calls") or []
        return [(call["function"]["name"], meant(call["function"]["arguments"])) for call in calls]
    if path == CHAT:
        found: dict[int, list[str]] = {}
        for event in events(data):
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls") or []:
                    one = found.setdefault(call["index"], ["", ""])
                    one[0] += call["function"].get("name") or ""
                    one[1] += call["function"].get("arguments") or ""
        return [(name, meant(arguments)) for name, arguments in found.values()]
    if not streamed:
        blocks = [block for block in json.loads(data)["content"] if block["type"] == "tool_use"]
        return [(block["name"], meant(json.dumps(block["input"]))) for block in blocks]
    names = {event["index"]: event["content_block"] for event in events(data) if event["type"] == "content_block_start"}
    inputs = {
        at: "".join(
            event["delta"].get("partial_json", "")
            for event in events(data)
            if event["type"] == "content_block_delta" and event["index"] == at
        )
        for at, block in names.items()
        if block["type"] == "tool_use"
    }
    return [(names[at]["name"], meant(written or "{}")) for at, written in inputs.items()]


def meant(arguments: str) -> Any:
    """Arguments with their members in order. Python's numbers: a client's parser reads 1.50 as 1.5."""
    return list(json.loads(arguments).items())


def made(path: str, server: Process, sent: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of an answer, which are the same whole and streamed."""
    found = []
    for stream in (False, True):
        status, _, data = server.request("POST", path, sent | {"stream": stream}, VERSION)
        assert status == 200, data
        found.append(calls_of(path, data, stream))
    assert found[0] == found[1]
    return found[0]


def tokens(text: str) -> int:
    """How many tokens a reply has: bytes, and its end."""
    return len(text.encode()) + 1


@pytest.mark.parametrize("path", TALKS)
def test_calls_beside_text_and_reasoning(case: Case, path: str) -> None:
    for words in ("BOTH", "ONLY"):
        sent = body(path, words, 4000, **asked(path, "look.up", "clock"))
        answer = ask(case.server, path, sent)
        text = "" if words == "ONLY" or case.format == "llama" else "I look."
        calls = [A, B] if words == "BOTH" else [A]
        assert (answer.text, answer.reasoning, answer.why) == (text, "Hm.", CALLED[path])
        assert answer.tokens == tokens(case.written[words])
        assert made(path, case.server, sent) == [(name, meant(arguments)) for _, name, arguments in calls]


@pytest.mark.parametrize("path", TALKS)
def test_an_answer_without_calls(case: Case, path: str) -> None:
    answer = ask(case.server, path, body(path, "PLAIN", 4000, **asked(path, "clock")))
    assert answer == ("No call.", "Hm.", [], ENDED[path], tokens(case.written["PLAIN"]))


@pytest.mark.parametrize("path", TALKS)
def test_a_limit_within_a_call(case: Case, path: str) -> None:
    """What is complete is the answer; the rest is left out, and the limit is told as the reason."""
    written = case.written["TWICE"]
    first = next(end for end in range(len(written)) if written[:end].count("clock") == 2)  # within the second call
    if case.format == "muse_atem":
        first = written.rindex("<atem:invoke") + 5
    answer = ask(case.server, path, body(path, "TWICE", first, **asked(path, "clock")))
    assert (answer.text, answer.calls, answer.why) == ("", ["clock"], LIMIT_REACHED[path])
    assert answer.tokens == first
    answer = ask(case.server, path, body(path, "ONLY", case.written["ONLY"].index("oslo"), **asked(path, "look.up")))
    assert (answer.text, answer.reasoning, answer.calls, answer.why) == ("", "Hm.", [], LIMIT_REACHED[path])


@pytest.mark.parametrize("path", TALKS)
def test_calls_that_the_request_does_not_allow(case: Case, path: str) -> None:
    one: dict[str, Any] = {"parallel_tool_calls": False}
    if path == MESSAGES:
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    required: Any = {"type": "any"} if path == MESSAGES else "required"
    for words, more in (
        ("TWICE", one),
        ("PLAIN", {"tool_choice": required}),
        ("PLAIN", {"tool_choice": named(path, "clock")}),
        ("WRONG", {}),
    ):
        sent = body(path, words, 4000, **asked(path, "clock"), **more)
        status, _, data = case.server.request("POST", path, sent, VERSION)
        assert status == 500, data
        assert json.loads(data)["error"]["message"].startswith("the model ")
        status, _, data = case.server.request("POST", path, sent | {"stream": True}, VERSION)
        assert status == 200 and ends_in_failure(path, data), data
    chosen = body(path, "BOTH", 4000, **asked(path, "look.up"), tool_choice=named(path, "look.up"))
    assert case.server.request("POST", path, chosen, VERSION)[0] == 500  # it also calls another tool
    chosen["messages" if path != RESPONSES else "input"][0]["content"] = "ONLY"
    answer = ask(case.server, path, chosen)
    assert (answer.text, answer.reasoning, answer.calls) == ("", "Hm.", ["look.up"])


def test_a_custom_tool_gets_its_text(case: Case) -> None:
    sent = body(RESPONSES, "CUSTOM", 4000) | {"tools": [{"type": "custom", "name": "patch"}]}
    sent["reasoning"] = {"effort": "high"}
    for stream in (False, True):
        status, _, data = case.server.request("POST", RESPONSES, sent | {"stream": stream})
        assert status == 200, data
        response = events(data)[-1]["response"] if stream else json.loads(data)
        (item,) = [item for item in response["output"] if item["type"] == "custom_tool_call"]
        assert (item["name"], item["input"]) == ("patch", PATCH)


# What other servers were reported to get wrong.

REPORTED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "reported_outputs.json").read_text())
"""`reply` is pieces, a special token by `tok`; of texts the white space at the ends does not count."""
SPECIAL = {
    "deepseek_dsml": ["</think>"],
    "gemma4": ["<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
    "kimi_xtml": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "qwen": ["</think>"],
}
"""Special tokens of the formats' models, by their spellings."""


def syntax(format: str) -> dict[str, Any]:
    """The output syntax of a core of that format, with its tokens."""
    tokens = {spelling: VOCABULARY + at for at, spelling in enumerate(SPECIAL.get(format, []))}
    delimiters = ("<|channel>thought", "<channel|>") if format == "gemma4" else ("<think>", "</think>")
    closing = tokens.get(delimiters[1]) if format != "deepseek_dsml" else None
    spelled = [token for token in tokens.values() if token != closing]
    return {"tools": format, "reasoning": delimiters, "close_token": closing, "spelled": spelled}


@pytest.fixture(scope="module", params=sorted({row["format"] for row in REPORTED}))
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Process]]:
    format: str = request.param
    replies = {f"ROW {at}.": row["reply"] for at, row in enumerate(REPORTED)}
    model = {"output": syntax(format), "thinking": thinking(opens=True)}
    folder, special = tmp_path_factory.mktemp(format), SPECIAL.get(format, [])
    replies = {name: reply for name, reply in replies.items() if REPORTED[int(name[4:-1])]["format"] == format}
    with scripted(folder, replies, special=special, context=8192, model=model) as server:
        yield format, server


def request_of(path: str, at: int, row: dict[str, Any]) -> dict[str, Any]:
    asked = body(path, f"ROW {at}.", 4000)
    if row["start"] == "reasoning":
        level: dict[str, Any] = {"reasoning_effort": "high"}
        if path != CHAT:
            level = {"reasoning" if path == RESPONSES else "output_config": {"effort": "high"}}
        asked |= level
    if row["tools"] and path == MESSAGES:
        asked["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in row["tools"]]
    elif row["tools"]:
        wrapped = [{"function": tool} if path == CHAT else tool for tool in row["tools"]]
        asked["tools"] = [{"type": "function", **tool} for tool in wrapped]
    if "stop" in row:
        asked["stop" if path == CHAT else "stop_sequences"] = row["stop"]
    return asked


@pytest.mark.parametrize("path", TALKS)
def test_what_other_servers_were_reported_to_get_wrong(reported: tuple[str, Process], path: str) -> None:
    format, server = reported
    for at, row in enumerate(REPORTED):
        if row["format"] != format or ("stop" in row and path == RESPONSES):
            continue
        sent = request_of(path, at, row)
        if row.get("fails"):
            assert server.request("POST", path, sent, VERSION)[0] == 500
            assert ends_in_failure(path, server.request("POST", path, sent | {"stream": True}, VERSION)[2])
            continue
        answer = ask(server, path, sent)
        assert (answer.text.strip(), answer.reasoning.strip()) == (row["text"], row["reasoning"]), row["about"]
        assert answer.why == (CALLED if row["calls"] else ENDED)[path]
        assert made(path, server, sent) == [(name, list(arguments.items())) for name, arguments in row["calls"]]
