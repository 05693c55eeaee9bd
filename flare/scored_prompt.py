"""The log probabilities of a prompt's tokens, on their way to all choices of that prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flare.conversation import Scored

if TYPE_CHECKING:
    from flare.engine import Delivery
    from flare.generation import Answer, Choice


class ScoredPrompt:
    """A prompt whose tokens are scored by the engine's request of its first choice.

    What comes for the others, but for failures, waits until the prompt is scored: so every choice shows its prompt first.
    """

    __slots__ = ("_choices", "_due", "_waiting")

    def __init__(self, choices: list[Choice], due: int) -> None:
        """`due` are the tokens to be scored, at least 1."""
        self._choices = choices
        self._due = due
        self._waiting: list[tuple[Choice, Delivery]] = []

    def receive(self, choice: Choice, delivery: Delivery) -> None:
        """Takes a step's delivery for one of the choices."""
        if delivery.scores and not choice.ended:
            self._due -= len(delivery.scores)
            for one in self._choices:
                choice.answer.listener(Scored(one.index, delivery.scores))
        if self._due and choice is not self._choices[0] and delivery.error is None:
            self._waiting.append((choice, delivery))
            return
        if delivery.tokens or delivery.final:
            choice.receive(delivery)
        if not self._due:
            waiting, self._waiting = self._waiting, []
            for one, held in waiting:
                one.receive(held)


class ScoredChoice(NamedTuple):
    """A choice of a scored prompt, as what an engine's request reports to."""

    choice: Choice
    prompt: ScoredPrompt

    @property
    def answer(self) -> Answer:
        return self.choice.answer

    def receive(self, delivery: Delivery) -> None:
        self.prompt.receive(self.choice, delivery)
