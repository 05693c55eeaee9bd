"""Content codings: every one gives back what went in, however it was cut, and none gives more than it may."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import brotli
import pytest

from flare.errors import RequestError
from flare.http import codings
from flare.http.codings import CHUNK_BYTES, CODINGS, MAX_MEMBERS, MAX_WINDOW_BYTES, decompress
from tests.support.memory import peak_below

zstd = codings.zstd_module()
MIB = 1 << 20
PACK: dict[str, Callable[[bytes], bytes]] = {
    "br": lambda data: brotli.compress(data, quality=4),
    "deflate": zlib.compress,
    "gzip": lambda data: gzip.compress(data, 6),
    "zstd": zstd.compress,
}
NOISE = bytes((i * i * 31 + i // 7) % 251 for i in range(3 * CHUNK_BYTES))


def status_of(body: bytes, coding: str, limit: int = MIB) -> int:
    try:
        decompress(body, coding, limit)
    except RequestError as error:
        assert coding in str(error) or error.status == 413, error
        return error.status
    return 200


def repeated(coding: str, size: int) -> bytes:
    """A compressed stream of `size` times the letter a, whose frame does not say how long it is."""
    piece = b"a" * MIB
    if coding == "zstd":
        packer = zstd.ZstdCompressor()
        return b"".join([*(packer.compress(piece) for _ in range(size // MIB)), packer.flush()])
    if coding == "br":
        br = brotli.Compressor(quality=4)
        return b"".join([*(br.process(piece) for _ in range(size // MIB)), br.finish()])
    bits = zlib.MAX_WBITS | (16 if coding == "gzip" else 0)
    deflate = zlib.compressobj(1, wbits=bits)
    return b"".join([*(deflate.compress(piece) for _ in range(size // MIB)), deflate.flush()])


def test_every_coding_is_tried_here() -> None:
    assert {*PACK, "identity"} == set(CODINGS)


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 7])
def test_what_went_in_comes_out(coding: str, size: int) -> None:
    data = NOISE[:size] + b"x" * size
    assert decompress(PACK[coding](data), coding, MIB) == data
    assert decompress(bytearray(PACK[coding](data)), coding, len(data)) == data
    if data:
        assert status_of(PACK[coding](data), coding, len(data) - 1) == 413


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 100])
def test_the_size_of_slices_changes_nothing(coding: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codings, "CHUNK_BYTES", slice_bytes)
    data = NOISE[:300] + b" " * 700 + NOISE[:300]
    assert decompress(PACK[coding](data), coding, MIB) == data


@pytest.mark.parametrize("coding", PACK)
def test_a_cut_stream_is_refused_wherever_it_is_cut(coding: str) -> None:
    packed = PACK[coding](b'{"prompt": "' + NOISE[:200] + b'"}')
    for end in range(len(packed)):
        with pytest.raises(RequestError, match=f"ends in the middle of its {coding} data") as caught:
            decompress(packed[:end], coding, MIB)
        assert caught.value.status == 400


@pytest.mark.parametrize("coding", PACK)
def test_damage_is_refused_or_seen_to_be_harmless(coding: str) -> None:
    """A flipped bit never gives anything but a refusal or some bytes within the limit."""
    packed = bytearray(PACK[coding](NOISE[:300] + b" " * 300))
    for place in range(len(packed)):
        packed[place] ^= 0x10
        assert status_of(bytes(packed), coding, 2000) in (200, 400, 413)
        packed[place] ^= 0x10


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("tail", [b"\0", b"tail" * 10, b"x" * CHUNK_BYTES])
def test_nothing_may_follow(coding: str, tail: bytes) -> None:
    assert status_of(PACK[coding](b"{}") + tail, coding) == 400


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_parts_follow_each_other(coding: str) -> None:
    pack = PACK[coding]
    assert decompress(pack(NOISE) + pack(b"") + pack(b"end"), coding, MIB) == NOISE + b"end"
    assert decompress(pack(b"") * MAX_MEMBERS, coding, MIB) == b""
    with pytest.raises(RequestError, match=f"more than {MAX_MEMBERS} {coding}"):
        decompress(pack(b"") * (MAX_MEMBERS + 1), coding, MIB)
    assert status_of(pack(b" " * 600) * 2, coding, 1200) == 200
    assert status_of(pack(b" " * 600) * 2, coding, 1199) == 413


@pytest.mark.parametrize("coding", PACK)
def test_a_bomb_costs_no_more_than_the_limit(coding: str) -> None:
    """What is allocated is the limit, once (a growing array may be copied while it grows), not what was packed."""
    bomb = repeated(coding, 64 * MIB)
    assert len(bomb) < MIB
    with peak_below(5 * MIB), pytest.raises(RequestError) as caught:
        decompress(bomb, coding, 2 * MIB)
    assert caught.value.status == 413 and caught.value.type == "request_too_large"


def test_a_zstd_frame_that_announces_too_much_is_not_begun() -> None:
    bomb = zstd.compress(b"a" * (512 * MIB))
    assert len(bomb) < 20_000
    with peak_below(MIB // 4), pytest.raises(RequestError) as caught:
        decompress(bomb, "zstd", 32 * MIB)
    assert caught.value.status == 413
    first = zstd.compress(b"a" * 600)  # what the frames before gave counts too
    with pytest.raises(RequestError):
        decompress(first + zstd.compress(b"a" * 600), "zstd", 1000)


@pytest.mark.parametrize("level", [1, 3, 19, 20, 22])
@pytest.mark.parametrize("announced", [True, False])
def test_the_window_of_zstd_is_bounded(level: int, announced: bool) -> None:
    """Within the limit on sizes, a frame may not make the decoder hold more than HTTP's window."""
    data = b"ab" * (5 * MIB)
    if announced:
        packed = zstd.compress(data, level)
    else:
        packer = zstd.ZstdCompressor(level)
        packed = packer.compress(data) + packer.flush()
    small = level <= 19
    if small:
        assert decompress(packed, "zstd", 32 * MIB) == data
        return
    with peak_below(MIB), pytest.raises(RequestError, match=f"window of .* limit of {MAX_WINDOW_BYTES}") as caught:
        decompress(packed, "zstd", 32 * MIB)
    assert caught.value.status == 413


