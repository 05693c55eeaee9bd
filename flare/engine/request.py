"""A request, its causes of ending, and what the engine delivers of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flare.engine.sampling import History, SamplingParams
from flare.errors import RequestError
from flare.logprobs import LogprobsWanted, TokenLogprobs


class StopCause(enum.Enum):
    """Why a reply ended; the values are the API's `stop_reason`."""

    STOP_TOKEN = "stop_token"
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"


class QueueFull(RequestError):
    """There is no room for a group of `asked` requests beside the `live` ones."""

    def __init__(self, live: int, asked: int, slots: int, waiting: int) -> None:
        super().__init__(
            f"the server holds {live} requests, its limit is {slots} running and {waiting} waiting; there is no room for "
            f"{asked} more, try again later",
            status=503,
            type="server_error",
            code="queue_full",
        )


@dataclass(frozen=True, slots=True)
class ForcedToken:
    """A token that takes the place of the one that is drawn behind the reply's first `after` tokens, at least 1.

    `applies` says whether it does, given those tokens. The engine thread asks it at most once, so it must be quick, and what
    it says must depend on the tokens alone: then the reply does too.
    """

    after: int
    token: int
    applies: Callable[[Sequence[int]], bool]


class TokenStops(Protocol):
    """Finds sequences of tokens that end a reply."""

    def push(self, part: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Takes the reply's next tokens; returns those that belong to it for certain, and the sequence that they completed."""
        ...

    def flush(self) -> tuple[int, ...]:
        """Returns what was held back, when the reply ends without a match."""
        ...


class TokenMask(Protocol):
    """Says which tokens may come next in one reply. The engine thread asks it, once for every token."""

    def fill(self, address: int, words: int) -> bool:
        """Writes a bit for each token at `address`, in `words` words of 32, that of token t being bit t % 32 of word t // 32.
        Returns False where every token may come; nothing is written then. Raises MaskError, which ends the reply."""
        ...

    def accept(self, token: int) -> None:
        """Takes the token that came, which the mask allowed. Raises MaskError."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One reply to be generated. The caller sets the first group and reads the rest once the final delivery is there;
    until then the rest belongs to the engine thread.

    `max_new_tokens` counts reply tokens, at least 1. None leaves only the context as the limit, and is the way to ask
    for that: a number that ends just where the context does is reported as MAX_TOKENS. `stop_tokens` are the ids
    whose generation ends the reply, the model's own included unless the request ignores them; `stop_sequences` finds
    sequences that do. `choice` keys the draws together with the seed. `forced` may
    put a token into the reply; where a grammar forbids it, it does not. `grammar` bounds what may be drawn. `logprobs` asks
    for the log probabilities of the reply's tokens, `score` for those of the prompt's, with so many alternatives each (0 to
    20); then `max_new_tokens` may be 0. `sink` is the caller's, the engine never looks at it.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_sequences: TokenStops | None = None
    forced: ForcedToken | None = None
    grammar: TokenMask | None = None
    logprobs: LogprobsWanted | None = None
    score: int | None = None
    sink: Any = None

    # Set by Engine: moments in seconds of the monotonic clock, 0.0 until they come.
    submitted_at: float = field(init=False, default=0.0)
    admitted_at: float = field(init=False, default=0.0)
    first_token_at: float = field(init=False, default=0.0)
    finished_at: float = field(init=False, default=0.0)
    # Set by Engine: the row that native sampling reads, and the tokens it reads when a penalty is active.
    row: Any = field(init=False, default=None)
    history: History | None = field(init=False, default=None)
    # Set by Engine: entries of tokens that `stop_sequences` holds back.
    withheld: list[TokenLogprobs | None] = field(init=False, default_factory=list)
    # Set by Engine: how many of `pages` its row of the page table shows. Scheduler sets it back with the pages.
    mapped: int = field(init=False, default=0)

    # Set by Scheduler.add: prompt and reply so far; how long that may become, and the cause of ending there.
    tokens: list[int] = field(init=False, default_factory=list)
    limit: int = field(init=False, default=0)
    limit_cause: StopCause = field(init=False, default=StopCause.MAX_TOKENS)
    # Set by Scheduler while it runs: its slot (-1 while it waits), its pages in order of positions, how many tokens
    # those pages could hold, and the number of tokens whose keys and values they do hold.
    slot: int = field(init=False, default=-1)
    pages: list[int] = field(init=False, default_factory=list)
    capacity: int = field(init=False, default=0)
    computed: int = field(init=False, default=0)
    # Set by Scheduler.commit: how many of the prompt's tokens, from the second on, are scored. It stays when pages are lost.
    scored: int = field(init=False, default=0)
    # Set by Scheduler: prompt tokens counted as prefilled, those taken from a cache, how often it lost its pages.
    prefilled: int = field(init=False, default=0)
    cached_tokens: int = field(init=False, default=0)
    preemptions: int = field(init=False, default=0)

    @property
    def only_scores(self) -> bool:
        """Whether the prompt is scored and nothing is generated: its last token is never computed."""
        return self.max_new_tokens == 0

    def unscored(self, start: int, count: int) -> tuple[int, int]:
        """Positions, the end excluded, among the `count` from `start` on that score the prompt token behind them."""
        if self.score is None:
            return start, start
        first, end = max(start, self.scored), min(start + count, len(self.prompt) - 1)
        return first, max(first, end)

    @property
    def generated(self) -> int:
        """Reply tokens so far, those of a terminating stop included: the completion tokens of usage."""
        return max(0, len(self.tokens) - len(self.prompt))

    @property
    def queued_seconds(self) -> float:
        """From submission to a slot; for a request that never got one, to its end."""
        return (self.admitted_at or self.finished_at) - self.submitted_at

    @property
    def prefill_seconds(self) -> float:
        """From a slot to the first token; 0.0 without a token."""
        return self.first_token_at - self.admitted_at if self.first_token_at else 0.0


@dataclass(slots=True, eq=False)
class Delivery:
    """What one step brought for one request. Exactly one delivery of a request is final.

    `tokens` are the reply's new tokens. A terminating stop, one token or a sequence, is no part of the text: it comes as
    `stop_tokens` and is counted by `Request.generated`. Tokens that may become a sequence come later, when they are known
    not to. `logprobs` has an entry for each of `tokens` where the request asks for them, None for one that was forced.
    `scores` are the prompt's next tokens, from its second on. `error` is one line that may be shown to a client; it excludes
    `finished`.
    """

    request: Request
    tokens: list[int]
    finished: StopCause | None = None
    error: str | None = None
    stop_tokens: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    scores: Sequence[TokenLogprobs] = ()

    @property
    def final(self) -> bool:
        return self.finished is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds that the operator chooses. `max_waiting`: requests held beyond those that fill every slot."""

    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters from the engine's start, and gauges. Exact whenever no request is live; during a step, the gauges and
    counters of one snapshot may be a step apart.

    `steps` and `samples` count graphs that ran to their end. `decode_rounds` counts the tokens that a request got after
    its first one: a request's part in a step is a round when it brings one. `forced` counts the replies that got a
    forced token, `scored_tokens` the prompt tokens whose log probabilities were asked for, `masked_tokens` the tokens that
    were drawn under a grammar, and `mask_seconds` the time that its masks took.
    """

    healthy: bool
    slots: int
    active: int
    waiting: int
    free_pages: int
    total_pages: int
    page_tokens: int
    steps: int
    samples: int
    decode_rounds: int
    prefill_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    preemptions: int
    forced: int
    scored_tokens: int
    masked_tokens: int
    mask_seconds: float
    completed: int
    cancelled: int
    failed: int
