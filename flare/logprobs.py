"""Log probabilities of tokens: what a request wants of them, what it gets, and how that is read from a replay.

They describe the model's own distribution: before penalties, grammars, temperature and filters (`Replay` says how exactly).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class LogprobsWanted(NamedTuple):
    """What a request wants for each token of its reply: `alternatives` likeliest tokens, 0 to 20, or instead of them the tokens
    `ids`, at most 128 and each once."""

    alternatives: int = 0
    ids: tuple[int, ...] = ()


class TokenLogprobs(NamedTuple):
    """A token with its log probability (natural logarithm, -inf where it cannot come) and its rank: 1 and the number of tokens
    with a greater one.

    `ids` and `values` are the likeliest tokens in order, equal ones by id; or the tokens that the request named, in its
    order, and this token behind them where it is not one of them.
    """

    token: int
    logprob: float
    rank: int
    ids: tuple[int, ...]
    values: tuple[float, ...]


def read_logprobs(row: Any, token: int, wanted: LogprobsWanted) -> TokenLogprobs:
    """Reads what the replay wrote into a RowLogprobs structure for `token`."""
    logprob, ids = row.chosen, wanted.ids
    if not ids:
        count = row.count
        return TokenLogprobs(token, logprob, row.rank, tuple(row.ids[:count]), tuple(row.values[:count]))
    values = tuple(row.explicit[: len(ids)])
    if token not in ids:
        ids, values = (*ids, token), (*values, logprob)
    return TokenLogprobs(token, logprob, row.rank, ids, values)
