"""A core is refused, in one line that names the file, for anything on disk that disagrees with its manifest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flare.core.cuda_checks import open_cuda_graphs
from flare.core.directory import open_core, verify_weights
from flare.core.manifest_checks import decode_manifest
from flare.errors import CoreError, InputError
from flare.replay.program import open_replay
from tests.support.cuda_graphs import add_cuda_target


@pytest.fixture
def core(tiny_core: Path, tmp_path: Path) -> Path:
    """A copy of the tiny core that a test may damage."""
    return Path(shutil.copytree(tiny_core, tmp_path / "core"))


def rewrite(core: Path, change: object) -> None:
    """Changes the manifest and its checksum together, as somebody would who wants to get past the hash."""
    import hashlib

    manifest = json.loads((core / "core.json").read_bytes())
    change(manifest)
    data = json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n"
    (core / "core.json").write_bytes(data)
    (core / "core.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  core.json\n")


def refused(core: Path, *, verify: bool = False) -> str:
    with pytest.raises(CoreError) as caught:
        open_core(core, verify=verify)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_a_good_core_opens(core: Path) -> None:
    opened = open_core(core, verify=True)
    assert opened.manifest.model.recipe == "dense"
    assert decode_manifest((core / "core.json").read_bytes()).encode() == (core / "core.json").read_bytes()


def test_a_missing_directory_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such core directory"):
        open_core(tmp_path / "nothing")


def test_a_directory_without_a_manifest(tmp_path: Path) -> None:
    assert "core.json" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["core.json", "core.sha256", "graphs/step.msgpack", "tokenizer.json", "oracle.msgpack"]
)
def test_one_flipped_bit(core: Path, name: str) -> None:
    data = bytearray((core / name).read_bytes())
    data[len(data) // 2] ^= 1
    (core / name).write_bytes(data)
    assert refused(core).startswith("core.json" if name.startswith("core.") else name)


def test_a_flipped_bit_in_a_library(core: Path) -> None:
    library = sorted((core / "kernels").iterdir())[0]
    data = bytearray(library.read_bytes())
    data[-1] ^= 0x80
    library.write_bytes(data)
    assert library.name in refused(core)


def test_a_flipped_weight_shows_when_every_byte_is_hashed(core: Path) -> None:
    weights = core / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 4
    weights.write_bytes(data)
    opened = open_core(core)  # size and header are right
    with pytest.raises(CoreError, match="weights.safetensors"):
        verify_weights(opened)
    assert "weights.safetensors" in refused(core, verify=True)


def test_a_flipped_bit_in_the_weights_header(core: Path) -> None:
    weights = core / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[20] ^= 1
    weights.write_bytes(data)
    assert "weights.safetensors" in refused(core)


@pytest.mark.parametrize("name", ["weights.safetensors", "tokenizer.json", "graphs/step.msgpack"])
@pytest.mark.parametrize("change", [-1, 1])
def test_sizes_that_disagree(core: Path, name: str, change: int) -> None:
    path = core / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] if change < 0 else data + b"\0")
    assert refused(core).startswith(name)


@pytest.mark.parametrize("name", ["weights.safetensors", "tokenizer.json", "graphs/step.msgpack", "core.json"])
def test_links_are_refused(core: Path, tmp_path: Path, name: str) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(core / name, moved)
    (core / name).symlink_to(moved)
    assert name in refused(core)


def test_a_linked_folder_is_refused(core: Path, tmp_path: Path) -> None:
    moved = tmp_path / "kernels-elsewhere"
    shutil.move(core / "kernels", moved)
    (core / "kernels").symlink_to(moved)
    assert "kernels" in refused(core)


@pytest.mark.parametrize("name", ["", "tokenizer.json", "kernels", "weights.safetensors"])
def test_files_that_others_may_write(core: Path, name: str) -> None:
    path = core / name
    os.chmod(path, os.stat(path).st_mode | 0o002)
    assert "others may write" in refused(core)


def test_a_missing_file(core: Path) -> None:
    (core / "tokenizer.json").unlink()
    assert "tokenizer.json: missing" in refused(core)


def test_a_fifo_is_refused_without_waiting(core: Path) -> None:
    (core / "tokenizer.json").unlink()
    os.mkfifo(core / "tokenizer.json")
    assert "tokenizer.json" in refused(core)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.update(version=3), "version 3, this program reads 4; export the core again"),
        (lambda m: m.update(version=True), "version True"),
        (lambda m: m.pop("limits"), "limits"),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m["limits"].update(slots=0), "limits.slots"),
        (lambda m: m["limits"].update(slots="many"), "limits.slots"),
        (lambda m: m["limits"].update(page_tokens=24), "limits.page_tokens"),
        (lambda m: m.pop("logprobs"), "logprobs"),
        (lambda m: m["logprobs"].pop("prompt"), "prompt"),
        (lambda m: m["logprobs"].update(prompt=1), "logprobs.prompt"),
        (lambda m: m["logprobs"].update(more=1), "more"),
        (lambda m: m["logprobs"].update(alternatives=21), "logprobs.alternatives is 21, wanted 0 to 20"),
        (lambda m: m["logprobs"].update(alternatives=-1), "logprobs.alternatives is -1, wanted 0 to 20"),
        (lambda m: m["logprobs"].update(explicit_ids=129), "logprobs.explicit_ids is 129, wanted 0 to 128"),
        (lambda m: m["logprobs"].update(explicit_ids=-1), "logprobs.explicit_ids is -1"),
        (lambda m: m["logprobs"].update(alternatives=0), "logprobs.explicit_ids is 128, wanted 0 to 0"),
        (lambda m: m["logprobs"].update(alternatives=0, explicit_ids=0, prompt=True), "logprobs.prompt is True"),
        (lambda m: m["targets"][0]["segments"].update(arena_bytes=-1), "segments.arena_bytes"),
        (lambda m: m["targets"][0]["segments"].update(io_bytes=4), "segments.io_bytes"),
        (lambda m: m["targets"][0]["segments"].update(weights_offset=100), "segments.weights_offset"),
        (lambda m: m["files"].update({"../outside": m["files"]["tokenizer.json"]}), "../outside"),
        (lambda m: m["files"].update({"/absolute": m["files"]["tokenizer.json"]}), "/absolute"),
        (lambda m: m["files"].pop("oracle.msgpack"), "oracle.msgpack"),
        (
            lambda m: m["oracle"].update(isas=["x86-64-v9"]),
            "oracle.isas is ['x86-64-v9'], wanted levels of the libraries",
        ),
        (lambda m: m["oracle"].update(isas=["generic", "generic"]), "oracle.isas"),
        (
            lambda m: m["oracle"].update(mean_kl=None),
            "oracle.mean_kl is None, wanted a number where oracle.isas names levels",
        ),
        (lambda m: m["targets"][0]["graphs"].pop("step"), "step"),
        (lambda m: m["tokens"].update(eos=[10**6]), "tokens"),
        (lambda m: m["model"].update(id=""), "model.id is '', wanted 1 to 512 printable characters"),
        (lambda m: m["model"].update(id="a\nb"), "model.id is 'a\\nb', wanted 1 to 512"),
        (lambda m: m["model"].update(id="x" * 10**5), "model.id is 'xxx"),
        (lambda m: m["model"].update(layers=-1), "model.layers is -1, wanted 0 to 2^48 - 1"),
        (lambda m: m["model"].update(parameters=2**60), "model.parameters is 1152921504606846976"),
        (lambda m: m["model"].update(hidden_size=-5), "model.hidden_size is -5"),
        (
            lambda m: m["targets"][0]["segments"].update(kv_page_bytes=0),
            "targets[0].segments.kv_page_bytes is 0, wanted a positive multiple of 64",
        ),
        (
            lambda m: m["targets"][0]["weights"]["formats"].update(fp8=0),
            "targets[0].weights.formats is 'fp8', wanted only bf16, f16, f32, q4, q8",
        ),
        (
            lambda m: m["targets"][0]["weights"]["formats"].update(q8=10**9),
            "targets[0].weights.formats is {",
        ),
        (lambda m: m["targets"][0]["weights"]["formats"].update(f32=-1), "targets[0].weights.formats is {"),
        (
            lambda m: m["targets"][0]["weights"].update(decode_weight_bytes=-1),
            "targets[0].weights.decode_weight_bytes is -1, wanted 0 to 2^48 - 1",
        ),
        (lambda m: m["template"].update(file="x" * 10**5), "files is 'xxx"),
        (lambda m: m.update(version="x" * 10**5), "format version 'xxx"),
    ],
)
def test_manifests_that_lie(core: Path, change: object, field: str) -> None:
    rewrite(core, change)
    assert field in refused(core)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b'{"version": 1}', b"null", b"[" * 100_000])
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(CoreError):
        decode_manifest(data)


@pytest.fixture
def both(core: Path, cubins: Path) -> Path:
    """The tiny core with a cuda target beside its own."""
    add_cuda_target(core, cubins, "sm_90a", "sm_80")
    return core


def test_a_core_with_two_targets(both: Path) -> None:
    opened = open_core(both, verify=True)
    manifest = opened.manifest
    assert manifest.cpu is manifest.targets[0] and manifest.cuda is manifest.targets[1]
    assert decode_manifest((both / "core.json").read_bytes()).encode() == (both / "core.json").read_bytes()
    assert opened.graph("step").nodes and opened.cuda_graphs("sm_80").arch == "sm_80"
    graphs, files = open_cuda_graphs(opened, "sm_90a")
    assert {kernel.cubin for kernel in graphs.kernels} == files.keys()


def test_a_core_for_cuda_alone_names_what_it_lacks(both: Path) -> None:
    def change(m: dict[str, Any]) -> None:
        del m["targets"][0], m["files"]["weights.safetensors"]
        m["oracle"].update(isas=[])

    rewrite(both, change)
    opened = open_core(both)
    assert opened.manifest.cpu is None and opened.manifest.cuda is not None
    with pytest.raises(CoreError, match="has no cpu target; export it with --target cpu as well"):
        open_replay(opened, threads=1, kv_pages=1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:30] + b"?" + data[31:],
        lambda data: b"\1" + data[1:],
    ],
)
def test_each_target_s_weights_are_checked(both: Path, damage: Any) -> None:
    weights = both / "weights-cuda.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert refused(both).startswith("weights-cuda.safetensors: ")


def test_every_target_s_bytes_are_hashed(both: Path) -> None:
    weights = both / "weights-cuda.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    open_core(both)
    assert refused(both, verify=True).startswith("weights-cuda.safetensors: bytes differ")


def test_a_flipped_bit_in_a_cubin(both: Path) -> None:
    file = next((both / "kernels" / "sm_90a").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert refused(both).startswith(f"kernels/sm_90a/{file.name}: bytes differ")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["targets"].clear(), "targets is [], wanted cpu, cuda, or both in that order"),
        (lambda m: m["targets"].reverse(), "targets is ['cuda', 'cpu']"),
        (lambda m: m["targets"].append(m["targets"][1]), "targets is ['cpu', 'cuda', 'cuda']"),
        (lambda m: m["targets"][1].update(kind="tpu"), "Invalid value 'tpu'"),
        (lambda m: m["targets"][1].update(architectures={}), "targets[1].architectures is {}, wanted at least one"),
        (lambda m: m["targets"][1]["architectures"].update(sm_75="tokenizer.json"), "Invalid enum value 'sm_75'"),
        (lambda m: m["targets"][1]["architectures"].update(sm_86="graphs/cuda-sm_80.msgpack"), "a file of its own"),
        (lambda m: m["targets"][1]["architectures"].update(sm_86="graphs/gone"), "files is 'graphs/gone'"),
        (lambda m: m["files"].pop("weights-cuda.safetensors"), "files is 'weights-cuda.safetensors'"),
        (
            lambda m: m["targets"][1]["weights"].update(file="weights.safetensors"),
            "a file for each target that is nothing",
        ),
        (
            lambda m: m["targets"][1]["weights"].update(file="tokenizer.json"),
            "a file for each target that is nothing else",
        ),
        (
            lambda m: m["targets"][1]["weights"].update(kv_format="f32"),
            "weights.kv_format is 'f32', wanted f16, the compute",
        ),
        (
            lambda m: m["targets"][0]["weights"].update(kv_format="bf16"),
            "weights.kv_format is 'bf16', wanted f16 or f32",
        ),
        (
            lambda m: m["targets"][1]["segments"].update(kv_page_bytes=100),
            "kv_page_bytes is 100, wanted a positive multiple of 64",
        ),
        (lambda m: m["targets"][1]["segments"].update(io_bytes=64), "targets[1].segments.io_bytes is 64, wanted room"),
        (
            lambda m: m["files"]["weights-cuda.safetensors"].update(chunked=False),
            "chunked is False, wanted true for weights",
        ),
        (lambda m: m["files"]["tokenizer.json"].update(chunked=True), "files['tokenizer.json'].chunked is True"),
        (lambda m: m["targets"][1]["segments"].pop("host_bytes"), "missing required field `host_bytes`"),
    ],
)
def test_targets_that_lie(both: Path, change: object, field: str) -> None:
    rewrite(both, change)
    assert field in refused(both)
