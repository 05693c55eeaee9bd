"""What requests ask of log probabilities, held against what the core gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from flare.conversation import GenerationRequest
from flare.core.manifest import MAX_ALTERNATIVES, MAX_EXPLICIT_IDS
from flare.errors import RequestError
from flare.logprobs import LogprobsWanted
from flare.served import ServedModel

Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]

MAX_PROMPT_VALUES = 1 << 20
"""Log probabilities of prompts in all choices of a request: a token's own and its alternatives. An answer has about 80 bytes
for each."""

MAX_VALUES = 1 << 22
"""Log probabilities that a request may ask for in all, those of prompts included; each token's own counts as one more. So 20
alternatives of a reply of 131072 tokens pass."""

AGAIN = "export the core again with this version"


def wanted(
    alternatives: int | None, field: str, ids: Sequence[int] | None, model: ServedModel, *, switch: str
) -> LogprobsWanted | None:
    """Returns what is wanted for each token of a reply, None where `alternatives` is.

    `field` gives their number, `switch` is what a request has to send for any log probabilities. Raises RequestError for what
    the core does not give, and for `logprob_token_ids` that it does not know or that come without the switch.
    """
    if alternatives is None:
        if ids:
            text = f"logprob_token_ids: these are alternatives in log probabilities; send {switch} with them"
            raise RequestError(text, param="logprob_token_ids")
        return None
    _check_alternatives(alternatives, field, model)
    return LogprobsWanted(alternatives, _explicit_ids(ids or (), model))


def _check_alternatives(alternatives: int, field: str, model: ServedModel) -> None:
    most = model.max_top_logprobs
    if not most:
        text = f"{field}: this core gives no log probabilities; leave it out, or {AGAIN}"
        raise RequestError(text, param=field, code="unsupported_parameter")
    if alternatives > most:
        text = f"{field}: {alternatives} alternatives, this core gives at most {most}; ask for fewer, or {AGAIN}"
        raise RequestError(text, param=field)


def _explicit_ids(ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Returns the ids, each once, where it comes first."""
    field = "logprob_token_ids"
    if len(ids) > MAX_EXPLICIT_IDS:
        raise RequestError(f"{field}: {len(ids)} ids, the limit is {MAX_EXPLICIT_IDS}; send fewer", param=field)
    for index, token in enumerate(ids):
        if token >= model.vocabulary:
            text = f"{field}[{index}]: {token} is outside the vocabulary of {model.vocabulary} tokens"
            raise RequestError(text, param=f"{field}[{index}]")
    found = tuple(dict.fromkeys(ids))
    if found and not model.explicit_ids:
        text = f"{field}: this core takes no token ids for log probabilities; leave it out, or {AGAIN}"
        raise RequestError(text, param=field, code="unsupported_parameter")
    if len(found) > model.explicit_ids:
        text = (
            f"{field}: {len(found)} different ids, this core takes at most {model.explicit_ids}; send fewer, or {AGAIN}"
        )
        raise RequestError(text, param=field)
    return found


def check_prompt(alternatives: int, field: str, model: ServedModel) -> None:
    """Raises RequestError where the core does not score prompts, or not with so many alternatives."""
    if not model.scores_prompts:
        text = f"{field}: this core does not score prompts; leave it out, or export the core again with "
        raise RequestError(f"{text}ignition export --prompt-logprobs", param=field, code="unsupported_parameter")
    _check_alternatives(alternatives, field, model)


def prompt_wanted(alternatives: int | None, model: ServedModel, *, stream: bool) -> int | None:
    """Returns `prompt_logprobs`. Raises RequestError where the request streams, and as `check_prompt` does."""
    if alternatives is None:
        return None
    if stream:
        text = (
            "prompt_logprobs: streams do not have them, 0 alternatives included; leave out stream, or prompt_logprobs"
        )
        raise RequestError(text, param="prompt_logprobs")
    check_prompt(alternatives, "prompt_logprobs", model)
    return alternatives


def check_size(
    generation: GenerationRequest, prompt_tokens: int, reply_tokens: int, prompt_field: str = "prompt_logprobs"
) -> None:
    """Raises RequestError for more log probabilities than an answer may have: of so many tokens of prompts, each counted as
    often as it is shown, and of as many as all choices may generate. `prompt_field` is what asks for the former."""
    values = 0
    if generation.prompt_logprobs is not None:
        values = prompt_tokens * (generation.prompt_logprobs + 1)
        if values > MAX_PROMPT_VALUES:
            text = f"{prompt_field}: {values} log probabilities of prompts in all choices, the limit is {MAX_PROMPT_VALUES}"
            raise RequestError(f"{text}; send shorter prompts, or ask for fewer alternatives", param=prompt_field)
    wanted = generation.logprobs
    if wanted is None:
        return
    values += reply_tokens * ((len(wanted.ids) or wanted.alternatives) + 1)
    if values > MAX_VALUES:
        field = generation.max_tokens_field
        text = f"{field}: up to {values} log probabilities in all choices, the limit is {MAX_VALUES}"
        raise RequestError(f"{text}; ask for fewer tokens, alternatives or choices", param=field)
