"""Cores with a cuda target: exported on a machine without a device, accepted by validate, and the same bytes every time."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flare
import ignition.export
import ignition.targets.cuda.export as cuda_export
from flare.core.directory import open_core
from flare.core.manifest import MANIFEST_FILE
from flare.core.oracle import read_oracle
from flare.errors import InputError
from flare.replay import cuda_driver
from flare.replay.cuda_driver import NoDevice
from ignition.export import export_core
from ignition.inspect import describe, render, size
from ignition.options import ARCHITECTURES, ISAS, Options
from ignition.report import Report
from ignition.targets.cuda.compile import Compiled
from ignition.validate import validate_core
from tests.support.checkpoints import TINY_CUDA, make_checkpoint
from tests.support.fake_cuda.server import FakeDeviceServer

SMALL = Options(targets=("cuda:sm_90a",), slots=2, max_step_tokens=66, max_context=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return make_checkpoint(folder, **TINY_CUDA)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    """What was compiled for this module's core."""
    return {}


@pytest.fixture(scope="module")
def exported(
    checkpoint: Path, compiled: dict[str, Compiled], tmp_path_factory: pytest.TempPathFactory, kept_compiles: None
) -> Report:
    """A core compiled for sm_90a. Read only."""
    compile_launches = cuda_export.compile_launches

    def compile_and_keep(*arguments: object) -> Compiled:
        compiled["first"] = compile_launches(*arguments)
        return compiled["first"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_export, "compile_launches", compile_and_keep)
        return export_core(str(checkpoint), tmp_path_factory.mktemp("cores") / "tiny", SMALL)


def test_a_core_without_a_device_is_accepted(exported: Report) -> None:
    result = validate_core(exported.output)
    assert result.exit_code == 0, result.text()
    rows = {check.name: check for check in result.checks}
    assert "cuda sm_90a" in rows and not any(name.startswith("kernels") for name in rows)


def test_the_manifest_says_what_it_was_made_for(exported: Report) -> None:
    core = open_core(exported.output)
    manifest, target = core.manifest, core.manifest.cuda
    assert target is not None and manifest.cpu is None
    assert target.architectures == {"sm_90a": "graphs/cuda-sm_90a.msgpack"}
    assert target.compute_dtype == target.weights.kv_format == "bf16"
    assert target.compiler.keys() == {"triton", "ptxas"}
    assert target.segments.kv_page_bytes == 2 * 2 * 16 * 16 * 2  # K and V, heads, page tokens, head size, bytes
    stored = 2 * 384 * 32 * 2 + 2 * (64 + 32) * 32 * 2 + 3 * 32 * 32 * 2  # both tables, attention, MLP
    assert target.weights.formats["bf16"] == stored
    assert target.weights.decode_weight_bytes == sum(target.weights.formats.values()) - 383 * 32 * 2
    oracle = read_oracle(core)
    assert manifest.oracle.isas == [] and manifest.oracle.mean_kl is None
    assert all(prompt.compiled == {} and prompt.reference.ids for prompt in oracle.prompts)


def test_the_report_counts_what_was_compiled(exported: Report) -> None:
    (report,) = exported.architectures
    shown = describe(exported.output)
    cubins = [name for name in exported.files if name.startswith("kernels/sm_90a/")]
    assert report.architecture == "sm_90a" and report.cubins == len(cubins) <= report.kernels
    assert report.cubin_bytes == sum(exported.files[name] for name in cubins)
    assert list(report.nodes["step"]) == [1, 2, 4, 8, 16, 32, 64, 66]
    assert report.nodes["step"][64] == report.nodes["step"][66] + 1  # attention of many tokens is one launch
    assert list(report.nodes["sample"]) == list(report.nodes["score"]) == [1, 2]
    text = exported.text()
    assert f"sm_90a    {report.kernels} kernels in {report.cubins} cubins" in text and "cannot be had" in text
    sizes = open_core(exported.output).manifest.cuda.segments
    wanted = (size(count) for count in (sizes.arena_bytes, sizes.io_bytes, sizes.host_bytes))
    assert "\nmemory    arena {}, io {}, host {} (cuda)\n".format(*wanted) in text
    json.dumps(shown)


