"""What a request must be before it comes near a step that others share."""

from __future__ import annotations

from collections.abc import Iterable

from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS
from flare.engine.request import Request
from flare.errors import RequestError


def check_requests(group: Iterable[Request], *, context: int, vocabulary: int) -> None:
    """Raises RequestError for what would make a step fail, or could never run in a context of so many tokens. A list that
    several of them share as their prompt is looked at once."""
    checked: set[int] = set()
    for request in group:
        if id(request.prompt) not in checked:
            _check_prompt(request.prompt, vocabulary)
            checked.add(id(request.prompt))
        _check_request(request, context, vocabulary)


def _check_prompt(prompt: list[int], vocabulary: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty, it must have at least 1 token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        bad = next(token for token in prompt if not 0 <= token < vocabulary)
        raise RequestError(f"the prompt has token id {bad}, ids must be from 0 to {vocabulary - 1}")


def _check_request(request: Request, context: int, vocabulary: int) -> None:
    used = len(request.prompt)
    room = 0 if request.score is not None and request.max_new_tokens == 0 else 1
    if used + room > context:
        raise RequestError(
            f"the prompt is {used} tokens and the context holds {context}; compact or shorten the conversation",
            code="context_full",
            extra={"flare_context": {"tokens_used": used, "context_length": context, "tokens_remaining": 0}},
        )
    least = 1 if request.score is None else 0
    if request.max_new_tokens is not None and request.max_new_tokens < least:
        raise RequestError(f"max_tokens is {request.max_new_tokens}, it must be at least {least}", param="max_tokens")
    if not 0 <= request.choice < 2**32:
        raise RequestError(f"choice is {request.choice}, it must be from 0 to {2**32 - 1}")
    forced = request.forced
    if forced is not None and not (forced.after >= 1 and 0 <= forced.token < vocabulary):
        text = f"token {forced.token} is forced behind {forced.after} tokens"
        raise RequestError(f"{text}; ids must be from 0 to {vocabulary - 1}, and at least 1 token comes first")
    _check_logprobs(request, vocabulary)


def _check_logprobs(request: Request, vocabulary: int) -> None:
    wanted = request.logprobs
    for name, count in (("score", request.score), ("logprobs", None if wanted is None else wanted.alternatives)):
        if count is not None and not 0 <= count <= MAX_ALTERNATIVES:
            raise RequestError(f"{name} is {count} alternatives, it must be from 0 to {MAX_ALTERNATIVES}")
    ids = () if wanted is None else wanted.ids
    if len(ids) > MAX_EXPLICIT_IDS or len(set(ids)) != len(ids):
        raise RequestError(f"logprobs are of {len(ids)} ids, they must be at most {MAX_EXPLICIT_IDS} and each once")
    if bad := [token for token in ids if not 0 <= token < vocabulary]:
        raise RequestError(f"logprobs are of token id {bad[0]}, ids must be from 0 to {vocabulary - 1}")