@pytest.mark.parametrize("options", [{}, {"checksum_flag": 1}, {"content_size_flag": 0}, {"window_log": 10}])
def test_headers_of_zstd_frames(options: dict[str, int]) -> None:
    """All forms of the header: with and without size and checksum, and sizes of every width of the field."""
    parameters = {getattr(zstd.CompressionParameter, name): value for name, value in options.items()}
    for size in (0, 1, 255, 256, 65791, 65792, 70_000):
        packed = zstd.compress(b"q" * size, options=parameters)
        assert decompress(packed, "zstd", MIB) == b"q" * size
        if size:
            assert status_of(packed, "zstd", size - 1) == 413


def test_skippable_frames_of_zstd_hold_nothing() -> None:
    skipped = b"\x5a\x2a\x4d\x18" + (100_000).to_bytes(4, "little") + bytes(100_000)
    assert decompress(skipped + zstd.compress(b"{}") + skipped, "zstd", 1000) == b"{}"


def test_no_dictionary_of_zstd() -> None:
    words = zstd.train_dict([b"some words, number %d" % i for i in range(2000)], 1000)
    packed = zstd.compress(b"some words, number 5", zstd_dict=words)
    with pytest.raises(RequestError, match="needs a dictionary") as caught:
        decompress(packed, "zstd", MIB)
    assert caught.value.status == 400


def test_nested_codings_are_taken_once() -> None:
    """Only the outer one is undone; what is inside is no JSON."""
    inner = gzip.compress(b"{}")
    assert decompress(gzip.compress(inner), "gzip", MIB) == inner


def test_the_decoder_itself_holds_to_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a header says, the library may not take more memory."""
    monkeypatch.setattr(codings, "_check_frame", lambda *_: None)
    packer = zstd.ZstdCompressor(22)
    packed = packer.compress(b"ab" * (5 * MIB)) + packer.flush()
    with peak_below(MIB), pytest.raises(RequestError, match="not valid zstd data"):
        decompress(packed, "zstd", 32 * MIB)
