"""anthropic: Messages. Run by ../test_client_libraries.py, in an environment that has the library."""

import json
import sys

import anthropic

url, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}]


def asked(words, **more):
    return {"model": "local", "max_tokens": 1000, "messages": [{"role": "user", "content": words}], **more}


def raised(words, sender=client, **more):
    try:
        return sender.messages.create(**asked(words, **more))
    except anthropic.APIError as error:
        return type(error).__name__


whole = client.messages.create(**asked("USE read", tools=TOOLS))
with client.messages.stream(**asked("USE read", tools=TOOLS)) as stream:
    gathered = stream.get_final_message()
used = [block for message in (whole, gathered) for block in message.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": used[-1].id, "content": "not there", "is_error": True}
history = [
    {"role": "user", "content": "USE read"},
    {"role": "assistant", "content": gathered.content},
    {"role": "user", "content": [result]},
]
after = client.messages.create(**asked("", tools=TOOLS) | {"messages": history})
assert client.messages.count_tokens(model="local", messages=history, tools=TOOLS).input_tokens > 0
with client.messages.stream(**asked("hello")) as stream:
    streamed = "".join(stream.text_stream)
says = {
    "text": client.messages.create(**asked("hello")).content[0].text,
    "streamed": streamed,
    "calls": [[block.name, block.input] for block in used],
    "after": after.content[0].text,
    "refused": raised("hello", extra_body={"colour": 1}),
    "denied": raised("hello", client.with_options(api_key="wrong")),
    "failed": raised("BREAK"),
}
print(json.dumps({"messages": says}))
