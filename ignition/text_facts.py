"""What a core says about text: special tokens, the template's probed facts, sampling defaults; and the check of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flare.core.directory import Core
from flare.core.manifest import Sampling, Template, Tokens
from flare.errors import CoreError, InputError
from flare.text.template import EFFORTS, ChatTemplate
from ignition.checkpoint.interface import Checkpoint
from ignition.output_probe import REASONING, probe_output
from ignition.sampling import gather_eos, gather_sampling
from ignition.template_probe import probe_template
from recipes.sampling import AuthorSampling

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text side of a manifest."""

    tokens: Tokens
    template: Template
    sampling: Sampling

    @property
    def notices(self) -> list[str]:
        """What someone who exports should know."""
        facts = self.template.facts
        notices = []
        if facts["tools"]["declared"] and facts["output"]["tools"] is None:
            notices.append(
                "the chat template takes tools, but how the model writes calls of them is not known: "
                "requests with tools will be refused"
            )
        if facts["thinking"]["effort"] is None:
            notices += [
                f"the chat template reads {name}, but no effort that it knows was found: requests that name one will be refused"
                for name in EFFORTS
                if name in facts["variables"]
            ]
        return notices


def gather_text_facts(
    checkpoint: Checkpoint, vocabulary: int, sampling_ranges: str | None, author: AuthorSampling | None = None
) -> TextFacts:
    """Probes the template and gathers special tokens and sampling defaults from the recipe and the checkpoint's files.

    Raises InputError naming file and field for values that cannot be used, and file, line and construct for a template
    that cannot be read.
    """
    spellings = {
        name: text for name in NAMED_TOKENS if (text := _spelling(checkpoint.tokenizer_config.get(name))) is not None
    }
    ids = token_ids(checkpoint.tokenizer_json)
    highest = max(ids.values(), default=-1)
    if highest >= vocabulary:
        raise InputError(
            f"tokenizer.json: its highest id is {highest}, the model has {vocabulary} tokens (0 to {vocabulary - 1}); "
            "use the tokenizer that the model was made with"
        )
    eos = gather_eos(
        generation_config=checkpoint.generation_config,
        config=checkpoint.config,
        tokenizer_eos=ids.get(spellings.get("eos_token", "")),
        vocabulary=vocabulary,
    )
    sampling = gather_sampling(
        generation_config=checkpoint.generation_config,
        config=checkpoint.config,
        author=author,
        ranges=sampling_ranges,
    )
    facts = _template_facts(
        checkpoint.chat_template, checkpoint.chat_template_source, spellings, checkpoint.tokenizer_json
    )
    return TextFacts(
        tokens=Tokens(
            bos=ids.get(spellings.get("bos_token", "")),
            eos=eos,
            pad=ids.get(spellings.get("pad_token", "")),
            add_bos=bool(checkpoint.tokenizer_config.get("add_bos_token", False)),
        ),
        template=Template(
            file=TEMPLATE_FILE if checkpoint.chat_template is not None else None,
            source=checkpoint.chat_template_source,
            facts=facts,
        ),
        sampling=Sampling(**sampling),
    )


def check_template_facts(core: Core) -> str:
    """Probes a core's template again. Raises CoreError when the manifest records something else."""
    template = core.manifest.template
    source = None
    if template.file is not None:
        try:
            source = core.read(template.file).decode()
        except UnicodeDecodeError as error:
            raise CoreError(f"{template.file}: not UTF-8 at byte {error.start}; export the core again") from None
    spellings = template.facts.get("special_tokens")
    if not isinstance(spellings, dict):
        raise CoreError("core.json: template.facts lacks special_tokens; export the core again")
    try:
        found = _template_facts(source, template.source, spellings, core.read("tokenizer.json"))
    except InputError as error:
        raise CoreError(str(error)) from None
    recorded: dict[str, Any] = template.facts
    for name in sorted(found.keys() | recorded.keys()):
        if json.loads(json.dumps(found.get(name))) != recorded.get(name):
            raise CoreError(
                f"core.json: template.facts.{name} differs from what {template.file or 'no template'} does; export again"
            )
    if source is None:
        return "no template; chat requests are refused"
    levels = [level["id"] for level in found["thinking"]["levels"]]
    return f"renders as recorded; thinking levels: {', '.join(levels) or 'none'}"


def _template_facts(
    source: str | None, file: str | None, spellings: dict[str, str], tokenizer_json: bytes
) -> dict[str, Any]:
    """All that is found out about a template and about what a model writes with it. Raises InputError."""
    tokens = _Tokens(tokenizer_json)
    facts = probe_template(source, file=file, special_tokens=spellings, reasoning=REASONING, controls=tokens.controls)
    template = None if source is None else ChatTemplate(source, special_tokens=spellings, name=file or "chat template")
    facts["output"] = probe_output(template, facts, tokens)
    return facts


class _Tokens:
    """See `output_probe.SpecialTokens`."""

    def __init__(self, tokenizer_json: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self.controls = [token.content for token in added.values() if not token.content.isspace()]

    def single(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[0] if len(ids) == 1 and self._tokenizer.token_to_id(text) == ids[0] else None

    def special(self, text: str) -> dict[int, str]:
        return {id: spelling for id, spelling in self._special.items() if spelling in text}


def _spelling(token: Any) -> str | None:
    """The text of a special token, which files give as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Every token's id by spelling, added tokens included."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json.decode("utf-8")).get_vocab(with_added_tokens=True)
