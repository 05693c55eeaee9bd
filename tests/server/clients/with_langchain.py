"""langchain-openai and langchain-anthropic: Chat Completions, Responses and Messages. Run by ../test_client_libraries.py, in
an environment that has the libraries."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]
SDKS = ("openai", "anthropic")


@tool
def read(path: str) -> str:
    """Reads a file."""
    return path


def says(make, extra):
    model = make(key)
    armed = model.bind_tools([read])

    def raised(made, words):
        try:
            return made.invoke(words).text
        except Exception as error:  # LangChain's own, derived from the SDK's
            return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith(SDKS))

    def gathered(made, words):
        pieces = list(made.stream(words))
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        return whole

    first, streamed = armed.invoke("USE read"), gathered(armed, "USE read")
    result = ToolMessage("not there", tool_call_id=first.tool_calls[0]["id"])
    return {
        "text": model.invoke("hello").text,
        "streamed": gathered(model, "hello").text,
        "calls": [[call["name"], call["args"]] for message in (first, streamed) for call in message.tool_calls],
        "after": armed.invoke([HumanMessage("USE read"), first, result]).text,
        "refused": raised(make(key, **extra), "hello"),
        "denied": raised(make("wrong"), "hello"),
        "failed": raised(model, "BREAK"),
    }


def openai(key, **more):
    return ChatOpenAI(model="local", base_url=f"{url}/v1", api_key=key, max_retries=0, **more)


def responses(key, **more):
    return openai(key, use_responses_api=True, **more)


def anthropic(key, **more):
    return ChatAnthropic(model="local", base_url=url, api_key=key, max_retries=0, max_tokens=1000, **more)


print(
    json.dumps(
        {
            "chat": says(openai, {"extra_body": {"colour": 1}}),
            "responses": says(responses, {"extra_body": {"colour": 1}}),
            "messages": says(anthropic, {"model_kwargs": {"extra_body": {"colour": 1}}}),
        }
    )
)
