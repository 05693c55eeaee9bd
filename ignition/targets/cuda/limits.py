"""What kernels take of a core's limits. Other options would do, so what is too large is refused by the option's name."""

from __future__ import annotations

from flare.core.manifest import Limits
from flare.errors import InputError
from ignition.options import SCORED_ROWS
from ignition.targets.cuda.kernels.attention_shape import LARGEST_CONTEXT
from ignition.targets.cuda.kernels.elementwise import elements_size
from ignition.targets.cuda.kernels.heads import page_size


def require_pages(limits: Limits, elements: int) -> None:
    """Raises InputError for a context, or a kv page of so many elements, that kernels do not take."""
    if limits.max_context > LARGEST_CONTEXT:
        raise InputError(
            f"a context of {limits.max_context} tokens is more than the cuda target takes; give --max-context of "
            f"{LARGEST_CONTEXT} or less"
        )
    size = page_size(elements)
    if not size.taken:
        raise InputError(
            f"--page-tokens is {limits.page_tokens}: a page of all layers' keys and values has {size.value} elements, the cuda "
            f"target takes {size.high} at most; choose fewer tokens"
        )


def require_elements(limits: Limits, label: str, width: int, rows: str) -> None:
    """Raises InputError for elementwise work over rows of `width` elements, "T" for tokens or "R", of which the largest bucket
    has more than kernels take."""
    most = limits.max_step_tokens if rows == "T" else limits.max_rows
    size = elements_size(width * most)
    if size.taken:
        return
    fits = size.high // width
    given, choice = f"--max-step-tokens is {most}", f"{fits} at most"
    if rows == "R":
        given = f"--slots is {limits.slots}"
        if most > limits.slots:
            given += f", and --prompt-logprobs adds {most - limits.slots} rows"
            choice += " without --prompt-logprobs"
            if fits > SCORED_ROWS:
                choice = f"{fits - SCORED_ROWS} at most, or {choice}"
    raise InputError(
        f"{given}: {label} of {most} rows has {size.value} elements, the cuda target takes {size.high} at once; choose {choice}"
    )
