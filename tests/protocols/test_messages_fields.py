"""Every field, block and tool type that the SDK can send is taken, inert with a reason, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import ContentBlockParam, ToolUnionParam
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams as BetaCountParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaCreateParams
from anthropic.types.message_create_params import MessageCreateParamsBase as CreateParams
from pydantic import BaseModel

from flare.errors import RequestError
from flare.output import OutputSyntax
from flare.protocols import messages_fields
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.messages_fields import INERT, TYPES, UNBUILT, MessagesRequest
from tests.support.live_server import make_model

USER = {"role": "user", "content": "hi"}
MODEL = make_model(output=OutputSyntax(tools="hermes"), continuation="")
MEANINGS = [5, 0.5, "x", True, False, [1], {"a": 1}]
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of the SDK that it sends as headers."""


def decode(**fields: Any) -> Any:
    return Messages().decode(json.dumps({"max_tokens": 5, "messages": [USER], **fields}).encode(), MODEL)


def types(union: Any) -> set[str]:
    """The values of `type` in a union of the SDK's types."""
    if isinstance(union, str):
        return {union}
    if isinstance(union, type):
        if issubclass(union, BaseModel):
            return types(union.model_fields["type"].annotation)
        return types(get_type_hints(union)["type"]) if "type" in getattr(union, "__annotations__", ()) else set()
    return {value for member in get_args(union) for value in types(member)}


@pytest.mark.parametrize("params", [CreateParams, BetaCreateParams, BetaCountParams])
def test_every_parameter_of_the_sdk_is_known(params: Any) -> None:
    assert set(get_type_hints(params)) <= set(MessagesRequest.__struct_fields__) | HEADERS


def test_every_untyped_field_is_in_the_table() -> None:
    untyped = {name for name, hint in get_type_hints(MessagesRequest).items() if hint is Any}
    assert untyped == set(UNBUILT)


@pytest.mark.parametrize("field", UNBUILT)
def test_an_unbuilt_field_is_refused_by_name_and_its_neutral_values_pass(field: str) -> None:
    for neutral in (None, *UNBUILT[field]):
        decode(**{field: neutral})
    refused = 0
    for value in MEANINGS:
        if any(type(value) is type(neutral) and value == neutral for neutral in UNBUILT[field]):
            continue
        with pytest.raises(RequestError) as caught:
            decode(**{field: value})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
        refused += 1
    assert refused >= 6


def test_inert_fields_pass_and_are_checked_for_their_type() -> None:
    plain = decode()
    values: dict[str, tuple[Any, Any]] = {
        "model": ("another", 5),
        "metadata": ({"user_id": "u"}, "u"),
        "cache_control": ({"type": "ephemeral", "ttl": "1h"}, "ephemeral"),
    }
    assert set(values) == {name for name in INERT if name in MessagesRequest.__struct_fields__}
    for name, (taken, wrong) in values.items():
        assert decode(**{name: taken}) == plain
        with pytest.raises(RequestError) as caught:
            decode(**{name: wrong})
        assert caught.value.param == name


@pytest.mark.parametrize(
    "type", sorted((types(ContentBlockParam) | types(BetaContentBlockParam)) - set(TYPES["messages.content"]))
)
@pytest.mark.parametrize("nested", [False, True])
def test_every_other_block_of_the_sdk_is_refused_by_its_type(type: str, nested: bool) -> None:
    """Whatever fields come first: they are foreign too."""
    block: dict[str, Any] = {"zzz": 1, "source": {"type": "x"}, "type": type}
    if nested:
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    with pytest.raises(RequestError) as caught:
        decode(messages=[USER, {"role": "user", "content": [{"type": "text", "text": "x"}, block]}])
    path = "messages[1].content[1].content[0].type" if nested else "messages[1].content[1].type"
    assert caught.value.param == path and type in str(caught.value)


@pytest.mark.parametrize("type", sorted((types(ToolUnionParam) | types(BetaToolUnionParam)) - {"custom"}))
def test_every_hosted_tool_of_the_sdk_is_refused_by_its_type(type: str) -> None:
    for tool in ({"max_uses": 8, "type": type, "name": "x"}, {"type": type, "name": "x", "input_schema": {}}):
        with pytest.raises(RequestError) as caught:
            decode(tools=[{"name": "f", "input_schema": {}}, tool])
        assert caught.value.param == "tools[1].type" and type in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"image"}]}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"image"}]}],"x":' + b"[" * 100_000,
        b'{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"image"}]}],"x":NaN}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":[{"type":["image"]}]}]}',
        b'{"max_tokens":5,"messages":{"content":[{"type":"image"}]}}',
        b'{"max_tokens":5,"messages":[5]}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":[[{"type":"image"}]]}]}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"messages[0].content[0]":1}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"tools[7].type":1}',
        b'{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"tools":[{"type":"x","name":"\\ud83d"}]}',
    ],
)
def test_bodies_that_are_wrong_in_several_ways_are_still_refused(body: bytes) -> None:
    for decoder in (Messages().decode, CountTokens().count):
        with pytest.raises(RequestError) as caught:
            decoder(body, MODEL)
        assert caught.value.status == 400 and "\n" not in str(caught.value)


RECORDED_REFUSALS = {
    "messages[0].content[1].type": "an image, of a model that sees none",
    "messages[0].content[3].type": "an image, of a model that sees none",
    "messages[1].content[0].signature": "a marker made up for the recording",
    "messages[2].content[0].signature": "a marker made up for the recording",
    "safeguards": "left out by the client when it asks again",
    "tools[0].type": "hosted search",
    "max_tokens": "missing, on purpose",
}


def test_recorded_requests(repository: Path) -> None:
    """What real clients send decodes, or the field is named; both happen."""
    seen: set[str] = set()
    taken = 0
    for file in sorted((repository / "tests/recorded").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            request = json.loads(line)
            if not request["path"].startswith(Messages.path):
                continue
            endpoint = CountTokens().count if request["path"] == CountTokens.path else Messages().decode
            try:
                endpoint(json.dumps(request["body"]).encode(), MODEL)
                taken += 1
            except RequestError as error:
                assert error.param is not None and str(error).startswith(error.param)
                seen.add(error.param)
    assert seen == set(RECORDED_REFUSALS) and taken >= 50


def test_the_tables_say_nothing_twice() -> None:
    assert not set(INERT) & set(UNBUILT)
    assert set(messages_fields.UNBUILT_TOOL) <= set(messages_fields.InputTool.__struct_fields__)
    assert set(messages_fields.UNBUILT_OUTPUT) <= set(messages_fields.OutputConfig.__struct_fields__)


def test_the_documentation_has_both_tables(repository: Path) -> None:
    text = (repository / "docs/api.md").read_text()
    inert = [f"| `{name}` | {reason} |" for name, reason in INERT.items()]
    unbuilt = [f"| `{name}` | {', '.join(f'`{json.dumps(v)}`' for v in values)} |" for name, values in UNBUILT.items()]
    for heading, lines in (("without an effect", inert), ("that are not served", unbuilt)):
        table = text.split(f"### Message fields {heading}\n")[1].split("|---|---|\n")[1].split("\n\n")[0]
        assert table.splitlines() == lines
