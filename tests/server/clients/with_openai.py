"""openai: Chat Completions and Responses. Run by ../test_client_libraries.py, in an environment that has the library."""

import json
import sys

import openai

url, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=True)
TOOL = {
    "name": "read",
    "description": "Reads a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
FUNCTION = {"type": "function", "function": TOOL}


def raised(ask, words):
    try:
        return ask(words)
    except openai.APIError as error:
        return type(error).__name__


def chat(words, **more):
    return client.chat.completions.create(model="local", messages=[{"role": "user", "content": words}], **more)


def respond(words, **more):
    return client.responses.create(model="local", input=[{"role": "user", "content": words}], **more)


def denied(words):
    return client.with_options(api_key="wrong").chat.completions.create(
        model="local", messages=[{"role": "user", "content": words}]
    )


whole = chat("USE read", tools=[FUNCTION]).choices[0].message
with client.chat.completions.stream(
    model="local", messages=[{"role": "user", "content": "USE read"}], tools=[FUNCTION]
) as stream:
    gathered = stream.get_final_completion().choices[0].message
result = {"role": "tool", "tool_call_id": gathered.tool_calls[0].id, "content": "not there"}
after = client.chat.completions.create(
    model="local", messages=[{"role": "user", "content": "USE read"}, gathered, result], tools=[FUNCTION]
)
chat_says = {
    "text": chat("hello").choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chat("hello", stream=True) if chunk.choices),
    "calls": [
        [call.function.name, json.loads(call.function.arguments)]
        for message in (whole, gathered)
        for call in message.tool_calls
    ],
    "after": after.choices[0].message.content,
    "refused": raised(lambda words: chat(words, extra_body={"colour": 1}), "hello"),
    "denied": raised(denied, "hello"),
    "failed": raised(chat, "BREAK"),
}

answer = respond("USE read", tools=[{"type": "function", **TOOL, "strict": False}])
*_, last = respond("USE read", tools=[{"type": "function", **TOOL, "strict": False}], stream=True)
assert last.type == "response.completed", last
calls = [item for items in (answer, last.response) for item in items.output if item.type == "function_call"]
history = [
    {"role": "user", "content": "USE read"},
    *answer.output,
    {"type": "function_call_output", "call_id": calls[0].call_id, "output": "not there"},
]
responses_say = {
    "text": respond("hello").output_text,
    "streamed": "".join(
        event.delta for event in respond("hello", stream=True) if event.type == "response.output_text.delta"
    ),
    "calls": [[call.name, json.loads(call.arguments)] for call in calls],
    "after": client.responses.create(model="local", input=history).output_text,
    "refused": raised(lambda words: respond(words, extra_body={"colour": 1}), "hello"),
    "denied": raised(denied, "hello"),
    "failed": raised(respond, "BREAK"),
}
print(json.dumps({"chat": chat_says, "responses": responses_say}))
