"""GET /openapi.json: all routes in OpenAPI 3.1, made from the types that decode the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare import __version__
from flare.protocols.endpoint import encode_json
from flare.protocols.openapi_answers import ANSWERS
from flare.protocols.openapi_requests import CHAT, COMPLETION, DECISION, MESSAGES, RESPONSES, SHOW, request_schemas
from flare.protocols.openapi_systemone import SCHEMAS as SYSTEM_ONE
from flare.protocols.schemas import TEXT, Schema, any_of, ref, words
from flare.protocols.versions import API_VERSIONS, HEADER
from flare.served import ServedModel

INFO = (
    "One language model behind the OpenAI, Anthropic and Ollama (discovery) protocols. The loaded model answers whatever "
    "`model` says. Fields that are not described are refused, but on /v1/systemone. GET routes also take HEAD."
)
READ_STATUSES = (401,)
BODY_STATUSES = (400, 401, 403, 413, 415, 429, 500, 503)
STATUSES = {
    400: "The request is malformed, not served, or does not fit the context.",
    401: "The serving key is missing or wrong.",
    403: "A web page asks under a name that is none of this machine's.",
    404: "There is no model of this name.",
    413: "The body is larger than the limit, as sent or as decoded.",
    415: "The content type or coding is not served.",
    422: "The body breaks its schema; each fault is told with its place.",
    429: "There is no room for the request now; `Retry-After` says when to come again.",
    500: "The model failed, or what it wrote is no valid answer.",
    503: "The queue is full, the model cannot run, or the server stops.",
}
KEYED: list[dict[str, list[str]]] = [{"bearer": []}, {}]
"""The empty member stands for a server without a serving key."""


@dataclass(frozen=True)
class Route:
    """One operation. `body` and `answer` are names of schemas; `events` is that of a stream's events, for routes that have
    one, and `sentinel` says that "[DONE]" follows them. `statuses` are those of refusals and failures, and `faults` is the form
    of those with 422."""

    path: str
    name: str
    summary: str
    answer: str
    body: str = ""
    events: str = ""
    sentinel: bool = False
    statuses: Sequence[int] = READ_STATUSES
    error: str = "Error"
    faults: str = ""
    keyed: bool = True
    parameters: Sequence[Schema] = ()
    text: bool = False

    @property
    def method(self) -> str:
        return "post" if self.body else "get"


VERSION: Schema = {
    "name": HEADER,
    "in": "header",
    "required": True,
    "schema": words(API_VERSIONS),
    "description": "The version of the Messages API.",
}
MODEL: Schema = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": TEXT,
    "description": "The checkpoint's name or an alias; slashes in it may stand as they are.",
}
FORMAT: Schema = {
    "name": "format",
    "in": "query",
    "schema": words(["json", "prometheus"]),
    "description": "Goes before `Accept`; without either the answer is Prometheus text.",
}

ROUTES = (
    Route(
        "/v1/chat/completions",
        "createChatCompletion",
        "Answer a conversation",
        "ChatCompletion",
        body=CHAT.full("ChatRequest"),
        events="ChatCompletionChunk",
        sentinel=True,
        statuses=BODY_STATUSES,
    ),
    Route(
        "/v1/completions",
        "createCompletion",
        "Continue raw text or token ids",
        "TextCompletion",
        body=COMPLETION.full("CompletionRequest"),
        events="TextCompletionChunk",
        sentinel=True,
        statuses=BODY_STATUSES,
    ),
    Route(
        "/v1/messages",
        "createMessage",
        "Answer a conversation, in Anthropic's protocol",
        "Message",
        body=MESSAGES.full("MessagesRequest"),
        events="MessageEvent",
        statuses=BODY_STATUSES,
        error="MessagesError",
        parameters=(VERSION,),
    ),
    Route(
        "/v1/messages/count_tokens",
        "countTokens",
        "Count the tokens of a conversation's prompt",
        "InputTokens",
        body=MESSAGES.full("CountRequest"),
        statuses=BODY_STATUSES,
        error="MessagesError",
        parameters=(VERSION,),
    ),
    Route(
        "/v1/responses",
        "createResponse",
        "Answer a conversation of items",
        "Response",
        body=RESPONSES.full("ResponsesRequest"),
        events="ResponseEvent",
        statuses=BODY_STATUSES,
    ),
    Route(
        "/v1/systemone",
        "createSystemOne",
        "Answer named questions about a state with probabilities, in TypeSafe's protocol",
        "SystemOneAnswers",
        body="SystemOneRequest",
        statuses=(*BODY_STATUSES, 422),
        faults="SystemOneFaults",
    ),
    Route(
        "/v1/decisions",
        "createDecisions",
        "Answer a list of questions about a text with probabilities",
        "Decisions",
        body=DECISION.full("DecisionRequest"),
        statuses=BODY_STATUSES,
    ),
    Route("/v1/models", "listModels", "List the loaded model", "ModelList"),
    Route(
        "/v1/models/{model}",
        "getModel",
        "Describe the loaded model",
        "Model",
        statuses=(401, 404),
        parameters=(MODEL,),
    ),
    Route("/v1/flare/model_info", "getModelInfo", "Say what cards embed, and what runs the model", "ModelInfo"),
    Route("/v1/flare/status", "getStatus", "Say what the server and its model are doing", "Status"),
    Route("/health", "getHealth", "Say whether the model can run", "Health", statuses=(503,), keyed=False),
    Route(
        "/metrics",
        "getMetrics",
        "Report counters and gauges",
        "Metrics",
        statuses=(400,),
        keyed=False,
        parameters=(FORMAT,),
        text=True,
    ),
    Route("/openapi.json", "getDescription", "Describe the API: this document", "Description"),
    Route("/api/tags", "listOllamaModels", "List the loaded model as Ollama does", "OllamaTags"),
    Route(
        "/api/show",
        "showOllamaModel",
        "Describe the loaded model as Ollama does",
        "OllamaModel",
        body=SHOW.full("ShowRequest"),
        statuses=(400, 401, 403, 404, 413, 415, 429),
        error="OllamaError",
    ),
)


def document(model: ServedModel) -> bytes:
    """Returns the description of all routes as JSON; the same bytes for the same model."""
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return encode_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "Flare", "version": __version__, "description": INFO},
            "paths": paths,
            "components": {
                "schemas": {**request_schemas(model), **SYSTEM_ONE, **ANSWERS},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(route: Route) -> Schema:
    content: Schema = {"application/json": {"schema": ref(route.answer)}}
    if route.events:
        content["text/event-stream"] = _stream(route)
    if route.text:
        content["text/plain"] = {"schema": TEXT}
    responses: Schema = {"200": {"description": "The answer.", "content": content}}
    for status in route.statuses:
        # A missing key is told in OpenAI's form where the protocol has no word for it.
        name = "Error" if status == 401 and route.error == "OllamaError" else route.error
        name = route.faults if status == 422 else name
        told = {"application/json": {"schema": ref(name)}}
        responses[str(status)] = {"description": STATUSES[status], "content": told}
    operation: Schema = {"operationId": route.name, "summary": route.summary, "responses": responses}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(route.body)}}}
    if not route.keyed:
        operation["security"] = []
    elif route.error == "MessagesError":
        operation["security"] = [*KEYED, {"key": []}]
    else:
        operation["security"] = KEYED
    return operation


def _stream(route: Route) -> Schema:
    """The media type of a stream. OpenAPI 3.1 has no word for its events: their schema stands in `x-event-schema`."""
    error = [] if route.events in ("MessageEvent", "ResponseEvent") else [ref(route.error)]
    text = "Server-sent events, for requests with `stream: true`; the data of each is JSON after `x-event-schema`."
    if route.sentinel:
        text += " The last one is `data: [DONE]`, unless the answer failed."
    events = any_of(ref(route.events), *error) if error else ref(route.events)
    return {"schema": {"type": "string", "description": text}, "x-event-schema": events}
