"""Forged requests: whatever JSON comes, the answer is a result or a refusal that names something, never a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.protocols.chat import ChatRequest
from flare.protocols.completions import CompletionRequest
from tests.support.live_server import LiveServer, reply

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
MINIMAL = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, RAW: {"prompt": "hi"}}
NAMES = {CHAT: ChatRequest.__struct_fields__, RAW: CompletionRequest.__struct_fields__}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=lambda prompt, choice: reply("ok"), model={"max_tokens_cap": 8}) as live:
        yield live
        live.idle()
        assert not live.replay.refusals


numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), -(10**30)]),
    st.floats(allow_nan=True, allow_infinity=True),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        numbers,
        st.text(max_size=8),
        st.sampled_from(["none", "auto", "user", "text", "\ud83d"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "effort", "include_usage", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)


def check(answer: tuple[int, dict[str, str], bytes]) -> None:
    status, headers, data = answer
    assert status in (200, 400), data
    if headers["content-type"].startswith("text/event-stream"):
        assert data.endswith(b"data: [DONE]\n\n"), data
        return
    parsed = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} in {data!r}"))
    assert ("error" in parsed) == (status == 400)
    assert status == 200 or (len(data) <= 4096 and parsed["error"]["type"] == "invalid_request_error")


@pytest.mark.parametrize("path", MINIMAL)
@settings(max_examples=150)
@given(data=st.data())
def test_any_value_in_any_field(server: LiveServer, path: str, data: st.DataObject) -> None:
    fields: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(NAMES[path]), values, max_size=3))
    check(server.request("POST", path, MINIMAL[path] | fields))


@pytest.mark.parametrize("path", MINIMAL)
@settings(max_examples=40)
@given(body=st.one_of(st.binary(max_size=40), values.map(lambda v: json.dumps(v).encode("utf-8", "surrogatepass"))))
def test_any_body(server: LiveServer, path: str, body: bytes) -> None:
    check(server.request("POST", path, body))


@pytest.mark.parametrize("path", MINIMAL)
def test_every_cut_of_a_good_body(server: LiveServer, path: str) -> None:
    whole = json.dumps(MINIMAL[path]).encode()
    for size in range(len(whole)):
        status, _, data = server.request("POST", path, whole[:size])
        assert status == 400 and json.loads(data)["error"]["message"]
