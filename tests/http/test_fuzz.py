"""Forged requests: whatever JSON comes, the answer is a result or a refusal that names something, never a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.protocols.chat import ChatRequest
from flare.protocols.completions import CompletionRequest
from flare.protocols.messages_fields import MessagesRequest
from flare.protocols.responses_fields import ResponsesRequest
from tests.support.live_server import VOCABULARY, LiveServer, reply

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    RAW: {"prompt": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
    RESPONSES: {"input": "hi"},
}
NAMES = {
    CHAT: ChatRequest.__struct_fields__,
    RAW: CompletionRequest.__struct_fields__,
    MESSAGES: MessagesRequest.__struct_fields__,
    RESPONSES: ResponsesRequest.__struct_fields__,
}
LIMIT = {path: "max_output_tokens" if path == RESPONSES else "max_tokens" for path in MINIMAL}
ENDS = re.compile(rb'data: (\[DONE\]|{"type":"message_stop"}|{"type":"response\.(completed|incomplete)".*})\n\n\Z')
"""The last event of a stream that went well."""
VERSION = {"anthropic-version": "2023-06-01"}


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


def strict_json(data: bytes) -> Any:
    """Decodes an answer that must be JSON as the standard has it."""
    return json.loads(data.decode("utf-8"), parse_constant=lambda name: pytest.fail(f"{name} in {data!r}"))


def check(answer: tuple[int, dict[str, str], bytes]) -> None:
    status, headers, data = answer
    assert status in (200, 400), data
    if headers["content-type"].startswith("text/event-stream"):
        assert ENDS.search(data), data
        return
    parsed = strict_json(data)
    assert (parsed.get("error") is not None) == (status == 400)
    assert status == 200 or (len(data) <= 4096 and parsed["error"]["type"] == "invalid_request_error")


@pytest.mark.parametrize("path", MINIMAL)
@settings(max_examples=150)
@given(data=st.data())
def test_any_value_in_any_field(server: LiveServer, path: str, data: st.DataObject) -> None:
    fields: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(NAMES[path]), values, max_size=3))
    check(server.request("POST", path, MINIMAL[path] | fields, VERSION))


@pytest.mark.parametrize("path", MINIMAL)
@settings(max_examples=40)
@given(body=st.one_of(st.binary(max_size=40), values.map(lambda v: json.dumps(v).encode("utf-8", "surrogatepass"))))
def test_any_body(server: LiveServer, path: str, body: bytes) -> None:
    check(server.request("POST", path, body, VERSION))


@pytest.mark.parametrize("path", MINIMAL)
def test_every_cut_of_a_good_body(server: LiveServer, path: str) -> None:
    whole = json.dumps(MINIMAL[path]).encode()
    for size in range(len(whole)):
        status, _, data = server.request("POST", path, whole[:size], VERSION)
        assert status == 400 and json.loads(data)["error"]["message"]


def merged(path: str, fields: str, *, stream: bool = False) -> bytes:
    """The minimal body of a route with raw text in front of its closing brace."""
    start = json.dumps(MINIMAL[path] | ({"stream": True} if stream else {}))
    return f"{start[:-1]}, {fields}}}".encode()


NUMBERS = [
    '"temperature": NaN',
    '"temperature": Infinity',
    '"top_p": -Infinity',
    '"temperature": 1e999',
    '"temperature": "0.5"',
    '"temperature": true',
    '"temperature": [0.5]',
    '"temperature": 01',
    '"temperature": .5',
    '"temperature": 0x1',
    '"top_k": 1.5',
    '"top_k": true',
    '"top_k": "1"',
    '"top_k": 99999999999999999999999999',
    '"top_k": 1' + "0" * 5000,
    '"max_tokens": 1e30',
    '"max_tokens": -1',
    '"max_tokens": 1.5',
    '"max_tokens": 9223372036854775808',
    '"max_tokens": "5"',
]
SEEDS = ['"seed": -1', '"seed": 1.5', '"seed": "1"', '"seed": 18446744073709551616', '"n": 1.5', '"n": -1', '"n": true']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", MINIMAL)
def test_numbers_that_are_none(server: LiveServer, path: str, stream: bool) -> None:
    """Refused as JSON before a stream begins, and told in JSON; the request after them is served."""
    for fields in NUMBERS + ([] if path == MESSAGES else SEEDS):
        body = merged(path, fields.replace("max_tokens", LIMIT[path]), stream=stream)
        status, headers, data = server.request("POST", path, body, VERSION)
        assert status == 400 and headers["content-type"] == "application/json", (fields, data)
        assert strict_json(data)["error"]["message"] and len(data) < 4096
    assert server.request("POST", path, MINIMAL[path], VERSION)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", MINIMAL)
def test_halves_of_characters(server: LiveServer, path: str, stream: bool) -> None:
    r"""A lone surrogate, written as \ud83d or in UTF-8, is refused wherever it stands; a pair of them is a character."""
    places = [
        '"metadata": {"k": "@"}',
        '"metadata": {"@": "v"}',
        '"@": 1',
        '"model": "@"',
        '"stop": "@"',
        '"tools": ["@"]',
    ]
    if path == RESPONSES:
        places += ['"instructions": "@"', '"input": [{"role": "user", "content": "@"}]', '"input": "@"']
    elif path != RAW:
        places += ['"messages": [{"role": "user", "content": "@"}]', '"messages": [{"role": "@", "content": "x"}]']
        places += ['"messages": [{"role": "user", "content": [{"type": "text", "text": "@"}]}]']
    else:
        places += ['"prompt": "@"', '"prompt": ["a", "@"]']
    for place in places:
        for half in (r"\ud83d", r"\udcf0", r"\ude00\ud83d", r"a\ud83d\ud83d b"):
            body = merged(path, place.replace("@", half), stream=stream)
            status, headers, data = server.request("POST", path, body, VERSION)
            assert status == 400 and headers["content-type"] == "application/json", (body, data)
            assert strict_json(data)["error"]["message"]
        raw = merged(path, place, stream=stream).replace(b"@", b"\xed\xa0\xbd")
        assert server.request("POST", path, raw, VERSION)[0] == 400
    whole = places[-1].replace("@", r"ok \ud83d\ude00")
    status, _, data = server.request("POST", path, merged(path, whole, stream=stream), VERSION)
    assert status == 200, data


@pytest.mark.parametrize("path", MINIMAL)
def test_of_a_name_that_comes_twice_the_last_value_counts(server: LiveServer, path: str) -> None:
    tokens, name = {LIMIT[path]: 1}, LIMIT[path]
    first = server.request("POST", path, MINIMAL[path] | tokens, VERSION)
    twice = server.request("POST", path, merged(path, f'"{name}": 4, "{name}": 1'), VERSION)
    assert first[0] == twice[0] == 200
    usage = [strict_json(answer[2])["usage"] for answer in (first, twice)]
    assert usage[0] == usage[1]
    assert server.request("POST", path, merged(path, f'"{name}": 1, "{name}": "x"'), VERSION)[0] == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [1, -1]}, 400),
        ({"prompt": [1, VOCABULARY]}, 400),
        ({"prompt": [1, 2**32 - 1]}, 400),
        ({"prompt": [1, 2**64]}, 400),
        ({"prompt": [True, 1]}, 400),
        ({"prompt": [1.0, 1]}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [1, "a"]}, 400),
        ({"prompt": ["a", 1]}, 400),
        ({"prompt": [[1], "a"]}, 400),
        ({"prompt": [[1], []]}, 400),
        ({"prompt": [[[1]]]}, 400),
        ({"prompt": None}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"stop_token_ids": [VOCABULARY]}, 400),
        ({"stop_token_ids": [-1]}, 400),
        ({"stop_token_ids": [2**63]}, 400),
        ({"stop_token_ids": [1.0]}, 400),
        ({"stop": [""]}, 400),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400),
        ({"stop": ["x"], "stop_token_ids": [1]}, 400),
        ({"prompt": [VOCABULARY - 1]}, 200),
        ({"prompt": [0], "stop_token_ids": [VOCABULARY - 1, 0]}, 200),
    ],
)
def test_token_ids_and_stops(server: LiveServer, fields: dict[str, Any], status: int) -> None:
    got, _, data = server.request("POST", RAW, MINIMAL[RAW] | fields)
    assert got == status, data
    if status == 400:
        error = strict_json(data)["error"]
        assert error["type"] == "invalid_request_error" and error["message"].isprintable()
