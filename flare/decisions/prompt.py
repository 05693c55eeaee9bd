"""From a question to its prompt, and to the tokens whose log probabilities are its answer.

The state comes first, as a message of its own and the same for all questions of a request; the question follows with its
options, each behind a label, and with the cue for the answer. The model is to answer with a label.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flare.conversation import Thinking
from flare.decisions.labels import SPELLINGS, LabelFinder, Labels
from flare.decisions.questions import Inquiry, Question
from flare.errors import RequestError
from flare.served import ServedModel
from flare.thinking import opens_reasoning, template_variables

if TYPE_CHECKING:
    from flare.text.prompt import Rendered
    from flare.text.template import ChatTemplate
    from flare.text.tokenizer import Tokenizer

REPLY = "Answer with the label of the option that fits best."
"""What the model is told. SmolLM2's labels have 0.69 of the probability behind it, and 0.49 behind "Reply with nothing but"."""

CUE = "Answer:"
"""What the question ends with."""

NO_THINKING = Thinking(switch=False, nearest=True)
ATTEMPTS = 4
"""How often labels are looked for behind prompts that name the labels found before."""


class Read(NamedTuple):
    """One question, ready to be asked: its prompt, and the token of each option's label."""

    prompt: array[int]
    labels: tuple[int, ...]


class Compiler:
    """Makes prompts of questions for one model. Safe to use from several threads at once, each result of `compile` by one."""

    def __init__(self, model: ServedModel, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._template = template
        self._finder = LabelFinder(tokenizer, REPLY)
        self._usual: dict[int, tuple[str, ...]] = {}  # spellings that were found last, by their number

    def compile(self, inquiry: Inquiry) -> Iterator[Read]:
        """Yields every question of an inquiry, ready to be asked, when it is due: each takes the work of its whole prompt.

        Raises RequestError where the core or its template cannot be asked, or where a question has more options than the core
        takes, before the first one; where there are fewer labels, or a prompt does not fit the context, in its place.
        """
        variables = self._variables()
        for question in inquiry.questions:
            self._check_labels(question, self._model.explicit_ids)
        for question in inquiry.questions:
            yield self._read(inquiry, question, variables)

    def _check_labels(self, question: Question, most: int) -> None:
        wanted = len(question.options)
        if most < wanted:
            text = f"{question.field}: {wanted} options, this model has labels for {most}; ask with fewer"
            raise RequestError(text, param=question.field)

    def _variables(self) -> Mapping[str, Any]:
        """Returns the template's variables, after the checks of what the core has."""
        model = self._model
        if model.explicit_ids == 0:
            text = "this core takes no token ids for log probabilities, by which options are read"
            raise RequestError(
                f"{text}; export the core again with this version", param="questions", code="unsupported_parameter"
            )
        if self._template is None:
            text = "this core has no chat template, through which questions are asked; serve a model that has one"
            raise RequestError(text, param="questions", code="unsupported_parameter")
        if opens_reasoning(NO_THINKING, model.thinking, otherwise=model.opens_reasoning):
            text = "this model's chat template cannot switch thinking off, so that no reply begins with its answer"
            raise RequestError(f"{text}; serve a model that can", param="questions", code="unsupported_parameter")
        return template_variables(NO_THINKING, model.thinking)

    def _read(self, inquiry: Inquiry, question: Question, variables: Mapping[str, Any]) -> Read:
        """Compiles one question. Which labels there are depends on how the prompt ends, and the prompt names them: they count
        when they are found behind the prompt that names just these."""
        wanted = len(question.options)
        spellings = self._usual.get(wanted, SPELLINGS[:wanted])
        found = Labels((), ())
        for _ in range(ATTEMPTS):
            rendered = self._render(inquiry.state, question_text(question, spellings), variables)
            fewest = self._tokenizer.fewest_tokens(*rendered)
            self._model.check_room(fewest, inquiry.state_field, question=True, counted=False)
            prompt = self._tokenizer.encode_rendered(*rendered)
            self._model.check_room(len(prompt), inquiry.state_field, question=True)
            found = self._finder.find(rendered, prompt, wanted)
            if not found.tokens:
                break
            self._check_labels(question, len(found.tokens))
            if found.spellings == spellings:
                self._usual[wanted] = spellings
                return Read(array("i", prompt), found.tokens)
            spellings = found.spellings
        text = "what this model's chat template makes of a question leaves no room for labels of one token"
        raise RequestError(f"{text}; serve another model", param=question.field, code="unsupported_parameter")

    def _render(self, state: str, question: str, variables: Mapping[str, Any]) -> Rendered:
        """Renders state and question as two messages, or as one for a template that wants turns to alternate."""
        from flare.text.prompt import render_prompt
        from flare.text.template import TemplateRefusal

        assert self._template is not None
        apart = [{"role": "user", "content": state}, {"role": "user", "content": question}]
        try:
            return render_prompt(self._tokenizer, self._template, apart, variables=variables)
        except TemplateRefusal:
            joined = [{"role": "user", "content": f"{state}\n\n{question}"}]
            return render_prompt(self._tokenizer, self._template, joined, variables=variables)


def question_text(question: Question, labels: tuple[str, ...]) -> str:
    """Returns the message that asks a question: what is asked, the options behind their labels, and the cue."""
    return "\n".join(_lines(question, labels))


def _lines(question: Question, labels: tuple[str, ...]) -> Iterator[str]:
    yield question.instructions
    yield ""
    yield from (f"{label}. {option}" for label, option in zip(labels, question.options, strict=False))
    yield ""
    yield REPLY
    yield CUE
