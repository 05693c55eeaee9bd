"""What the running server counts, and how its own routes answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ollama import Client
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from flare.protocols.models import model_info
from tests.support.live_server import LiveServer, reply

PATH = "/v1/completions"


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """Every reply is "hello." and the end token: seven tokens."""
    with LiveServer(script=lambda prompt, choice: reply("hello."), max_waiting=2) as live:
        yield live


def text(server: LiveServer, accept: str = "") -> dict[str, float]:
    """Samples by their name, with their labels in the order of the text."""
    status, headers, body = server.request("GET", "/metrics", headers={"Accept": accept} if accept else {})
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def numbers(server: LiveServer) -> dict[str, Any]:
    """The JSON object, once nothing runs; what was submitted has come to one of its ends."""
    server.idle()
    status, headers, body = server.request("GET", "/metrics?format=json")
    assert status == 200 and headers["content-type"] == "application/json"
    value = json.loads(body)
    ended = value["completed"] + value["requests_cancelled_total"] + value["failed"]
    assert ended == value["requests_submitted_total"]
    assert value["active"] == value["pending"] == value["http_admission_used"] == value["http_body_bytes"] == 0
    assert value["free_pages"] == value["total_pages"]
    return value


def test_nothing_has_happened_yet(server: LiveServer) -> None:
    value = numbers(server)
    for name in ("prefill_tokens", "generated_tokens", "completed", "failed", "verification_rounds"):
        assert value[name] == 0
    assert value["first_response"] == {
        "median_seconds": None,
        "samples": 0,
        "window_seconds": 60,
        "capacity": 4096,
        "truncated": False,
    }
    assert 0 <= value["uptime_seconds"] < 300
    assert value["healthy"] == 1
    assert value["http_admission_capacity"] == server.settings.max_requests
    assert value["http_body_bytes_capacity"] == server.settings.max_bodies_bytes
    assert value["http_connections"] >= 1
    assert value["http_connections_capacity"] == server.settings.max_connections


def test_every_token_and_choice_is_counted_once(server: LiveServer) -> None:
    prompt = [1, 2, 3, 4, 5]
    assert server.post(PATH, {"prompt": prompt, "n": 2})[0] == 200
    assert server.post(PATH, {"prompt": [prompt, [6]], "max_tokens": 3})[0] == 200
    assert server.request("POST", PATH, {"prompt": prompt, "stream": True})[0] == 200
    value = numbers(server)
    assert value["prefill_tokens"] == 5 + 5 + 5 + 1 + 5
    assert value["generated_tokens"] == 7 + 7 + 3 + 3 + 7
    assert value["verification_rounds"] == 6 + 6 + 2 + 2 + 6
    assert (value["completed"], value["requests_cancelled_total"], value["failed"]) == (5, 0, 0)
    window = value["first_response"]
    assert window["samples"] == value["first_responses_total"] == 3
    assert 0 < window["median_seconds"] < 60
    assert window["median_seconds"] <= value["first_response_seconds_total"]
    found = text(server)
    assert found["flare_generated_tokens_total"] == 27
    assert found[f"flare_http_requests_total {PATH} 200"] == 3
    assert found["flare_graph_launches_total step"] == server.replay.steps
    assert 0 < found["flare_graph_launches_total sample"] <= server.replay.steps


def test_a_stop_string_is_a_success(server: LiveServer) -> None:
    assert server.post(PATH, {"prompt": "a", "stop": "ll"})[0] == 200
    value = numbers(server)
    assert (value["completed"], value["requests_cancelled_total"], value["failed"]) == (1, 0, 0)
    assert 4 <= value["generated_tokens"] <= 7


def test_no_tokens_asked_for(server: LiveServer) -> None:
    """The model never sees the request; it is submitted and completed all the same."""
    assert server.post(PATH, {"prompt": "a", "max_tokens": 0, "echo": True})[0] == 200
    value = numbers(server)
    assert (value["completed"], value["generated_tokens"]) == (1, 0)
    assert value["first_response"]["samples"] == 0, "the echoed prompt is no response"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_cancelled(server: LiveServer, stream: bool) -> None:
    server.replay.pause()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", PATH, json.dumps({"prompt": "a", "n": 3, "stream": stream}))
    server.replay.wait_until_held()
    found = text(server)  # while a graph runs
    assert found["flare_active_requests"] + found["flare_pending_requests"] == 3
    assert found["flare_http_admission_used"] == 3
    assert found["flare_requests_submitted_total"] == 3
    connection.close()
    deadline = time.monotonic() + 15
    while text(server)["flare_http_admission_used"]:
        assert time.monotonic() < deadline, "the server does not notice that its client is gone"
    server.replay.resume()
    value = numbers(server)
    assert (value["completed"], value["requests_cancelled_total"], value["failed"]) == (0, 3, 0)
    status = "200" if stream else "499"
    assert text(server)[f"flare_http_requests_total {PATH} {status}"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails(server: LiveServer, stream: bool) -> None:
    server.replay.fail_next_step(RuntimeError("injected"))
    server.request("POST", PATH, {"prompt": "a", "n": 2, "stream": stream})
    value = numbers(server)
    assert (value["completed"], value["requests_cancelled_total"], value["failed"]) == (0, 0, 2)


def test_a_queue_that_is_full(server: LiveServer) -> None:
    """Four run, two wait, one is there: six more are one too many, and none of them runs. Seven would never fit."""
    server.replay.pause()
    held = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    held.request("POST", PATH, json.dumps({"prompt": "a"}))
    server.until(lambda: len(server.server.generator.answers) == 1)
    status, body = server.post(PATH, {"prompt": "a", "n": 6})
    assert (status, body["error"]["code"]) == (503, "queue_full")
    assert server.post(PATH, {"prompt": "a", "n": 7})[0] == 400
    server.replay.resume()
    assert held.getresponse().status == 200
    held.close()
    value = numbers(server)
    assert (value["completed"], value["failed"], value["requests_submitted_total"]) == (1, 6, 7)


def test_refusals_are_no_requests_of_the_model(server: LiveServer) -> None:
    server.post(PATH, {"prompt": 5})
    server.request("POST", PATH, b"{")
    server.request("GET", "/no/such/route")
    server.request("GET", "/another?one")
    server.request("DELETE", "/v1/models")
    server.request("GET", "/v1/models/org/tiny")
    server.request("GET", "/v1/models/other")
    server.request("GET", "/metrics?format=xml")
    assert numbers(server)["requests_submitted_total"] == 0
    found = text(server)
    assert found[f"flare_http_requests_total {PATH} 400"] == 2
    assert found["flare_http_requests_total other 404"] == 2
    assert found["flare_http_requests_total /v1/models 405"] == 1
    assert found["flare_http_requests_total /v1/models/{model} 200"] == 1
    assert found["flare_http_requests_total /v1/models/{model} 404"] == 1
    assert found["flare_http_requests_total /metrics 400"] == 1


def test_who_may_read_what() -> None:
    with LiveServer(settings={"api_key": "k"}) as server:
        for path in ("/health", "/metrics", "/metrics?format=json"):
            assert server.request("GET", path)[0] == 200
            status, headers, body = server.request("HEAD", path)
            assert (status, body) == (200, b"")
        for path in ("/v1/flare/status", "/v1/flare/model_info", "/v1/models", "/v1/models/org/tiny", "/api/tags"):
            status, _, body = server.request("GET", path)
            assert status == 401
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert server.request("GET", path, headers={"Authorization": "Bearer k"})[0] == 200


def test_the_header_chooses_the_format(server: LiveServer) -> None:
    text(server, "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1")
    _, headers, _ = server.request("GET", "/metrics", headers={"Accept": "application/json"})
    assert headers["content-type"] == "application/json"
    status, _, body = server.request("GET", "/metrics?format=csv")
    assert (status, json.loads(body)["error"]["param"]) == (400, "format")


def test_a_dead_model_is_reported(server: LiveServer) -> None:
    server.replay.die()
    server.request("POST", PATH, {"prompt": "a"})
    server.until(lambda: not server.runtime.engine.healthy)
    status, _, body = server.request("GET", "/health")
    assert (status, json.loads(body)["error"]["type"]) == (503, "server_error")
    assert text(server)["flare_healthy"] == 0
    assert json.loads(server.request("GET", "/v1/flare/status")[2])["status"] == "failed"
    server.server.generator.closing = True
    assert "shutting down" in json.loads(server.request("GET", "/health")[2])["error"]["message"]
    assert json.loads(server.request("GET", "/v1/flare/status")[2])["status"] == "stopping", "one answer of both"


def test_status_and_model_info(server: LiveServer) -> None:
    server.post(PATH, {"prompt": "a secret", "n": 2})
    server.idle()
    _, headers, body = server.request("GET", "/v1/flare/status")
    value = json.loads(body)
    assert headers["content-type"] == "application/json"
    assert value["status"] == "ok" and value["model"]["core"] == server.runtime.model.fingerprint
    assert value["requests"] == {"submitted": 2, "completed": 2, "cancelled": 0, "failed": 0}
    assert value["engine"]["generated_tokens"] == 14
    assert value["admission"] == {"used": 0, "capacity": server.settings.max_requests}
    assert b"secret" not in body
    assert json.loads(server.request("GET", "/v1/flare/model_info")[2]) == model_info(server.runtime.model)


NAMES = {"id": "alias", "names": ("alias", "org/tiny")}


def test_discovery_over_http() -> None:
    with LiveServer(model=NAMES) as server:
        client = Client(host=server.url)
        assert [model.model for model in client.list().models] == ["alias"]
        for name in NAMES["names"]:
            answer = client.show(name)
            assert answer.capabilities == ["completion"]
            assert answer.modelinfo is not None and answer.modelinfo["flare.context_length"] == 512
        first = server.request("GET", "/api/tags")[2]
        assert first == server.request("GET", "/api/tags")[2]
        for body, wanted in [({}, 400), ({"model": ""}, 400), ({"model": 5}, 400), ({"model": "other"}, 404)]:
            status, error = server.post("/api/show", body)
            assert status == wanted and list(error) == ["error"] and isinstance(error["error"], str)
        for coding in ("gzip", "deflate", "br", "zstd", "unheard-of"):
            status, headers, data = server.request("POST", "/api/show", b"{}", {"Content-Encoding": coding})
            assert status == 415 and isinstance(json.loads(data)["error"], str)
        assert server.request("POST", "/api/show", b'{"model": "alias"}', {"Content-Encoding": "identity"})[0] == 200
        for path in ("/api/chat", "/api/generate", "/api/pull"):
            status, error = server.post(path, {"model": "alias"})
            assert status == 404 and isinstance(error["error"], str)


def test_cards_over_http() -> None:
    with LiveServer(model=NAMES) as server:
        client = OpenAI(base_url=server.url + "/v1", api_key="k")
        listed = client.models.list().data
        assert [model.id for model in listed] == ["alias"]
        for name in NAMES["names"]:  # the SDK sends org%2Ftiny
            assert client.models.retrieve(name) == listed[0]
        assert server.request("GET", "/v1/models/org/tiny")[2] == server.request("GET", "/v1/models/alias")[2]
        status, _, body = server.request("GET", "/v1/models/other")
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
