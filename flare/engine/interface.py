"""What the engine asks of a replay: fixed limits, argument arrays to fill, and two calls that run graphs.

`flare.replay` provides it over a core; tests provide it over simulated memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class ReplayLimits(Protocol):
    """The fixed sizes of a replay: counts of tokens, slots, rows and pages. Read only."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def kv_pages(self) -> int: ...


class Replay(Protocol):
    """Argument arrays are ctypes arrays that the engine writes between calls and the replay reads during them.

    tokens, positions, slots   int32 [max_step_tokens]; tokens of one slot contiguous, at consecutive positions
    page_table                 int32 [slots * page_stride]; entry i of a slot's row holds positions from i * page_tokens
    rows                       int32 [max_rows]; index in the step of each token whose logits are wanted
    sampling                   SampleParams [max_rows]; see `SamplingParams.write`
    sampled                    int32 [max_rows]; the replay writes it in `sample`
    targets, wanted            int32 [max_rows]; for `score`: a row's next token, and how many alternatives to it, 0 to 20
    logprobs                   RowLogprobs [max_rows]; the replay writes it in `sample` and `score`

    Log probabilities are those of the raw logits over the whole vocabulary, the sum taken in f64, each value rounded to f32
    once. Alternatives come by decreasing value, equal values by increasing id. A rank is 1 and the number of greater values.
    """

    tokens: Any
    positions: Any
    slots: Any
    page_table: Any
    rows: Any
    sampling: Any
    sampled: Any
    targets: Any
    wanted: Any
    logprobs: Any

    @property
    def limits(self) -> ReplayLimits: ...

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Runs the step's tokens: writes their keys and values and makes the logits of the rows. `meanwhile` is called once,
        on this thread, beside the others' or the device's work; it writes to none of the arrays, which that work may read."""

    def sample(self, n_rows: int) -> None:
        """Draws `sampled[row]` from the logits of the last step, for its first `n_rows` rows. Raises CoreError when the
        logits of some rows give no token: theirs is negative, and those of all other rows are good. Rows whose `sampling`
        has alternatives of at least 0 get their `logprobs`: of the drawn token, the alternatives and the explicit ids."""

    def score(self, first: int, count: int) -> None:
        """Fills `logprobs` for `count` rows of the last step from `first` on, each against its target. Raises CoreError when
        the logits of some rows are no distribution: their rank is 0, and all other rows are good."""
