"""Text in, text out: everything between a conversation and token ids, and between token ids and an answer's text.

A request passes these files in this order:

1. `template.py` renders the conversation with the core's chat template, inside `sandbox.py` (immutable, bounded).
2. `prompt.py` does that so that the spellings of control tokens inside messages stay text (`controls.py`).
3. `tokenizer.py` turns the rendered prompt, or raw text, into token ids; `fewest.py` tells without that how many there are at
   least.
4. `detokenizer.py` turns each generated id into the text that is certain by then.
5. `stops.py` watches that text for the request's stop strings.

Nothing here knows the engine or a protocol. Heavy imports (tokenizers, jinja2) happen on first use.
"""
