"""Questions with few answers, read from the model's distribution instead of from its words.

`questions.py` is the neutral request: one state, and questions about it, each with its options. `prompt.py` makes a prompt of
each, in which every option has a label; `labels.py` sees to it that each label is one token right behind that prompt.
`distribution.py` turns the labels' log probabilities into the options' probabilities. The protocols
(`flare/protocols/systemone.py` and `decisions.py`) decode into questions and encode distributions, `flare/service/decide.py`
asks one question after the other.
"""
