"""Writes a GGUF file's weights in another block format, so that both sides can be measured on the same bits.

    python -m benchmarks.requantise model.Q4_1.gguf q8_0 model.Q8_0.gguf

Tensors in 4-bit and 5-bit blocks are dequantised to f32 and quantised again with the gguf package's own rules.
Float tensors and the ones already kept in 8 bits or more stay as they are; so does all metadata but the file type.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format

FORMATS = {
    "q4_0": (Format.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Format.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q8_0": (Format.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
NARROW = {Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q4_K, Format.Q5_K}


def requantise(source: Path, format_name: str, destination: Path) -> None:
    """Writes `source` to `destination` with its narrow tensors in `format_name` (of FORMATS). Replaces the file."""
    target, file_type = FORMATS[format_name]
    reader = gguf.GGUFReader(source)
    partial = destination.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.get_field(gguf.Keys.General.ARCHITECTURE).contents())
    copy_metadata(reader, writer, file_type)
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if stored in NARROW and stored != target:
            data = gguf.quantize(gguf.dequantize(data, stored).astype(np.float32), target)
            stored = target
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, destination)


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: gguf.LlamaFileType) -> None:
    """Copies every key but those that the writer makes itself, with its type; the file type becomes `file_type`."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        if field.name == gguf.Keys.General.FILE_TYPE:
            writer.add_file_type(file_type)
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    requantise(arguments.source, arguments.format, arguments.destination)


if __name__ == "__main__":
    main()
