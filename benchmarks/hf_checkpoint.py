"""Writes a GGUF file as a Hugging Face directory in bf16, for servers that are at their fastest with that.

    python -m benchmarks.hf_checkpoint model.gguf DIRECTORY

The weights are the file's numbers, dequantised by transformers' own reader and rounded to bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
