"""The document of the API, held against the API: what it promises is served, what it forbids is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from flare.core.sampling import VALID
from flare.protocols.openapi import ROUTES, Route, document
from flare.thinking import NO_THINKING
from tests.support.live_server import LiveServer, make_model
from tests.support.schemas import Values, spoiled
from tests.support.scripted_server import make_runtime

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
VERSION = {"anthropic-version": "2023-06-01"}
CALL = '<think>why</think>Before <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
LEAKS = ("Traceback", "msgspec", "aiohttp", "Error(", ".py", "site-packages", "object at 0x")
GOOD: dict[str, list[dict[str, Any]]] = {
    "createChatCompletion": [
        {"messages": HI},
        {"messages": HI, "n": 2, "return_token_ids": True, "return_token_timestamps": True, "max_tokens": 3},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        {"messages": HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": HI, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [1, 2]},
        {"messages": HI, "logprobs": False, "response_format": {"type": "text"}, "store": False, "logit_bias": {}},
    ],
    "createCompletion": [
        {"prompt": "hi"},
        {"prompt": [[1, 2], [3]], "echo": True, "n": 2},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "abc", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    ],
    "createMessage": [
        {"messages": HI, "max_tokens": 100},
        {"messages": HI, "max_tokens": 100, "tools": [{"name": "f", "input_schema": SCHEMA}]},
        {"messages": HI, "max_tokens": 2},
    ],
    "countTokens": [{"messages": HI}],
    "createResponse": [
        {"input": "hi"},
        {"input": HI, "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        {"input": "hi", "max_output_tokens": 2},
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    ],
    "createSystemOne": [
        {"model": "m", "state": "x", "questions": {"q": {"type": "noul"}}},
        {
            "model": "m",
            "state": {"a": [1]},
            "questions": {
                "a": {"type": "choice", "instructions": ["Which?"], "criteria": {"a": None, "b": "B"}},
                "b": {"type": "score", "criteria": ["a", {"b": 1}]},
            },
        },
    ],
    "createDecisions": [
        {"input": "hi", "questions": [{"type": "predicate", "instructions": "Good?"}]},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "questions": [
                {"type": "choice", "instructions": "", "name": "n", "choices": [{"value": "a"}, {"value": True}]},
                {"type": "score", "instructions": "", "levels": [{"label": "a", "description": "A"}, {"label": "b"}]},
            ],
            "safety_identifier": "me",
        },
    ],
    "showOllamaModel": [{"model": "org/tiny"}],
}
"""Bodies that are answered with 200, by the operation's id."""
ENDS = re.compile(r'data: (\[DONE\]|{"type":"message_stop"}|{"type":"response\.(completed|incomplete)".*})\n\n\Z')
"""The last event of a stream that went well."""
BODIES = [route for route in ROUTES if route.body]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A model that reasons, and calls the tools that it is offered."""
    rated = {"max_top_logprobs": 20, "explicit_ids": 128, "scores_prompts": True}
    runtime = make_runtime([CALL], "<think>hm</think>Fine.", endless=False, context=2048, slots=4, **rated)
    with LiveServer(runtime=runtime) as live:
        yield live
        live.idle()


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with LiveServer(settings={"api_key": "k"}) as live:
        yield live
        live.idle()


@cache
def description() -> dict[str, Any]:
    return json.loads(document(make_runtime([], "", endless=False, context=8, slots=1).model))


def operation(route: Route) -> dict[str, Any]:
    return description()["paths"][route.path][route.method]


@cache
def validator(name: str) -> Draft202012Validator:
    """The validator of a named schema."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": description()["components"]})


def check(route: Route, answer: tuple[int, dict[str, str], bytes]) -> int:
    """Asserts that an answer is what the document says of its status and type; returns the status."""
    status, headers, data = answer
    documented = operation(route)["responses"]
    assert str(status) in documented, (route.path, status, data)
    assert status < 400 or not [leak for leak in LEAKS if leak in data.decode()], data
    content = documented[str(status)]["content"]
    media = headers["content-type"].partition(";")[0]
    schema = content[media]["schema"]
    if media == "application/json":
        validator(schema["$ref"].rpartition("/")[2]).validate(json.loads(data))
    elif media == "text/event-stream":
        events = Draft202012Validator(content[media]["x-event-schema"] | {"components": description()["components"]})
        found = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
        if found[-1] == "[DONE]":
            assert route.sentinel
            found.pop()
        assert found
        for event in found:
            events.validate(json.loads(event))
    return status


