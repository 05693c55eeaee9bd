"""What the exporter sees of a model's files, whatever they are stored as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flare.errors import InputError
from ignition.checkpoint.tensors import LazyTensor


@dataclass(frozen=True)
class Checkpoint:
    """One model's files, opened and checked; tensors stay in their files.

    `config` and `generation_config` speak Hugging Face's config.json and generation_config.json; tensor names are
    Hugging Face's too. `tokenizer_json` is a file of the `tokenizers` library. `tokenizer_config` holds `bos_token`,
    `eos_token`, `unk_token` and `pad_token` as strings or None, `add_bos_token`, `add_eos_token`, and what else the
    file holds. `chat_template_source` names the file that `chat_template` was found in. `notices` are lines for the
    export's report.
    """

    name: str
    source: str
    config: dict[str, Any]
    tensors: Mapping[str, LazyTensor]
    tokenizer_json: bytes = field(repr=False)
    tokenizer_config: dict[str, Any]
    chat_template: str | None = field(default=None, repr=False)
    chat_template_source: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def tensor(self, name: str) -> LazyTensor:
        """The named tensor. Raises InputError naming it, so that no weight is ever made up."""
        try:
            return self.tensors[name]
        except KeyError:
            raise InputError(f"{self.source}: tensor {name} is missing; the checkpoint is incomplete") from None
