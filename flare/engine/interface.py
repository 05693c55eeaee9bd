"""What the engine asks of a replay: fixed limits, argument arrays to fill, and two calls that run graphs.

`flare.replay` provides it over a core; tests provide it over simulated memory.
"""

from __future__ import annotations

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
    """

    tokens: Any
    positions: Any
    slots: Any
    page_table: Any
    rows: Any
    sampling: Any
    sampled: Any

    @property
    def limits(self) -> ReplayLimits: ...

    def step(self, n_tokens: int, n_rows: int) -> None:
        """Runs the step's tokens: writes their keys and values and makes the logits of the rows."""

    def sample(self, n_rows: int) -> None:
        """Draws `sampled[row]` from the logits of the last step, for its first `n_rows` rows. Raises CoreError when the
        logits of some rows give no token: theirs is negative, and those of all other rows are good."""
