"""Chat templates written for these tests, each in the manner of a widespread kind."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Alternation is enforced, only a leading system message is taken, and it is put before the first question.
STRICT = """{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = none %}
    {%- set turns = messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Turns must alternate, beginning with the user; turn " ~ loop.index ~ " does not") }}
    {%- endif %}
    {%- if turn.role == "user" %}
        {{- "[INST] " ~ (system ~ "\\n\\n" if loop.first and system else "") ~ turn.content ~ " [/INST]" }}
    {%- elif turn.role == "assistant" %}
        {{- " " ~ turn.content | trim ~ eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant turns are taken") }}
    {%- endif %}
{%- endfor %}
"""

# Thinking can be switched; calls are printed argument by argument; old reasoning is dropped.
SWITCHED = """{%- macro said(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content if part.type == "text" %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- "<|im_start|>system\\n" }}
    {%- if messages[0].role == "system" %}{{- said(messages[0].content) + "\\n\\n" }}{%- endif %}
    {{- "Callable:" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}
    {{- "<|im_start|>system\\n" + said(messages[0].content) + "<|im_end|>\\n" }}
{%- endif %}
{%- set seen = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and seen.last == 0 %}{%- set seen.last = messages | length - loop.index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception("A system message must come first.") }}{%- endif %}
    {%- elif message.role == "user" %}
        {{- "<|im_start|>user\\n" + said(message.content) + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {%- set content = said(message.content) | trim %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if loop.index0 > seen.last and message.reasoning_content %}
            {{- "<think>\\n" + message.reasoning_content | trim + "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\\n<tool_call>\\n<function=" + call.function.name + ">\\n" }}
            {%- for name, value in call.function.arguments | items %}
                {{- "<parameter=" + name + ">\\n" }}
                {{- value if value is string else value | tojson }}
                {{- "\\n</parameter>\\n" }}
            {%- endfor %}
            {{- "</function>\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + said(message.content) + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- else %}
        {{- raise_exception("Unexpected role.") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}
    {%- else %}{{- "<think>\\n" }}
    {%- endif %}
{%- endif %}
"""

# The switch, and three efforts of which two add an instruction; any other effort is refused.
EFFORTS = """{%- set thinks = enable_thinking is not defined or enable_thinking %}
{%- set effort = reasoning_effort | default("deep", true) %}
{%- set instruction = "" %}
{%- if thinks %}
    {%- if effort == "deep" %}{%- set instruction = "Effort is deep. Check every step." %}
    {%- elif effort == "usual" %}
    {%- elif effort == "brief" %}{%- set instruction = "Effort is brief. Answer soon." %}
    {%- else %}{{- raise_exception("effort " ~ effort ~ " is unknown") }}
    {%- endif %}
{%- endif %}
{%- set system = messages[0].content if messages[0].role == "system" else "" %}
{%- if instruction or system %}
    {%- set gap = "\\n\\n" if instruction and system else "" %}
    {{- "<|im_start|>system\\n" ~ instruction ~ gap ~ system ~ "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages if message.role != "system" %}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" ~ ("<think>\\n" if thinks else "<think>\\n\\n</think>\\n\\n") }}
{%- endif %}
"""

# Efforts without a switch, looked up in a mapping; each says something, in the same first words.
MAPPED = """{%- set words = {"low": "Reasoning: low.", "high": "Reasoning: high."} %}
{%- if reasoning_effort is defined and reasoning_effort not in words %}{{- raise_exception("no") }}{%- endif %}
{{- "<|system|>" ~ words[reasoning_effort if reasoning_effort is defined else "low"] ~ "\\n" }}
{%- for message in messages %}
    {%- if message.role != "system" %}{{- "<|" ~ message.role ~ "|>" }}{%- endif %}
    {{- message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}
"""

# Dated, with headers; calls are printed as JSON; tool results have a role of their own.
DATED = """{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{{- "<|start|>system<|sep|>\\n\\nToday: " + date + "\\n\\n" }}
{%- if messages[0]["role"] == "system" %}
    {{- messages[0]["content"] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools is not none %}
    {%- for tool in tools %}{{- "\\n" + tool | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("One call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|sep|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|sep|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- "<|start|>" + message["role"] + "<|sep|>\\n\\n" + message["content"] | trim + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant<|sep|>\\n\\n" }}{%- endif %}
"""

# Loop controls, generation marks, calls as the string they came as, and content in parts only.
MARKED = """{% for message in messages %}
{% if message.role == "system" %}{% continue %}{% endif %}
{% if message.role == "assistant" %}
{% generation %}
A: {% for part in message.content %}{{ part.text }}{% endfor %}
{% for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments }}){% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ eos_token }}
{% endgeneration %}
{% else %}
{{ message.role | upper }}: {% for part in message.content %}{{ part.text }}{% endfor %}
{% endif %}

{% endfor %}
{% if add_generation_prompt %}
A:
{%- endif %}
"""