def ask(server: LiveServer, route: Route, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    path = route.path.replace("{model}", "org/tiny")
    return server.request(route.method.upper(), path, body, VERSION)


def test_the_document_is_openapi() -> None:
    """By the validator of the specification's authors' schema; and it is the same document each time."""
    validate(description())
    model = make_model()
    assert document(model) == document(model)
    assert len({route.name for route in ROUTES}) == len(ROUTES)


def test_the_document_has_every_route_and_no_other(server: LiveServer) -> None:
    table = server.server.app.service.routes
    served = {(path, method.lower()) for path, methods in table.items() for method in methods}
    documented = {(path, method) for path, methods in description()["paths"].items() for method in methods}
    assert documented == served | {("/v1/models/{model}", "get")}
    status, headers, data = server.request("GET", "/openapi.json")
    assert status == 200 and headers["content-type"] == "application/json" and json.loads(data) == description()


def test_the_document_says_nothing_of_the_program() -> None:
    texts = json.dumps(description())
    for word in ("UNBUILT", "INERT", "msgspec", "`Any`", "flare.protocols", "Struct"):
        assert word not in texts


def test_keys(server: LiveServer) -> None:
    """Routes that the document calls open are, and the others ask for the key that it names."""
    with LiveServer(settings={"api_key": "k"}, model={"explicit_ids": 128}) as keyed:
        for route in ROUTES:
            schemes = {name for way in operation(route)["security"] for name in way}
            bodies = GOOD.get(route.name, [None])
            status = check(route, ask(keyed, route, bodies[0])) if schemes else 401
            assert status == 401, route.path
            assert (ask(keyed, route, bodies[0])[0] != 401) == (not schemes)
            headers = {"bearer": {"Authorization": "Bearer k"}, "key": {"x-api-key": "k"}}
            for scheme in schemes:
                path = route.path.replace("{model}", "org/tiny")
                answer = keyed.request(route.method.upper(), path, bodies[0], VERSION | headers[scheme])
                assert answer[0] == 200, (route.path, scheme)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_answers_are_as_described(server: LiveServer, route: Route) -> None:
    for body in GOOD.get(route.name, [None]):
        if body is not None:
            validator(route.body).validate(body)
        assert check(route, ask(server, route, body)) == 200
        if route.events:
            streamed = body | {"stream": True}
            validator(route.body).validate(streamed)
            answer = ask(server, route, streamed)
            assert check(route, answer) == 200 and answer[1]["content-type"].startswith("text/event-stream")
    if route.text:
        answer = server.request("GET", route.path + "?format=json")
        assert check(route, answer) == 200 and check(route, server.request("GET", route.path + "?format=x")) == 400


def drawn(route: Route) -> st.SearchStrategy[Any]:
    """Bodies that the document allows for a route."""
    return Values(description()["components"]["schemas"]).of({"$ref": f"#/components/schemas/{route.body}"})


WAYS = [(route, stream) for route in BODIES for stream in (False, True) if route.events or not stream]
NAMES = [f"{route.name}-streamed" if stream else route.name for route, stream in WAYS]


@pytest.mark.parametrize(("route", "stream"), WAYS, ids=NAMES)
def test_what_the_document_allows_is_understood(server: LiveServer, route: Route, stream: bool) -> None:
    """It is answered, or refused for what the model, its context or its template cannot do: never as a field that is not
    known or has the wrong type, and never with a failure. A stream that begins ends in success."""
    seen: Counter[int] = Counter()

    @settings(max_examples=30 if stream else 60)
    @given(body=drawn(route))
    def allowed(body: Any) -> None:
        validator(route.body).validate(body)
        if route.events:
            body["stream"] = stream
        answer = ask(server, route, body)
        status = check(route, answer)
        seen[status] += 1
        assert status in ((200, 400, 404) if route.name == "showOllamaModel" else (200, 400)), (body, answer)
        told = answer[2].decode()
        if status == 400:
            assert answer[1]["content-type"] == "application/json"
            assert "unknown field" not in told and ": expected " not in told, (body, told)
            # Whether a message may be without content depends on what else it has.
            assert "this field is required" not in told or ".content: " in told, (body, told)
        elif stream:
            assert answer[1]["content-type"].startswith("text/event-stream") and ENDS.search(told), (body, told)

    allowed()
    assert seen[200] or route.name == "showOllamaModel", seen  # it knows one name


@pytest.mark.parametrize(("route", "stream"), WAYS, ids=NAMES)
def test_what_the_document_forbids_is_refused(server: LiveServer, route: Route, stream: bool) -> None:
    """As JSON, before a stream has begun."""
    refused: Counter[int] = Counter()

    @settings(max_examples=40 if stream else 80)
    @given(body=(st.sampled_from(GOOD[route.name]) | drawn(route)).flatmap(spoiled))
    def forbidden(body: Any) -> None:
        if stream and isinstance(body, dict):
            body.setdefault("stream", True)
        assume(not validator(route.body).is_valid(body))
        answer = ask(server, route, body)
        refused[check(route, answer)] += 1
        assert answer[1]["content-type"] == "application/json"
        assert answer[0] == 400 or (answer[0] == 422 and route.faults), (body, answer[2][:500])

    forbidden()
    assert refused.total() >= (10 if stream else 20)


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.name)
def test_without_the_key_nothing_of_a_body_counts(keyed: LiveServer, route: Route) -> None:
    """Allowed, forbidden or broken, it gets the same 401, and the model is not asked."""
    body = json.dumps(GOOD[route.name][0]).encode()
    told = ask(keyed, route, body)[2]

    @settings(max_examples=30)
    @given(body=drawn(route) | drawn(route).flatmap(spoiled) | st.binary(max_size=20))
    def denied(body: Any) -> None:
        answer = ask(keyed, route, body)
        assert check(route, answer) == 401 and answer[2] == told

    denied()
    assert keyed.server.generator.metrics.submitted == keyed.server.generator.admission.used == 0


