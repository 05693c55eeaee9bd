"""From a core's files to what serves it: the tokenizer, the template, and the model that requests are resolved against."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from flare.config import RuntimeSettings
from flare.errors import CoreError
from flare.output import OutputSyntax, require
from flare.served import ServedModel, with_temperature
from flare.tables import check_tables, checked_ranges
from flare.thinking import NO_THINKING
from flare.thinking_budget import check_default

if TYPE_CHECKING:
    from flare.core.directory import Core
    from flare.text.template import ChatTemplate
    from flare.text.tokenizer import Tokenizer


def continuation_tail(facts: Mapping[str, Any]) -> str | None:
    """Returns what the template puts behind an assistant's last message, None where it cannot be continued."""
    found = facts.get("continuation") or {}
    tail = found.get("tail") if found.get("supported") is True else None
    return tail if isinstance(tail, str) else None


def output_syntax(facts: Mapping[str, Any]) -> OutputSyntax:
    """Returns how the model marks reasoning and calls; a core that does not say so has a model that only answers."""
    found = facts.get("output") or {}
    reasoning = found.get("reasoning")
    return OutputSyntax(
        tools=found.get("tools"),
        reasoning=None if reasoning is None else tuple(reasoning),
        open_token=found.get("open_token"),
        close_token=found.get("close_token"),
        spelled=frozenset(found.get("spelled", ())),
    )


def load_text(core: Core) -> tuple[Tokenizer, ChatTemplate | None]:
    """Loads the tokenizer and, if the core has one, the chat template."""
    from flare.text.tokenizer import Tokenizer

    tokens = core.manifest.tokens
    tokenizer = Tokenizer.load(core.file("tokenizer.json"), bos_token_id=tokens.bos, eos_token_ids=tokens.eos)
    file = core.manifest.template.file
    if file is None:
        return tokenizer, None
    from flare.text.template import ChatTemplate

    try:
        source = core.read(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CoreError(f"{file}: byte {error.start} is not UTF-8 text; export the core again") from None
    return tokenizer, ChatTemplate(source, special_tokens=core.manifest.template.facts.get("special_tokens"), name=file)


def served_model(
    core: Core,
    settings: RuntimeSettings,
    *,
    kv_pages: int,
    decode_weight_bytes: int,
    target: Literal["cpu", "cuda"] = "cpu",
    device: str = "generic",
) -> ServedModel:
    """Returns what requests are resolved against, from the core's manifest and the operator's settings.

    `kv_pages` and `decode_weight_bytes` are of the target that serves, `target` its kind, and `device` what runs it.

    Raises CoreError naming the field when the manifest's open tables hold what no request could be served with, InputError
    where a package is missing that the model's output is read with, and for a default budget or temperature that the model
    cannot keep.
    """
    manifest = core.manifest
    limits, sampling, facts = manifest.limits, manifest.sampling, manifest.template.facts
    check_tables(manifest)
    output = output_syntax(facts)
    require(output)
    check_default(settings.thinking_token_budget, output)
    tools, system, content = (facts.get(name) or {} for name in ("tools", "system", "content"))
    ranges = None if sampling.ranges == "open" else checked_ranges(sampling.ranges, sampling.defaults)
    defaults, sources = with_temperature(settings.temperature, sampling.defaults, sampling.sources, ranges)
    names = (*filter(None, settings.aliases), manifest.model.id)
    return ServedModel(
        id=names[0],
        root=manifest.model.id,
        names=names,
        created=int(time.time()),
        fingerprint=f"core-{core.manifest_sha256[:16]}",
        context_length=min(limits.max_context, kv_pages * limits.page_tokens),
        vocabulary=manifest.model.vocabulary,
        max_concurrency=limits.slots,
        prefill_chunk=limits.max_step_tokens,
        bos=manifest.tokens.bos,
        eos=frozenset(manifest.tokens.eos),
        thinking=facts.get("thinking") or NO_THINKING,
        inline_system=facts.get("inline_system", False),
        leading_system=system.get("leading", "renders") == "renders",
        content_parts=not content.get("string", True) and content.get("parts", False),
        has_template=manifest.template.file is not None,
        output=output,
        opens_reasoning=facts.get("opens_reasoning", False),
        generation_prompt_switch=facts.get("generation_prompt_switch", True),
        shows_tools=tools.get("declared", True),
        tool_arguments=tools.get("arguments") or "mapping",
        default_system=system.get("default"),
        continuation=continuation_tail(facts),
        defaults=defaults,
        sources=sources,
        ranges=ranges,
        max_tokens_cap=settings.max_tokens,
        decode_weight_bytes=decode_weight_bytes,
        target=target,
        device=device,
        strict_tools=settings.strict_tools,
        variables=frozenset(facts.get("variables") or ()),
        thinking_token_budget=settings.thinking_token_budget,
        max_top_logprobs=manifest.logprobs.alternatives,
        explicit_ids=manifest.logprobs.explicit_ids,
        scores_prompts=manifest.logprobs.prompt,
    )
