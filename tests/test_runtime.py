"""The runtime without a server: what a manifest becomes, requests in and events out."""

from __future__ import annotations

import io
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flare.chat_terminal import Terminal
from flare.config import MemorySize, RuntimeSettings
from flare.conversation import (
    Called,
    Conversation,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Message,
    RawPrompt,
    Reasoning,
    SamplingRequest,
    Text,
    Thinking,
    Tool,
    Tools,
)
from flare.core.manifest import Limits, Logprobs, Model, Sampling, Template, Tokens
from flare.errors import RequestError
from flare.loading import served_model
from flare.output import OutputSyntax
from flare.prompting import CALL_A_TOOL, template_messages
from flare.runtime import Runtime
from flare.text import stops
from flare.thinking import NO_THINKING
from tests.support.live_server import EOS, LiveServer, reply

MIB = 1 << 20


def make_core(**sampling: Any) -> Any:
    """What `served_model` reads of an opened core."""
    manifest = SimpleNamespace(
        model=Model(
            id="maker/name",
            recipe="dense",
            architecture="A",
            source="s",
            vocabulary=99,
            layers=1,
            hidden_size=8,
            parameters=9,
        ),
        limits=Limits(max_context=100, slots=3, page_tokens=16, max_step_tokens=32, max_rows=3),
        logprobs=Logprobs(alternatives=20, explicit_ids=128, prompt=False),
        tokens=Tokens(bos=1, eos=[2, 3], pad=None, add_bos=True),
        template=Template(file="t.jinja", source="t", facts={"inline_system": True}),
        sampling=Sampling(**{"defaults": {}, "sources": {}, "ranges": "open"} | sampling),
    )
    return SimpleNamespace(manifest=manifest, manifest_sha256="ab" * 32)


def test_what_a_manifest_becomes() -> None:
    settings = RuntimeSettings(core="c", threads=1, aliases=("short", "other"), max_tokens=50)
    core = make_core(defaults={"top_k": 7, "min_p": None}, ranges={"temperature": [0.5, 1.0], "top_p": None})
    model = served_model(core, settings, kv_pages=5, decode_weight_bytes=77)
    assert (model.id, model.root, model.names) == ("short", "maker/name", ("short", "other", "maker/name"))
    assert model.context_length == 5 * 16  # the pool is smaller than the core's context
    assert served_model(core, settings, kv_pages=50, decode_weight_bytes=77).context_length == 100
    assert (model.eos, model.bos, model.vocabulary, model.max_tokens_cap) == ({2, 3}, 1, 99, 50)
    assert model.decode_weight_bytes == 77
    assert model.ranges == {"temperature": (0.5, 1.0), "top_p": None}
    assert model.sampling_default("top_k") == 7 and model.sampling_default("min_p") == 0.0
    assert (model.max_top_logprobs, model.explicit_ids, model.scores_prompts) == (20, 128, False)
    assert model.inline_system and model.has_template and not model.thinking["supported"]
    plain = served_model(make_core(), RuntimeSettings(core="c", threads=1), kv_pages=5, decode_weight_bytes=77)
    assert (plain.id, plain.ranges) == ("maker/name", None)
    core.manifest.logprobs = Logprobs(alternatives=5, explicit_ids=7, prompt=True)
    other = served_model(core, settings, kv_pages=5, decode_weight_bytes=77)
    assert (other.max_top_logprobs, other.explicit_ids, other.scores_prompts) == (5, 7, True)


def test_where_system_text_may_stand() -> None:
    system, user, late = Message("system", "S1"), Message("user", "u"), Message("system", "S2")
    plain = {"role": "user", "content": "u"}
    assert template_messages([system, user, late], inline_system=True) == [
        {"role": "system", "content": "S1"},
        plain,
        {"role": "system", "content": "S2"},
    ]
    assert template_messages([system, user, late], inline_system=False)[2] == {
        "role": "user",
        "content": "<system>\nS2\n</system>",
    }
    both = [system, user, Message("developer", "D1"), user, late]
    for inline in (True, False):
        leading, *rest = template_messages(both, inline_system=inline)
        assert leading["role"] == "system" and rest == [plain, plain]
        assert (
            leading["content"] == "<system>\nS1\n</system>\n\n<developer>\nD1\n</developer>\n\n<system>\nS2\n</system>"
        )
    assert template_messages([Message("assistant", "a", "why")], inline_system=True) == [
        {"role": "assistant", "content": "a", "reasoning_content": "why"}
    ]


def run(runtime: Runtime, request: GenerationRequest, batches: SimpleQueue[Any]) -> list[Event]:
    """All events of a request, taken from the engine's batches on this thread."""
    events: list[Event] = []
    answer = runtime.submit(runtime.prepare(request), events.append, 0.0)
    while not answer.ended:
        runtime.receive(batches.get(timeout=20))
    return events


