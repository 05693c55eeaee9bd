"""How a core comes to its place: whole or not at all, over what was there, with nothing left beside it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flare.errors import InputError
from ignition.pack import CoreWriter, lay_out_weights


def leftovers(folder: Path, core: str = "core") -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(f".{core}.")]


@pytest.fixture
def make_core(tmp_path: Path) -> Callable[..., None]:
    """Writes a directory that is a core by its looks, with `content` in one file."""
    from flare.core.manifest import MANIFEST_FILE

    class Anything:
        def encode(self) -> bytes:
            return b"{}"

    def make(output: Path, content: bytes = b"") -> None:
        with CoreWriter(output) as writer:
            writer.add("content", content)
            writer.commit(Anything())
        assert (output / MANIFEST_FILE).exists()

    return make


def test_an_output_that_is_a_link_replaces_what_it_points_to(tmp_path: Path, make_core: Callable[..., None]) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "core").symlink_to(tmp_path / "volume" / "real")
    for content in (b"one", b"two"):
        make_core(tmp_path / "core", content)
        assert (tmp_path / "volume" / "real" / "content").read_bytes() == content
    assert (tmp_path / "core").is_symlink() and len(list((tmp_path / "volume").iterdir())) == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, None])
def test_a_core_is_replaced_where_directories_cannot_be_exchanged(
    tmp_path: Path, make_core: Callable[..., None], monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    class Without:
        """A C library whose renameat2 fails, or that has none."""

        if number is not None:
            renameat2 = staticmethod(lambda *arguments: ctypes.set_errno(number) or -1)

    make_core(tmp_path / "core", b"one")
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **settings: Without())
    make_core(tmp_path / "core", b"two")
    assert (tmp_path / "core" / "content").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["core"]


def test_only_what_no_export_holds_is_a_leftover(tmp_path: Path, make_core: Callable[..., None]) -> None:
    (tmp_path / ".core.partial-1").mkdir()  # process 1 lives, perhaps in another container; nobody holds the folder
    with CoreWriter(tmp_path / "core") as writer:
        assert leftovers(tmp_path) == [writer.folder.name]
        make_core(tmp_path / "core")
        assert leftovers(tmp_path) == [writer.folder.name]
    assert leftovers(tmp_path) == []


def test_files_of_two_targets(tmp_path: Path) -> None:
    """Folders as deep as names have them, each with a fixed mode whatever the umask, and a file of weights a target."""
    old = os.umask(0o077)
    try:
        with CoreWriter(tmp_path / "core") as writer:
            for architecture in ("sm_80", "sm_90a"):
                writer.add(f"kernels/{architecture}/0123456789abcdef.cubin", architecture.encode())
            for name in ("weights.safetensors", "weights-cuda.safetensors"):
                writer.add_weights(name, name.encode(), [lambda: b"ab", lambda: b"c"])
            found = {path.relative_to(writer.folder): path for path in writer.folder.rglob("*")}
            modes = {stat.S_IMODE(path.stat().st_mode) for path in found.values() if path.is_dir()}
            assert modes == {0o755} and {str(path) for path in found if found[path].is_dir()} == {
                "kernels", "kernels/sm_80", "kernels/sm_90a",
            }  # fmt: skip
            assert {str(path) for path in found if found[path].is_file()} == set(writer.files)
            data = (writer.folder / "weights-cuda.safetensors").read_bytes()
            assert data == b"weights-cuda.safetensors" + b"ab".ljust(64, b"\0") + b"c".ljust(64, b"\0")
            assert {name for name, entry in writer.files.items() if entry.chunked} == {
                "weights.safetensors", "weights-cuda.safetensors",
            }  # fmt: skip
    finally:
        os.umask(old)


def test_only_the_writer_s_own_errors_are_about_the_output(tmp_path: Path) -> None:
    def fails() -> bytes:
        raise OSError(errno.EIO, "a stage's own trouble")

    with pytest.raises(OSError, match="own trouble"), CoreWriter(tmp_path / "core") as writer:
        writer.add_weights("weights", b"", [fails])
    with pytest.raises(InputError, match="cannot be written"), CoreWriter(tmp_path / "core") as writer:
        writer.add("content", b"")
        writer.add("content", b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/core: cannot be written"), CoreWriter(tmp_path / "file" / "core"):
        pass
    assert leftovers(tmp_path) == []


def test_the_weights_header_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    spans, header = lay_out_weights({"a": 100, "b": 64, "c": 1})
    assert len(header) % 4096 == 0
    assert [(span.offset, span.bytes) for span in spans.values()] == [(0, 100), (128, 64), (192, 1)]
    (tmp_path / "w.safetensors").write_bytes(header + bytes(256))
    with safe_open(tmp_path / "w.safetensors", "np") as file:
        assert {name: file.get_tensor(name).nbytes for name in file.keys()} == {"a": 128, "b": 64, "c": 64}  # noqa: SIM118
