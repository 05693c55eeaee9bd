"""Forms of answers on every endpoint: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flare.constraints import checked_schema
from flare.conversation import Constraint
from flare.errors import RequestError
from flare.protocols.chat import ChatCompletions
from flare.protocols.completions import Completions
from flare.protocols.messages import CountTokens, Messages
from flare.protocols.responses import Responses
from tests.support.live_server import make_model

HI = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatCompletions(), {"messages": HI}),
    "completions": (Completions(), {"prompt": "hi"}),
    "responses": (Responses(), {"input": "hi"}),
    "messages": (Messages(), {"messages": HI, "max_tokens": 9}),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "An a."}}, "required": ["a"]}
ONLY = {"messages": {"continue_final_message": True}}


def constraint(name: str, **fields: Any) -> Constraint | None:
    endpoint, body = ENDPOINTS[name]
    return endpoint.decode(json.dumps({**body, **fields}).encode(), make_model()).generation.constraint


def refused(name: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        constraint(name, **fields)
    assert caught.value.status == 400 and "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return caught.value


def form(name: str, format: dict[str, Any]) -> dict[str, Any]:
    """A format as the endpoint has it: its schema's members are within, or beside the type."""
    if name in ("chat", "completions"):
        inner = {key: value for key, value in format.items() if key != "type"}
        return {"response_format": {"type": format["type"], **({"json_schema": inner} if inner else {})}}
    return {"text": {"format": format}} if name == "responses" else {"output_config": {"format": format}}


PLACE = {
    "chat": "response_format.json_schema.schema",
    "completions": "response_format.json_schema.schema",
    "responses": "text.format.schema",
    "messages": "output_config.format.schema",
}
FIELD = {"chat": "response_format", "completions": "response_format", "responses": "text.format"}
FIELD["messages"] = "output_config.format"


@pytest.mark.parametrize("name", ENDPOINTS)
def test_formats(name: str) -> None:
    field = FIELD[name]
    assert constraint(name) is None and constraint(name, **form(name, {"type": "text"})) is None
    found = constraint(name, **form(name, {"type": "json_object"}))
    assert found == Constraint("json_object", None, field, instruct=True)
    format = {"type": "json_schema", "name": "A", "description": "d", "strict": True, "schema": SCHEMA}
    assert constraint(name, **form(name, format)) == Constraint(
        "json_schema", SCHEMA, PLACE[name], instruct=True, enforced=checked_schema(SCHEMA, "s")
    )


@pytest.mark.parametrize("name", ENDPOINTS)
def test_grammars(name: str) -> None:
    assert constraint(name, grammar='start: "a"') == Constraint("lark", 'start: "a"', "grammar")
    field = "structured_outputs"
    for kind, value, wanted in (
        ("json", SCHEMA, Constraint("json_schema", SCHEMA, f"{field}.json", True, checked_schema(SCHEMA, "s"))),
        ("json_object", True, Constraint("json_object", None, f"{field}.json_object", instruct=True)),
        ("regex", "a+", Constraint("regex", "a+", f"{field}.regex")),
        ("grammar", 'start: "a"', Constraint("lark", 'start: "a"', f"{field}.grammar")),
        ("choice", ["a", "b.c"], Constraint("regex", r"a|b\x2ec", f"{field}.choice")),
    ):
        assert constraint(name, structured_outputs={kind: value}) == wanted


@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize(
    ("format", "place", "said"),
    [
        ({"type": "json_schema"}, "", "required"),
        ({"type": "json_schema", "schema": {"not": {}}}, ".not", "not supported in schemas of answers"),
        ({"type": "json_schema", "schema": {"properties": {"a": {"if": {}}}}}, ".properties.a.if", "not supported"),
        ({"type": "json_schema", "schema": 5}, "", "not a schema"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(name: str, format: dict[str, Any], place: str, said: str) -> None:
    error = refused(name, **form(name, format))
    assert error.param == PLACE[name] + place and said in str(error)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_other_types_are_refused(name: str) -> None:
    error = refused(name, **form(name, {"type": "xml"}))
    assert error.param == f"{FIELD[name]}.type" and "text, json_object or json_schema" in str(error)


@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["-" * 70_000]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 0}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 0, "regex": "a"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": 0}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
        ({"structured_outputs": {"xgrammar": 1}}, "structured_outputs.xgrammar"),
        ({"structured_outputs": [1]}, "structured_outputs"),
        ({"grammar": " "}, "grammar"),
        ({"grammar": {"type": "lark"}}, "grammar"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_refusals_of_grammars(name: str, fields: dict[str, Any], param: str) -> None:
    assert refused(name, **fields).param == param


@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize("own", ["format", "grammar", "structured_outputs"])
def test_what_cannot_stand_beside_a_form(name: str, own: str) -> None:
    field, fields = {
        "format": (FIELD[name], form(name, {"type": "json_object"})),
        "grammar": ("grammar", {"grammar": 'start: "a"'}),
        "structured_outputs": ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    }[own]
    stop = "stop_sequences" if name == "messages" else "stop"
    beside: list[tuple[str, Any]] = [(stop, ["x"]), ("stop_token_ids", [1]), ("stop_token_sequences", [[1, 2]])]
    beside.append(("ignore_eos", True))
    for other, value in beside:
        error = refused(name, **fields, **{other: value})
        assert error.param == other and str(error).startswith(f"{other}: ") and field in str(error)
        constraint(name, **fields, **{other: None})
    if own != "grammar":
        assert "grammar" in str(refused(name, **fields, grammar='start: "a"'))
    constraint(name, **fields, ignore_eos=False, **{stop: []})


def test_a_message_that_is_continued_has_no_form() -> None:
    prefilled = [*HI, {"role": "assistant", "content": "{"}]
    model = make_model(continuation="<|im_end|>\n")
    chat = {"messages": prefilled, "continue_final_message": True, "add_generation_prompt": False}
    for endpoint, body, form in (
        (ChatCompletions(), chat, {"response_format": {"type": "json_object"}}),
        (Messages(), {"messages": prefilled, "max_tokens": 9}, {"output_config": {"format": {"type": "json_object"}}}),
    ):
        endpoint.decode(json.dumps(body).encode(), model)
        with pytest.raises(RequestError) as caught:
            endpoint.decode(json.dumps({**body, **form}).encode(), model)
        assert caught.value.param in ("continue_final_message", "messages") and "cannot be combined" in str(
            caught.value
        )


def test_counting_counts_what_the_model_is_told() -> None:
    body = {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    found = CountTokens().count(json.dumps(body).encode(), make_model()).constraint
    assert found is not None and found.instruct