def test_scores_of_prompts_are_as_described(server: LiveServer) -> None:
    """They are refused in streams, so that no body of GOOD asks for them."""
    for route in BODIES[:2]:
        body = GOOD[route.name][0] | {"prompt_logprobs": 2}
        validator(route.body).validate(body)
        status, _, data = answer = ask(server, route, body)
        assert (status, check(route, answer)) == (200, 200) and b'"prompt_logprobs":[null,{' in data, route.path


def test_values_that_ask_for_nothing_pass(server: LiveServer) -> None:
    """Every field that is not served says so, with the values that pass; they do, and one beside them does not."""
    for route in BODIES:
        properties = description()["components"]["schemas"][route.body]["properties"]
        for name, schema in properties.items():
            if not schema.get("description", "").startswith("Not served"):
                continue
            for value in schema["enum"]:
                assert ask(server, route, GOOD[route.name][0] | {name: value})[0] == 200, (route.path, name, value)
            status, _, data = ask(server, route, GOOD[route.name][0] | {name: {"x": "y"}})
            assert status == 400 and name.encode() in data


def test_sampling_bounds_are_the_models() -> None:
    """Where an author gave ranges, other values are moved into them, and the document sets no bounds."""
    for ranges in (None, {"temperature": (0.5, 1.0)}):
        schemas = json.loads(document(make_model(ranges=ranges)))["components"]["schemas"]
        for name, (low, high) in VALID.items():
            schema = schemas["ChatRequest"]["properties"][name]
            assert ((schema.get("minimum"), schema.get("maximum")) == (low, high)) == (ranges is None)


def test_template_variables_are_the_models() -> None:
    thinking = NO_THINKING | {"toggle": "thinking", "effort": "thinking_mode"}
    model = make_model(thinking=thinking, variables=frozenset({"today", "thinking", "thinking_mode"}))
    schemas = json.loads(document(model))["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        schema = schemas[name]["properties"]["chat_template_kwargs"]
        assert set(schema["properties"]) == {
            *("enable_thinking", "reasoning_effort"),
            *("thinking", "thinking_mode", "today"),
        }
        assert schema["properties"]["today"] == {} and "boolean" in schema["properties"]["thinking"]["type"]
        assert "string" in schema["properties"]["thinking_mode"]["type"]
