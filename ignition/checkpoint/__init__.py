"""Checkpoints: where a model's weights, settings and tokenizer come from, as one interface.

    open_checkpoint("smollm2")                    a named source: weights that an installed package carries
    open_checkpoint("models/Qwen3-0.6B")          a Hugging Face directory
    open_checkpoint("SmolLM2-135M.Q4_1.gguf")     a GGUF file
    open_checkpoint("HuggingFaceTB/SmolLM2-135M") a repository of the hub, through its cache

`interface.py` says what every source turns into (`Checkpoint`), `tensors.py` what a tensor is before anybody needs
its values (`LazyTensor`: a view of the mapped file), `encodings.py` how stored bytes become numbers. `huggingface.py`
reads directories on top of `safetensors_file.py`; `gguf.py` translates what `gguf_file.py` parsed and
`gguf_fields.py` types, with `gguf_rope.py` and `gguf_tokenizer.py` for the two parts that GGUF spells differently;
`hub.py` fetches repositories and knows the named sources; `files.py` opens what nobody vouches for.

Files are hostile until checked: every offset, length, count and type is held against the file's real length before
anything is mapped or allocated, nothing is ever unpickled, and each refusal is one line (`InputError`) that names the
file, the field, the value and the limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ignition.checkpoint.interface import Checkpoint


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens a directory, a GGUF file, a named source or a hub repository id, in that order of what exists.

    Raises InputError for whatever cannot be opened or must not be trusted.
    """
    from ignition.checkpoint import gguf, hub, huggingface

    path = Path(source)
    named = None
    if not path.exists():
        named = str(source)
        path = hub.locate(named)
    if path.is_dir():
        return huggingface.open_directory(path, name=named)
    return gguf.open_file(path)