@pytest.fixture
def batches() -> SimpleQueue[Any]:
    return SimpleQueue()


def make_runtime(batches: SimpleQueue[Any], script: Any, **options: Any) -> tuple[Runtime, LiveServer]:
    """A started runtime over a scripted replay, and the server that made it, which never listens."""
    made = LiveServer(script=script, **options)
    made.sock.close()
    made.runtime.start(batches.put)
    return made.runtime, made


def test_events_of_a_request(batches: SimpleQueue[Any]) -> None:
    runtime, _ = make_runtime(batches, lambda prompt, choice: reply("né"))
    events = run(runtime, GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt"), batches)
    assert [(e.text, e.tokens) for e in events] == [("n", 1), ("", 1), ("é", 1), ("", 1)]
    assert [type(e) for e in events] == [Text, Text, Text, Finished]
    assert events[-1].completion_tokens == 4 and events[-1].cause == "stop_token"
    runtime.close()


def test_all_choices_run_or_none(batches: SimpleQueue[Any]) -> None:
    runtime, made = make_runtime(batches, lambda p, c: reply("x"), max_waiting=0, replay={"slots": 2})
    request = GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt", n=3)
    with pytest.raises(RequestError, match="n: 3 choices in all, the limit is 2; ask for less") as never:
        runtime.prepare(request)
    assert (never.value.status, never.value.param) == (400, "n")
    pair = runtime.prepare(msgspec.structs.replace(request, n=2))
    made.replay.pause()
    first = runtime.submit(pair, lambda event: None, 0.0)
    with pytest.raises(RequestError) as caught:
        runtime.submit(pair, lambda event: pytest.fail(f"{event}"), 0.0)
    assert caught.value.status == 503
    first.cancel()
    made.replay.resume()
    while runtime.stats().cancelled < 2:
        runtime.receive(batches.get(timeout=20))
    assert runtime.stats().completed == 0
    assert len(run(runtime, GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt", n=2), batches)) == 4
    runtime.close()
    assert made.replay._dead


def test_stops_are_built_once_and_not_where_answers_are_received(
    batches: SimpleQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four longest stops take 10 ms, and a request has up to 128 choices."""
    built: list[Any] = []
    build = stops._automaton
    monkeypatch.setattr(stops, "_automaton", lambda given: built.append(given) or build(given))
    runtime, _ = make_runtime(batches, lambda prompt, choice: reply("abc"))
    try:
        given: list[tuple[dict[str, Any], str]] = [
            ({"stop": ("b", "x")}, "stop_sequence"),
            ({"stop_token_sequences": (tuple(b"bc"),)}, "stop_token"),
        ]
        for fields, cause in given:
            request = GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt", n=3, **fields)
            prepared = runtime.prepare(request)
            assert built == [*fields.values()]
            built.clear()
            events: list[Event] = []
            answer = runtime.submit(prepared, events.append, 0.0)
            while not answer.ended:
                runtime.receive(batches.get(timeout=10))
            assert [event.cause for event in events if isinstance(event, Finished)] == [cause] * 3
            assert built == []
    finally:
        runtime.close()


def test_a_choice_that_cannot_be_decoded_ends_its_own_answer_only(batches: SimpleQueue[Any]) -> None:
    runtime, made = make_runtime(batches, lambda prompt, choice: reply("abc"))
    made.replay.pause()
    request = GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt")
    bad: list[Event] = []
    good: list[Event] = []
    first = runtime.submit(runtime.prepare(request), bad.append, 0.0)
    second = runtime.submit(runtime.prepare(request), good.append, 0.0)
    first.choices[0].decoder = SimpleNamespace(push=lambda token: 1 / 0)
    made.replay.resume()
    while not (first.ended and second.ended):
        runtime.receive(batches.get(timeout=20))
    assert [type(event) for event in bad] == [Failed] and bad[0].error.status == 500
    assert "".join(event.text for event in good) == "abc"
    runtime.close()


def test_defaults_fill_what_a_request_leaves_open(batches: SimpleQueue[Any]) -> None:
    runtime, _ = make_runtime(batches, None, model={"defaults": {"temperature": 0.5, "top_k": 9, "seed": 4}})
    request = GenerationRequest(prompts=[RawPrompt("hi")], prompt_field="prompt", stop_token_ids=frozenset({7}))
    prepared = runtime.prepare(request)
    assert (prepared.sampling.temperature, prepared.sampling.top_k, prepared.sampling.top_p) == (0.5, 9, 1.0)
    assert prepared.sampling.seed == 4 and prepared.stop_tokens == {7, EOS}
    asked = SamplingRequest(temperature=1e-9, top_k=-1, seed=8)
    prepared = runtime.prepare(
        GenerationRequest(prompts=[RawPrompt("x")], prompt_field="prompt", sampling=asked, ignore_eos=True)
    )
    assert (prepared.sampling.temperature, prepared.sampling.top_k, prepared.sampling.seed) == (0.0, -1, 8)
    assert prepared.stop_tokens == set()
    runtime.close()


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>' if enable_thinking | default(true) else '' }}{% endif %}"
)
ON = {"enable_thinking": True, "reasoning_effort": None, "opens_reasoning": True, "default": True, "id": "on"}
OFF = ON | {"enable_thinking": False, "opens_reasoning": False, "default": False, "id": "none"}


def test_tools_and_reasoning_from_prompt_to_events(batches: SimpleQueue[Any]) -> None:
    prompts: set[str] = set()

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        prompts.add("".join(map(chr, prompt)))
        return reply('Hm.</think>Sure.<tool_call>{"name": "n__f", "arguments": {"a": 1}}</tool_call>')

    model = {
        "output": OutputSyntax(tools="hermes", reasoning=("<think>", "</think>")),
        "thinking": NO_THINKING | {"supported": True, "toggle": "enable_thinking", "levels": [OFF, ON]},
        "default_system": "Be kind.",
    }
    runtime, _ = make_runtime(batches, script, model=model, template=TOOL_TEMPLATE)
    offered = (Tool("f", namespace="n"), Tool("g"))

    def ask(tools: Tools, n: int = 1, **thinking: Any) -> tuple[set[str], list[Event]]:
        prompts.clear()
        conversation = Conversation([Message("user", "hi")], tools=tools, thinking=Thinking(**thinking))
        events = run(runtime, GenerationRequest(prompts=[conversation], prompt_field="messages", n=n), batches)
        return set(prompts), events

    def joined(events: list[Event], kind: type) -> str:
        return "".join(e.text for e in sorted(events, key=lambda e: e.choice) if type(e) is kind)

    found, events = ask(Tools(offered), n=2)
    assert found == {"[n__f][g]user:hi;<think>"}
    made = [event.call for event in events if isinstance(event, Called)]
    assert [(call.namespace, call.name, call.arguments) for call in made] == [("n", "f", '{"a":1}')] * 2
    assert made[0].id != made[1].id
    assert joined(events, Reasoning) == "Hm." * 2 and joined(events, Text) == "Sure." * 2
    assert all(event.called for event in events if isinstance(event, Finished))

    found, events = ask(Tools(offered, "required"))
    assert found == {f"[n__f][g]system:Be kind.\n\n{CALL_A_TOOL};user:hi;<think>"}
    found, events = ask(Tools(offered, "named", "f", "n"), switch=False)
    assert found == {"[n__f]user:hi;"} and joined(events, Text) == joined(events, Reasoning) == ""
    found, events = ask(Tools(offered, "none"))
    assert found == {"user:hi;<think>"} and joined(events, Text).startswith("Sure.<tool_call>{")
    # The last one: its prompt may be run on for a moment behind the failure.
    _, events = ask(Tools(offered, "named", "g"))
    assert isinstance(events[-1], Failed) and not any(isinstance(event, Called) for event in events)

    unclear = Conversation([Message("user", "hi")], tools=Tools((*offered, Tool("n__f"))))
    with pytest.raises(RequestError) as caught:
        runtime.prepare(GenerationRequest(prompts=[unclear], prompt_field="messages"))
    assert caught.value.param == "tools" and "n__f" in str(caught.value)
    runtime.close()


VARIABLE_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{% if persona == 'sage' or (persona is not defined and enable_thinking) %}<think>Hm"
    "{% elif persona == 'mute' %}<think></think>{% endif %}{% endif %}"
    "{% if persona == 'odd' and not add_generation_prompt %}!{% endif %}"
)


@pytest.mark.parametrize(
    ("variables", "switch", "prompt", "reasoning"),
    [
        ({}, None, "<think>Hm", "So."),
        ({}, False, "", ""),
        ({"persona": "sage"}, None, "<think>Hm", "So."),
        ({"persona": "sage"}, False, "<think>Hm", "So."),  # whatever was probed of the levels
        ({"persona": "mute"}, None, "<think></think>", ""),
        ({"persona": "plain"}, None, "", ""),
        ({"persona": "odd"}, None, "", "So."),  # it cannot be told: what holds without the variable
    ],
)
def test_variables_of_the_template_decide_whether_reasoning_is_open(
    batches: SimpleQueue[Any], variables: dict[str, Any], switch: bool | None, prompt: str, reasoning: str
) -> None:
    prompts: set[str] = set()

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        prompts.add("".join(map(chr, prompt)))
        return reply("So.</think>Yes.")

    model = {
        "output": OutputSyntax(reasoning=("<think>", "</think>")),
        "thinking": NO_THINKING | {"supported": True, "toggle": "enable_thinking", "levels": [OFF, ON]},
    }
    template = "{% set enable_thinking = enable_thinking is not defined or enable_thinking %}" + VARIABLE_TEMPLATE
    runtime, _ = make_runtime(batches, script, model=model, template=template)
    conversation = Conversation(
        [Message("user", "</think><think> who?")], thinking=Thinking(switch=switch), variables=variables
    )
    events = run(runtime, GenerationRequest(prompts=[conversation], prompt_field="messages"), batches)
    assert prompts == {"user:</think><think> who?;" + prompt}
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    without = Conversation(conversation.messages, add_generation_prompt=False, variables=variables)
    assert not runtime.prepare(GenerationRequest(prompts=[without], prompt_field="messages")).opens_reasoning
    runtime.close()


def test_a_conversation_in_the_terminal() -> None:
    seen: list[str] = []

    def script(prompt: tuple[int, ...], choice: int) -> list[int]:
        text = "".join(chr(token) if token < 256 else "|" for token in prompt)
        if not seen or seen[-1] != text:
            seen.append(text)
        return reply(f"answer {len(seen)}")

    made = LiveServer(script=script)
    made.sock.close()
    out, notes = io.StringIO(), io.StringIO()
    terminal = Terminal(made.runtime, out, notes)
    terminal.ask("one")
    terminal.ask("two")
    assert out.getvalue() == "answer 1\nanswer 2\n"
    assert seen[1] == "|user\none|\n|assistant\nanswer 1|\n|user\ntwo|\n|assistant\n"
    assert notes.getvalue().count("9 tokens, first after ") == 2 and "tokens/s" in notes.getvalue()
    with pytest.raises(RequestError):
        terminal.ask("x" * 600)
    assert [message.text for message in terminal.messages] == ["one", "answer 1", "two", "answer 2"]
    made.runtime.close()


def test_reasoning_is_shown_and_kept_apart() -> None:
    syntax = OutputSyntax(reasoning=("<think>", "</think>"))
    made = LiveServer(script=lambda prompt, choice: reply("<think>Hm.</think>Yes."), model={"output": syntax})
    made.sock.close()
    out = io.StringIO()
    terminal = Terminal(made.runtime, out, None)
    terminal.ask("well?")
    assert out.getvalue() == "Hm.\n\nYes.\n"
    assert terminal.messages[-1] == Message("assistant", "Yes.", "Hm.")
    made.runtime.close()


def test_an_interrupted_answer_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LiveServer(script=lambda prompt, choice: [97] * 400)
    made.sock.close()
    out, notes = io.StringIO(), io.StringIO()
    terminal = Terminal(made.runtime, out, notes)
    receive, count = made.runtime.receive, 0

    def interrupted(batch: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        receive(batch)

    monkeypatch.setattr(made.runtime, "receive", interrupted)
    terminal.ask("go on")
    assert out.getvalue() == "aa\n" and "(stopped)" in notes.getvalue()
    assert terminal.messages[-1] == Message("assistant", "aa")
    terminal.ask("again")
    made.runtime.close()


def test_a_real_core_answers(tiny_core: Path, batches: SimpleQueue[Any]) -> None:
    """The whole chain over an exported core: greedy answers repeat, alone and beside others."""
    settings = RuntimeSettings(core=str(tiny_core), threads=1, kv_memory=MemorySize(bytes=4 * MIB))
    runtime = Runtime.load(settings)
    runtime.start(batches.put)
    prompts = [RawPrompt([5, 6, 7]), RawPrompt([8, 9])]

    def request(chosen: list[RawPrompt]) -> GenerationRequest:
        greedy = SamplingRequest(temperature=0)
        return GenerationRequest(prompts=chosen, prompt_field="prompt", max_tokens=6, sampling=greedy, ignore_eos=True)

    def texts(events: list[Event], choices: int) -> list[str]:
        return ["".join(e.text for e in events if e.choice == choice) for choice in range(choices)]

    together = texts(run(runtime, request(prompts), batches), 2)
    assert together == [texts(run(runtime, request([prompt]), batches), 1)[0] for prompt in prompts]
    if runtime.template is not None:
        conversation = Conversation([Message("user", "hello")])
        events = run(runtime, GenerationRequest(prompts=[conversation], prompt_field="messages", max_tokens=4), batches)
        assert isinstance(events[-1], Finished)
    runtime.close()
