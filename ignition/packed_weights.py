"""A target's weights: what is stored, where each lies, and the file that they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flare.core.checksums import sha256_bytes
from flare.core.manifest import Weights
from ignition.pack import ALIGNMENT, CoreWriter, lay_out_weights
from ignition.plan import Span
from ignition.progress import Progress
from ignition.weights import VECTOR, Packing, Stored


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """storage: by name, in the file's order. header: the file's, before the segment. bytes: of the segment."""

    storage: Mapping[str, Stored]
    packing: Packing
    spans: Mapping[str, Span]
    header: bytes
    bytes: int

    def write(self, file: str, writer: CoreWriter, progress: Progress) -> None:
        """Packs every weight and writes the file."""
        done = 0

        def packer(stored: Stored) -> Callable[[], bytes]:
            def make() -> bytes:
                nonlocal done
                data = stored.pack(self.packing)
                done += len(data)
                progress.advance(done, self.bytes, stored.name)
                return data

            return make

        writer.add_weights(file, self.header, [packer(stored) for stored in self.storage.values()])

    def facts(self, file: str, option: str, kv_format: str, decode_weight_bytes: int) -> Weights:
        """What the manifest says of the file."""
        formats: dict[str, int] = {}
        for stored in self.storage.values():
            name = "f32" if stored.format == VECTOR else stored.format
            formats[name] = formats.get(name, 0) + stored.bytes(self.packing)
        return Weights(
            file=file,
            option=option,
            formats=formats,
            kv_format=kv_format,
            decode_weight_bytes=decode_weight_bytes,
            header_sha256=sha256_bytes(self.header),
        )


def place_weights(storage: Mapping[str, Stored], packing: Packing) -> PackedWeights:
    """Places weights in the order given."""
    spans, header = lay_out_weights({name: stored.bytes(packing) for name, stored in storage.items()})
    end = max((span.offset + span.bytes for span in spans.values()), default=0)
    size = -(-end // ALIGNMENT) * ALIGNMENT
    return PackedWeights(storage, packing, spans, header, size)