def test_equal_inputs_give_an_equal_core_and_cubins_serve_all_buckets(
    exported: Report, checkpoint: Path, compiled: dict[str, Compiled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That compilers give equal bytes is test_compile's matter; here they give what they gave."""
    monkeypatch.setattr(cuda_export, "compile_launches", lambda *_: compiled["first"])
    again = export_core(str(checkpoint), tmp_path / "again", SMALL)
    for file in (MANIFEST_FILE, *exported.files):
        assert (again.output / file).read_bytes() == (exported.output / file).read_bytes(), file
    # Other buckets need no other cubins: one that is missing here would raise KeyError.
    export_core(str(checkpoint), tmp_path / "more", replace(SMALL, max_step_tokens=300))


@pytest.fixture(scope="module")
def both_report(
    checkpoint: Path, compiled: dict[str, Compiled], exported: Report, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    """A core of both targets. Read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_export, "compile_launches", lambda *_: compiled["first"])
        options = replace(SMALL, targets=("cuda:sm_90a", "cpu"), isas=("generic",))
        return export_core(str(checkpoint), tmp_path_factory.mktemp("both") / "core", options)


@pytest.fixture(scope="module")
def both(both_report: Report) -> Path:
    return both_report.output


def test_texts_of_a_core_of_both_targets_say_which_is_which(both_report: Report, exported: Report) -> None:
    lines = dict(line.split(maxsplit=1) for line in both_report.text().splitlines() if " " in line)
    for name in ("weights", "memory"):
        cpu, cuda = lines[name].split("; ")
        assert cpu.endswith(" (cpu)") and cuda.endswith(" (cuda)") and cpu.count("(") == cuda.count("(") == 1
        assert f"\n{name:<10}{cuda}\n" in exported.text()
    assert lines["size"].endswith(f", and {len(both_report.files) - 4} more")
    (weights,) = (check for check in validate_core(both_report.output).checks if check.name == "weights")
    assert re.fullmatch(r"\d+ tensors, \d+ bytes \(cpu\); \d+ tensors, \d+ bytes \(cuda\)", weights.detail)


def test_both_targets_share_one_core(both: Path, exported: Report) -> None:
    manifest = open_core(both).manifest
    assert [type(target).__name__ for target in manifest.targets] == ["CpuTarget", "CudaTarget"]
    assert {target.weights.file for target in manifest.targets} == {"weights.safetensors", "weights-cuda.safetensors"}
    alone = (exported.output / "weights-cuda.safetensors").read_bytes()
    assert (both / "weights-cuda.safetensors").read_bytes() == alone
    assert manifest.oracle.isas and manifest.oracle.mean_kl is not None
    assert validate_core(both).exit_code == 0


def on_the_processor(core: Path, patch: pytest.MonkeyPatch, *bodies: dict[str, object]) -> list[Any]:
    """The choices that the core's cpu target gives."""

    def no_device(architectures: object) -> None:
        raise NoDevice("other tests of this process may have loaded the fake driver")

    patch.setattr(cuda_driver, "open_device", no_device)
    with flare.open(core, threads=1, kv_memory="1MiB") as runtime:
        return [runtime.request("/v1/completions", body).json()["choices"][0] for body in bodies]


def test_a_server_on_a_device_answers_as_the_cpu_target_does(
    both: Path, fake_libcuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flare serve` in a process whose driver interprets every kernel: text, draws under a form, and log probabilities within
    what bf16 costs; two requests at once are one after the other."""
    greedy = {"prompt": "the dog", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    bounded = {"prompt": "a", "max_tokens": 2, "seed": 5, "structured_outputs": {"regex": "[a-f]{2}"}}

    wanted = on_the_processor(both, monkeypatch, greedy, bounded)
    with FakeDeviceServer(both, fake_libcuda) as server, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", body), (greedy, bounded)))
        alone = server.post("/v1/completions", greedy)
        status = server.get("/v1/flare/status")
    found = [answer["choices"][0] for answer in answers]
    assert alone["choices"][0] == found[0]
    assert status["target"]["kind"] == "cuda" and status["cpu_fallback"]["total"] == 0
    assert all("flare_warnings" not in answer for answer in answers)
    assert found[0]["text"] == wanted[0]["text"]
    assert found[0]["logprobs"]["token_logprobs"] == pytest.approx(wanted[0]["logprobs"]["token_logprobs"], abs=0.05)
    assert re.fullmatch("[a-f]{2}", found[1]["text"]) and re.fullmatch("[a-f]{2}", wanted[1]["text"])


SILU = "op silu_mul (1 node, behind model.layers.0.mlp.up_proj.weight) has no kernel on the cuda target"
HOSTED = replace(SMALL, isas=("generic",))


@pytest.fixture(scope="module")
def hosted(checkpoint: Path, exported: Report, tmp_path_factory: pytest.TempPathFactory, kept_compiles: None) -> Report:
    """A core whose silu_mul runs on the processor. Read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_export, "KERNELS", cuda_export.KERNELS - {"silu_mul"})
        return export_core(str(checkpoint), tmp_path_factory.mktemp("hosted") / "core", HOSTED)


def test_what_has_no_kernel_is_told_and_part_of_the_core(hosted: Report) -> None:
    assert hosted.notices == [f"{SILU}: the processor runs it, slowly"]
    files = {"graphs/host.msgpack", "kernels/host-generic.so", "weights-host.safetensors"}
    assert {name for name in hosted.files if "host" in name} == files
    text = hosted.text()
    assert "(cuda); none (host part)\n" in text and "io 3.1 kB (host part)\n" in text
    core = open_core(hosted.output)
    assert core.manifest.cpu is None and core.manifest.cuda.host.ops == {"silu_mul": 1}
    result = validate_core(hosted.output)
    assert result.exit_code == 0, result.text()
    (check,) = (check for check in result.checks if check.name == "host part")
    assert check.detail == "generic (1 kernels), 3 nodes inside their segments"
    facts = describe(hosted.output)
    assert facts["targets"][0]["host"]["graph"]["kernels"] == {"SiluMul": 1, "device": 2}
    assert "\nhost part  the processor runs 1 silu_mul: generic\n" in render(facts)
    assert "\n           weights: none; 0 B read for each token\n" in render(facts)
    json.dumps(facts)


def test_a_core_with_a_host_part_is_the_same_bytes_every_time(
    hosted: Report, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_export, "KERNELS", cuda_export.KERNELS - {"silu_mul"})
    again = export_core(str(checkpoint), tmp_path / "again", HOSTED)
    for file in (MANIFEST_FILE, *hosted.files):
        assert (again.output / file).read_bytes() == (hosted.output / file).read_bytes(), file


def test_an_export_that_must_do_without_the_processor_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_export, "KERNELS", cuda_export.KERNELS - {"silu_mul"})
    with pytest.raises(InputError) as caught:
        export_core(str(checkpoint), tmp_path / "core", replace(SMALL, cpu_fallback=False))
    assert str(caught.value) == f"--no-cpu-fallback: {SILU}; leave the option out to have the processor run it, slowly"
    assert list(tmp_path.iterdir()) == []


def test_a_server_runs_what_has_no_kernel_on_the_processor_and_says_so(
    hosted: Report, both: Path, fake_libcuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": "the dog", "max_tokens": 2, "temperature": 0, "logprobs": 2}
    (wanted,) = on_the_processor(both, monkeypatch, asked)
    with FakeDeviceServer(hosted.output, fake_libcuda) as server:
        answer = server.post("/v1/completions", asked)
        status = server.get("/v1/flare/status")
    cause = "op silu_mul (1 node) is not run by a kernel of the cuda target, the processor runs it"
    (warning,) = answer["flare_warnings"]
    assert (warning["type"], warning["cause"]) == ("cpu_fallback", cause)
    assert status["cpu_fallback"]["events"] == [{"cause": cause, "count": warning["count"]}]
    assert status["target"]["kind"] == "cuda"
    (choice,) = answer["choices"]
    assert choice["text"] == wanted["text"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted["logprobs"]["token_logprobs"], abs=0.05)
    with FakeDeviceServer(hosted.output, fake_libcuda, "--no-cpu-fallback") as server:
        error = server.post("/v1/completions", asked, status=500)["error"]
    assert error["message"] == f"CPU fallback disabled: {cause}"


def test_a_kernel_that_its_architecture_cannot_run_ends_the_export(
    exported: Report, checkpoint: Path, compiled: dict[str, Compiled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec.structs import replace as changed

    first = compiled["first"]
    greedy = {key: changed(cubin, shared=300_000) for key, cubin in first.cubins["sm_90a"].items()}
    monkeypatch.setattr(cuda_export, "compile_launches", lambda *_: Compiled(first.package, {"sm_90a": greedy}))
    monkeypatch.setattr(ignition.export, "prove", lambda *_: pytest.fail("the reference ran first, which takes long"))
    with pytest.raises(InputError, match=r"the graphs for sm_90a cannot run: .*300000 bytes of dynamic"):
        export_core(str(checkpoint), tmp_path / "core", SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("targets", "weights", "said"),
    [
        (("tpu",), "auto", f"--target is 'tpu', must be cpu or cuda:ARCH with ARCH of {', '.join(ARCHITECTURES)}"),
        (("cuda",), "auto", "--target is 'cuda', must be cpu or cuda:ARCH"),
        (("cuda:",), "auto", "--target is 'cuda:', its architectures must be of sm_80"),
        (("cuda:sm_75",), "auto", "--target is 'cuda:sm_75', its architectures must be of sm_80"),
        (("cuda:sm_90a,sm_90a",), "auto", "--target names sm_90a twice"),
        (("cuda:sm_90a", "cuda:sm_80,sm_90a"), "auto", "--target names sm_90a twice"),
        (("cpu", "cpu"), "auto", "--target names cpu twice"),
        ((), "auto", "--target is empty"),
        (
            ("cpu", "cuda:sm_90a"),
            "fp8",
            "--weights is 'fp8', which the target cpu has no kernels for; choose q8, or leave out --target cpu",
        ),
        (
            ("cpu",),
            "fp8",
            "--weights is 'fp8', which the target cpu has no kernels for; choose q8, or --target cuda:ARCH",
        ),
        (("cuda:sm_86,sm_90a",), "fp8", "--weights is 'fp8', which sm_86 has no instructions for"),
    ],
)
def test_targets_that_cannot_be_are_refused_by_name(targets: tuple[str, ...], weights: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        Options(targets=targets, weights=weights).check()
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sm_90", "sm_100", "sm_103", "sm_120"])
def test_an_architecture_without_its_letter_is_asked_back(name: str) -> None:
    with pytest.raises(InputError) as caught:
        Options(targets=(f"cuda:sm_80,{name}",)).check()
    assert str(caught.value).endswith(f", its architectures must be of {', '.join(ARCHITECTURES)}; is {name}a meant?")
    with pytest.raises(InputError) as caught:
        Options(targets=("cuda:sm_75",)).check()
    assert str(caught.value).endswith("sm_120a")


@pytest.mark.parametrize("count", [0, 8, 20, 1040])
def test_both_rules_for_page_tokens_are_in_one_sentence(count: int) -> None:
    with pytest.raises(InputError) as caught:
        Options(page_tokens=count).check()
    assert str(caught.value) == f"--page-tokens is {count}, must be a multiple of 16, 16 to 1024"
    Options(page_tokens=1024).check()


def test_levels_without_a_cpu_target_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    from ignition.cli import app

    arguments = ["export", str(checkpoint), "-o", str(tmp_path / "core"), "--isa", "generic", "--target"]
    with pytest.raises(
        InputError,
        match=r"^--isa is 'generic', but it is for the cpu target, and for ops .* none; leave it out, or add --t",
    ):
        app([*arguments, "cuda:sm_90a"])
    Options(targets=("cpu", "cuda:sm_90a"), isas=("generic",)).check()
    Options(targets=("cuda:sm_90a",)).check()
    assert Options(targets=("cpu", "cuda:sm_90a")).levels == ISAS


def test_architectures_come_in_their_fixed_order_whatever_was_said() -> None:
    options = Options(targets=("cuda:sm_120a,sm_80", "cpu", "cuda:sm_90a"))
    options.check()
    assert options.cpu and options.architectures == ("sm_80", "sm_90a", "sm_120a")
    assert not Options(targets=("cuda:sm_80",)).cpu and Options().architectures == ()


def test_an_export_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from ignition.cli import require_export_packages

    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else known(name))
    require_export_packages()
    with pytest.raises(InputError, match=r"an export needs triton, .* the extra export-cuda: pip install 'flare-ig"):
        require_export_packages(cuda=True)
