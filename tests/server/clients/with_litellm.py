"""LiteLLM: Chat Completions, as a vLLM server too, and Messages. Run by ../test_client_libraries.py, in an environment that
has the library."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

url, key = sys.argv[1:]
litellm.telemetry = False
litellm.suppress_debug_info = True
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}}]


def says(model, base):
    options = {"model": model, "api_base": base, "api_key": key, "num_retries": 0, "max_tokens": 1000}

    def ask(words, **more):
        return litellm.completion(messages=[{"role": "user", "content": words}], **(options | more))

    def raised(words, **more):
        try:
            return ask(words, **more)
        except Exception as error:
            return type(error).__name__

    def gathered(words, **more):
        chunks = list(ask(words, stream=True, **more))
        return litellm.stream_chunk_builder(chunks).choices[0].message

    whole = ask("USE read", tools=TOOLS).choices[0].message
    streamed = gathered("USE read", tools=TOOLS)
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "not there"}
    history = [{"role": "user", "content": "USE read"}, whole.model_dump(), result]
    calls = [call.function for message in (whole, streamed) for call in message.tool_calls]
    return {
        "text": ask("hello").choices[0].message.content,
        "streamed": gathered("hello").content,
        "calls": [[call.name, json.loads(call.arguments)] for call in calls],
        "after": litellm.completion(messages=history, tools=TOOLS, **options).choices[0].message.content,
        "refused": raised("hello", extra_body={"colour": 1}),
        "denied": raised("hello", api_key="wrong"),
        "failed": raised("BREAK"),
    }


print(
    json.dumps(
        {
            "chat": says("openai/local", f"{url}/v1"),
            "chat as vllm": says("hosted_vllm/local", f"{url}/v1"),
            "messages": says("anthropic/local", url),
        }
    )
)
