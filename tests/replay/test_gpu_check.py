"""benchmarks.gpu_check on the fake device: it finds what is wrong and nothing else, and it ends and writes in every case."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.children import run_group
from benchmarks.gpu_check.cores import Company, few_tokens
from benchmarks.gpu_check.plan import KINDS, core_names, groups, pack_weights, unpack
from benchmarks.gpu_check.timing import Stage
from flare.core.cuda_graph import Bucket, CudaGraphs, Edge, KernelNode
from flare.core.directory import open_core
from flare.core.oracle import Positions, Prompt
from tests.conftest import once
from tests.support.forged_cores import forge, graph
from tests.support.scripted_replay import ScriptedReplay

Result = dict[str, Any]


def first(prompts: int) -> Any:
    """Leaves only the first prompts of an oracle: the interpreter takes a third of a second for a step."""

    def cut(oracle: dict[str, Any]) -> None:
        del oracle["prompts"][prompts:]

    return graph(cut)


def make_bundle(path: Path) -> None:
    """A bundle of one core that the interpreter can take. Its context holds two tokens of a prompt, and two that follow."""
    from ignition.export import export_core
    from ignition.options import Options
    from tests.support.checkpoints import TINY_CUDA, make_checkpoint

    checkpoint = make_checkpoint(path / "checkpoint", **TINY_CUDA)
    options = Options(targets=("cuda:sm_90a",), slots=2, max_step_tokens=2, max_context=4)
    core = path / "bundle/cores/tiny"
    core.parent.mkdir(parents=True)
    export_core(str(checkpoint), core, options)
    forge(core, "oracle.msgpack", first(2))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, kept_compiles: None) -> Path:
    """Read only."""
    return once(tmp_path_factory, "gpu-check", make_bundle) / "bundle"


def check(bundle: Path, library: Path, out: Path, defect: str, *only: str, seconds: float = 200.0) -> Result:
    """Runs the check on the fake device and returns what it wrote."""
    command = [sys.executable, "-m", "tests.support.fake_cuda.check_child", str(library), defect]
    patterns = [word for pattern in only for word in ("--only", pattern)]
    code = main(["--bundle", str(bundle), "--out", str(out), "--seconds", str(seconds), *patterns], command)
    result: Result = json.loads(out.read_text())
    assert code == (0 if result["ok"] else 1)
    return result


def failed(result: Result) -> list[str]:
    return [found["check"] for found in result["checks"] if not found["ok"]]


def test_a_good_core_passes_and_is_timed(bundle: Path, fake_libcuda: Path, tmp_path: Path) -> None:
    result = check(bundle, fake_libcuda, tmp_path / "out.json", "", "environment", "draws:*", "core:*", "timing:*")
    assert failed(result) == [] and result["ok"] and result["not_run"] == []
    found = {entry["check"]: entry for entry in result["checks"]}
    assert found["device"]["figures"]["architecture"] == "sm_90a"
    assert found["rows in mixed steps"]["figures"]["rows_compared"] > 3
    assert found["rows in one full step"]["figures"] == {"rows_compared": 2, "tokens": 2}
    assert found["rows one by one"]["figures"]["rows_compared"] == 4
    assert found["greedy tokens"]["figures"] == {"tokens": 4, "equal_to_reference": 4}
    assert found["draws from its logits"]["figures"]["drawn"] == 6
    assert found["draws in every bucket"]["figures"]["rows_compared"] == 3
    timed = found["steps on the device"]["figures"]
    assert {"step_1_us", "step_2_us", "sample_2_us", "decode_share_of_copy"} <= timed.keys()
    edges = found["programmatic edges"]
    assert edges["figure"] == 0 and edges["figures"].keys() == {
        "programmatic",
        "runs",
        "step_1_programmatic_us",
        "step_1_full_us",
    }
    assert edges["figures"]["programmatic"] == 10 and edges["figures"]["runs"] >= 4
    memory = found["memory of the replay"]["figures"]
    assert 0 < memory["taken_bytes"] < memory["planned_bytes"]  # the fake's graphs and kernels take none
    kernels = {row["kernel"]: row["nodes"] for row in found["kernels of a decode step"]["figures"]["kernels"]}
    assert kernels["gate_up.gate_up"] == 1 and kernels["attention_decode.attention_combine"] == 1


def test_a_wrong_result_and_one_bit_in_one_bucket_are_found(bundle: Path, fake_libcuda: Path, tmp_path: Path) -> None:
    """One bit of an f32 is within every error bound. Everything else is good."""
    defects = "result=gate_up.gate_up,bit=linear.linear"
    result = check(bundle, fake_libcuda, tmp_path / "out.json", defects, "kernels:*")
    wrong = [found for found in result["checks"] if not found["ok"]]
    gate_up, bits = ([f for f in wrong if f["check"].startswith(kernel)] for kernel in ("gate_up", "linear"))
    assert len(wrong) == len(gate_up) + len(bits) and len(bits) == 4
    assert gate_up[0]["check"] == "gate_up.gate_up of model.layers.0.mlp.gate_proj.weight: exact"
    assert gate_up[0]["figure"] > 1
    assert all(found["figure"] == 1 and "same bits" in found["check"] for found in bits)
    sources = {found["check"].partition(" ")[0] for found in result["checks"] if found["ok"]}
    assert {"embedding.embed", "heads.heads", "linear.linear", "norm.rms_norm", "rotary.rope_angles"} < sources
    (attention,) = (f for f in result["checks"] if f["check"].startswith("attention") and "bits" in f["check"])
    assert attention["figures"]["rows_compared"] == 2


def test_a_core_whose_oracle_is_off_is_found(bundle: Path, fake_libcuda: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "bundle"
    shutil.copytree(bundle, spoilt)
    weights = spoilt / "cores/tiny/weights-cuda.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2048:] = bytes(2048)
    weights.write_bytes(data)
    forge(spoilt / "cores/tiny", "oracle.msgpack", first(1))
    result = check(spoilt, fake_libcuda, tmp_path / "out.json", "", "core:*")
    assert failed(result) == ["oracle"]
    assert "out of tolerance" in result["checks"][0]["note"]


class LargeSteps(ScriptedReplay):
    """One bit of a logit is another in steps of more than 64 tokens."""

    page_tokens, max_rows, max_step_tokens = 16, 4, 100
    bit = False
    large = False

    def step(self, n_tokens: int, n_rows: int, meanwhile: Callable[[], None] | None = None) -> None:
        super().step(n_tokens, n_rows, meanwhile)
        self.large = n_tokens > 64

    def logits(self, row: int) -> memoryview:
        values = super().logits(row)
        values.cast("B")[0] ^= self.large and self.bit
        return values


def company(slots: int) -> tuple[Company, LargeSteps]:
    replay = LargeSteps(max_context=64, slots=slots, max_step_tokens=100, max_rows=4, kv_pages=3 * slots)
    replay.kv_pages = 3 * slots
    answers = Positions(ids=[], logprobs=[], scores=[], ranks=[])
    prompts = [Prompt([(7 * i + n) % 256 for i in range(n)], n - 2, answers, {}) for n in (20, 40)]
    return Company(replay, prompts, 64), replay


def test_a_bit_in_large_steps_alone_is_found_by_the_full_one() -> None:
    good, _ = company(slots=4)
    assert good.full().ok and good.full().figures == {"rows_compared": 100, "tokens": 100}
    bad, replay = company(slots=4)
    replay.bit = True
    assert bad.mixed().ok and bad.one_by_one().ok
    found = bad.full()
    assert not found.ok and found.figure == 100
    found = company(slots=2)[0].full()
    assert not found.ok and "a step of 60 tokens shows nothing of the kernels of more than 64" in found.note


class EarlyMemory:
    """What a bucket leaves as logits tells whether its graph has programmatic edges, in all runs or in one of them."""

    def __init__(self, graphs: CudaGraphs, wrong: int | None = None) -> None:
        self.graphs = graphs
        self.early = False
        self.wrong = wrong
        self.runs = 0

    def build(self, nodes: list[KernelNode], tokens: int, rows: int) -> bool:
        assert [[edge.node for edge in node.after] for node in nodes] == [[], [0]]
        return any(edge.programmatic for node in nodes for edge in node.after)

    def run(self, executable: bool, times: int = 1) -> None:
        self.runs += 1
        self.early = executable and self.wrong in (None, self.runs)

    def get(self, name: str, offset: int, size: int) -> bytes:
        return bytes([self.early]) * size

    def put(self, name: str, data: bytes) -> None:
        pass


@pytest.mark.parametrize("programmatic", [False, True])
def test_bits_that_programmatic_edges_change_are_found(bundle: Path, programmatic: bool) -> None:
    first = KernelNode(kernel=0, grid=(1, 1, 1), args=[], label="", after=[])
    second = replace(first, after=[Edge(node=0, programmatic=programmatic)])
    buckets = [Bucket(tokens=tokens, rows=1, nodes=[first, second]) for tokens in (1, 2)]
    memory = EarlyMemory(CudaGraphs(arch="sm_90a", kernels=[], step=buckets, sample=[], score=[], io={}))
    found = Stage(open_core(bundle / "cores/tiny"), 1, 3, memory=memory).edges()
    assert (found.ok, found.figure) == (not programmatic, 2 * programmatic)


def test_bits_that_one_run_of_many_changes_are_found(bundle: Path) -> None:
    first = KernelNode(kernel=0, grid=(1, 1, 1), args=[], label="", after=[])
    second = replace(first, after=[Edge(node=0, programmatic=True)])
    graphs = CudaGraphs(
        arch="sm_90a",
        kernels=[],
        step=[Bucket(tokens=1, rows=1, nodes=[first, second])],
        sample=[],
        score=[],
        io={},
    )
    found = Stage(open_core(bundle / "cores/tiny"), 1, 3, memory=EarlyMemory(graphs, wrong=20)).edges()
    assert (found.ok, found.figure) == (False, 1) and found.figures["runs"] > 20


def test_steps_are_few_while_they_run_other_kernels_than_the_largest() -> None:
    def bucket(tokens: int, *kernels: int) -> Bucket:
        nodes = [KernelNode(kernel=number, grid=(1, 1, 1), args=[], label="", after=[]) for number in kernels]
        return Bucket(tokens=tokens, rows=1, nodes=nodes)

    def few(*step: Bucket) -> int:
        return few_tokens(CudaGraphs(arch="sm_80", kernels=[], step=list(step), sample=[], score=[], io={}))

    assert few(bucket(1, 0, 1, 2), bucket(64, 0, 1, 2), bucket(128, 0, 3), bucket(200, 0, 3)) == 64
    assert few(bucket(1, 0, 1), bucket(2, 1, 0)) == 0


def test_a_lost_device_costs_one_check(bundle: Path, fake_libcuda: Path, tmp_path: Path) -> None:
    result = check(bundle, fake_libcuda, tmp_path / "out.json", "fault=2", "draws:*")
    assert [found["check"] for found in result["checks"]] == [
        "tokens drawn",
        "log probabilities",
        "draws in every bucket",
        "scores",
    ]
    assert failed(result) == ["tokens drawn"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in result["checks"][0]["note"]


def scripted(tmp_path: Path, *lines: str) -> list[str]:
    """A command that plays a group: `tell` writes a message, `skip` is how many checks ran before."""
    script = tmp_path / "group.py"
    head = [
        "import json, os, signal, sys",
        "skip = int(sys.argv[3])",
        "def tell(**m): print(json.dumps(m), flush=True)",
    ]
    script.write_text("\n".join([*head, *lines]))
    return [sys.executable, "-S", str(script)]


END = "tell(begin='last'); tell(end='last', ok=True)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("os.abort()", "the process ended by signal 6"),
        ("sys.exit('no way')", "the process ended with exit code 1: no way"),
        ("signal.pause()", "nothing was heard for 5 s"),
    ],
)
def test_a_check_that_takes_its_process_along_is_a_failure_and_the_rest_runs(
    tmp_path: Path, line: str, said: str
) -> None:
    command = scripted(tmp_path, "if skip == 0:", f"    tell(begin='first'); {line}", END)
    found: list[Result] = []
    assert run_group("any", tmp_path, time.monotonic() + 100, found.append, command=command, patience=5.0)
    assert [(entry["check"], entry["ok"]) for entry in found] == [("first", False), ("last", True)]
    assert found[0]["note"] == said


def test_a_group_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    found: list[Result] = []
    assert run_group(
        "any", tmp_path, time.monotonic() + 100, found.append, command=scripted(tmp_path, "raise OSError(5)")
    )
    assert [(entry["check"], entry["ok"]) for entry in found] == [("start", False)]
    assert found[0]["note"] == "the process ended with exit code 1: OSError: 5"


def test_time_that_runs_out_leaves_what_was_found(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = scripted(tmp_path, "tell(begin='a'); tell(end='a', ok=True)", "tell(begin='b')", "signal.pause()")
    code = main(
        ["--bundle", str(bundle), "--out", str(out), "--seconds", "4", "--only", "draws:*", "--only", "core:*"], command
    )
    result: Result = json.loads(out.read_text())
    assert [entry["check"] for entry in result["checks"]] == ["a"]
    assert result["not_run"] == ["draws:tiny", "core:tiny"] and code == 1


def test_groups_of_a_bundle(bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert core_names(bundle) == ["tiny"] and core_names(tmp_path) == []
    assert groups(["a", "b"], []) == ["environment", *(f"{kind}:{core}" for kind in KINDS for core in "ab")]
    assert groups(["a", "b"], ["timing:*", "core:b"]) == ["core:b", "timing:a", "timing:b"]
    for arguments, said in (
        (["--bundle", str(tmp_path)], f"--bundle {tmp_path}: no cores there; make it with `make gpu-bundle`"),
        (
            ["--bundle", str(bundle), "--only", "cores"],
            "--only cores: no group matches; there are environment, kernels:tiny",
        ),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and error.count("\n") == 1


def test_packed_cores_come_out_as_they_were(bundle: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed/cores/tiny"
    shutil.copytree(bundle / "cores/tiny", packed)
    pack_weights(packed)
    assert not (packed / "weights-cuda.safetensors").exists()
    (packed / "core.json").chmod(0o666)  # as some ways of copying leave it; flare refuses that
    unpack(tmp_path / "packed", ["tiny"], tmp_path / "out")
    compared = [path for path in (bundle / "cores/tiny").rglob("*") if path.is_file()]
    for path in compared:
        copy = tmp_path / "out/tiny" / path.relative_to(bundle / "cores/tiny")
        assert copy.read_bytes() == path.read_bytes() and copy.stat().st_mode & 0o777 == 0o644
    assert len(compared) > 10


def test_the_check_needs_little(repository: Path) -> None:
    """None of its modules that run beside a device imports what such a machine may lack."""
    absent = (
        "aiohttp",
        "tokenizers",
        "transformers",
        "llguidance",
        "ignition",
        "jinja2",
        "typer",
        "triton",
        "safetensors",
    )
    modules = [
        f"benchmarks.gpu_check.{name}" for name in ("__main__", "child", "environment", "kernels", "draws", "cores")
    ]
    program = f"""if True:
        import sys
        for name in {absent!r}: sys.modules[name] = None
        for name in {[*modules, "benchmarks.gpu_check.timing"]!r}: __import__(name)"""
    subprocess.run([sys.executable, "-c", program], cwd=repository, check=True)


def test_the_timing_of_a_load_leaves_torch_out(repository: Path) -> None:
    program = "import sys, benchmarks.gpu_check.timing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=repository, check=True)


def test_a_machine_without_a_device_says_what_did_not_run(repository: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", __file__]
    result = subprocess.run(command, cwd=repository, env=os.environ | {"PATH": ""}, capture_output=True, text=True)
    assert "1 tests: Skipped: needs a CUDA device, and this machine has none" in result.stdout, (
        result.stdout + result.stderr
    )


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # seven exports come first
def test_this_machines_device(repository: Path, tmp_path: Path) -> None:
    """All of the check but for the models of its bundle that take long, for the device that is here."""
    from benchmarks.gpu_check.bundle import make_bundle
    from benchmarks.gpu_check.models import MODELS

    # In another process, since this one may have the fake driver.
    program = """if True:
        from flare.core.architectures import ABILITIES
        from flare.replay.cuda_driver import open_device
        print(open_device(ABILITIES).architecture)"""
    found = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True)
    architecture = found.stdout.strip()
    make_bundle(tmp_path / "bundle", [architecture], [model for model in MODELS if model.kind != "long"], pythons=())
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--bundle",
        tmp_path / "bundle",
        "--out",
        tmp_path / "out.json",
    ]
    result = subprocess.run([str(word) for word in command], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
