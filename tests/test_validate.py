"""`ignition validate` and `inspect`: what a CI job sees of good and bad cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from flare.config import RuntimeSettings
from flare.core.directory import open_core
from flare.core.manifest import MANIFEST_FILE
from flare.loading import served_model
from ignition.inspect import describe, render
from ignition.validate import validate_core
from tests.support.cuda_graphs import add_cuda_target, file_of
from tests.support.forged_cores import changed, forge, forge_manifest, forge_weights, graph, without_levels
from tests.support.forged_targets import add_host

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def core(tiny_core: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_core, tmp_path / "core"))


def longer(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt with its results repeated until it is longer than the tiny core's context."""
    for found in (prompt["reference"], *prompt["compiled"].values()):
        found.update({name: rows * 100 for name, rows in found.items()})
    return prompt | {"tokens": prompt["tokens"] * 100}


def statuses(core: Path) -> dict[str, str]:
    return {check.name: check.status for check in validate_core(core).checks}


def test_a_good_core_is_accepted(core: Path) -> None:
    result = validate_core(core)
    assert result.exit_code == 0 and {c.status for c in result.checks} == {"passed"}, result.text()
    assert "equal to the bit" in result.text() and result.text().endswith("accepted")
    assert json.loads(result.json())["accepted"] is True


def test_numerics_leave_the_text_out(core: Path) -> None:
    result = validate_core(core, numerics=True)
    assert [check.name for check in result.checks] == ["structure", "weights", "libraries", "graphs", "oracle"]
    assert result.exit_code == 0 and "equal to the bit" in result.text()


def test_the_command_reports_to_ci_and_needs_no_torch(core: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    for name in ("torch", "transformers", "triton"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('{name} must not be imported')")
    environment = os.environ | {"PYTHONPATH": f"{blocked}{os.pathsep}{ROOT}"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ignition.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)

    good = run("validate", str(core), "--json", "--junit", "report.xml")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["accepted"] is True
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("7", "0")
    shown = run("inspect", str(core), "--json")
    assert json.loads(shown.stdout)["model"]["architecture"] == "llama"

    library = sorted((core / "kernels").iterdir())[0]
    library.write_bytes(library.read_bytes()[:-1])
    bad = run("validate", str(core), "--junit", "report.xml")
    assert bad.returncode == 1 and library.name in bad.stdout and "refused" in bad.stdout and not bad.stderr
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert suite.get("failures") == "1" and suite.find("testcase/failure") is not None

    missing = run("validate", str(tmp_path / "nothing"))
    assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "change", "failed"),
    [
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3]["args"][0].update(offset=2**40)), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3]["args"][0].update(offset=-64)), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3]["args"][0].update(offset=8)), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3].update(kernel="Norm<1>")), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3].update(phase=99)), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"][3].update(more=1)), "graphs"),
        ("graphs/step.msgpack", graph(lambda g: g["nodes"].pop(4)), "oracle"),
        ("graphs/step.msgpack", lambda data: b"\xc1" + data, "graphs"),
        ("tokenizer.json", lambda data: data[:-20], "tokenizer"),
        ("chat_template.jinja", lambda data: b"{% if %}", "template"),
        ("chat_template.jinja", lambda data: data.replace(b"assistant", b"Assistant"), "template"),
        ("chat_template.jinja", lambda data: b"\xff" + data, "template"),
        ("oracle.msgpack", lambda data: data[:-5], "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"].clear()), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0].update(tokens=[])), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0].update(prompt_tokens=999)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["tokens"].__setitem__(0, 384)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["tokens"].__setitem__(0, -1)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ids"].__setitem__(1, [])), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ids"][1].__setitem__(2, 384)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ids"][1].pop()), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ids"].pop()), "oracle"),
        (
            "oracle.msgpack",
            graph(lambda o: [c["hashes"].pop() for c in o["prompts"][0]["compiled"].values()]),
            "oracle",
        ),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["compiled"].popitem()), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["compiled"].clear()), "oracle"),
        (
            "oracle.msgpack",
            graph(lambda o: o["prompts"][0]["compiled"].update(more=o["prompts"][0]["reference"])),
            "oracle",
        ),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["scores"].pop()), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ranks"].pop()), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ranks"].__setitem__(0, 0)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ranks"].__setitem__(0, 385)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["ranks"].__setitem__(-1, 2)), "oracle"),
        ("oracle.msgpack", graph(lambda o: o["prompts"][0]["reference"]["scores"].__setitem__(0, 0.5)), "oracle"),
        (
            "oracle.msgpack",
            graph(lambda o: o["prompts"][0]["reference"]["scores"].__setitem__(0, float("nan"))),
            "oracle",
        ),
        (
            "oracle.msgpack",
            graph(lambda o: o["prompts"][0]["reference"]["logprobs"][0].__setitem__(0, float("-inf"))),
            "oracle",
        ),
        ("oracle.msgpack", graph(lambda o: o["prompts"].__setitem__(0, longer(o["prompts"][0]))), "oracle"),
    ],
)
def test_files_that_lie_behind_right_hashes(core: Path, name: str, change: Any, failed: str) -> None:
    forge(core, name, change)
    found = {check.name: check for check in validate_core(core).checks}
    assert found[failed].status == "failed", found
    assert "ended with" not in found[failed].detail, "refused by rule, not by accident"


def next_down(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("compiled", "scores", next_down), "positions are scored differently"),
        (changed("compiled", "logprobs", lambda row: [*map(next_down, row)]), "positions are scored differently"),
        (
            changed("compiled", "ids", lambda row: [row[0], row[2], row[1], *row[3:]]),
            "positions are scored differently",
        ),
        (changed("compiled", "hashes", lambda text: text[::-1]), "positions differ in their bits"),
        (changed("reference", "scores", lambda score: score - 0.002), "out of tolerance: position "),
        (
            changed("reference", "logprobs", lambda row: [row[0], *(value - 0.002 for value in row[1:])]),
            "out of tolerance: ",
        ),
    ],
)
def test_answers_that_are_not_the_stored_ones(core: Path, change: Any, says: str) -> None:
    forge(core, "oracle.msgpack", change)
    (check,) = (check for check in validate_core(core).checks if check.name == "oracle")
    assert check.status == "failed" and says in check.detail, check


def test_a_level_that_the_export_did_not_run_is_held_to_the_reference(core: Path) -> None:
    without_levels(core)
    result = validate_core(core)
    assert result.exit_code == 0 and "within tolerance (not run at export)" in result.text()
    forge(core, "oracle.msgpack", changed("reference", "scores", lambda score: score - 0.002))
    (check,) = (check for check in validate_core(core).checks if check.name == "oracle")
    assert check.status == "failed" and "is out of tolerance" not in check.detail and "out of tolerance" in check.detail


def test_one_bit_of_one_weight(core: Path) -> None:
    """The lowest bit of an output layer's element changes nothing that anybody would see, and is found."""

    def flip(data: bytearray) -> None:
        start = 8 + int.from_bytes(data[:8], "little")
        first, _ = json.loads(data[8:start])["lm_head.weight"]["data_offsets"]
        data[start + first] ^= 1

    forge_weights(core, flip)
    (check,) = (check for check in validate_core(core).checks if check.name == "oracle")
    assert check.status == "failed" and "positions differ in their bits" in check.detail


def test_whatever_else_a_core_makes_happen_is_a_failed_check(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As native libraries raise it."""

    def panic(core: object) -> str:
        raise PanicError("many\nlines of secrets")

    monkeypatch.setattr("ignition.validate.check_template", panic)
    result = validate_core(core)
    (check,) = (check for check in result.checks if check.name == "template")
    assert (check.status, check.detail) == ("failed", "the check ended with PanicError; export the core again")
    assert result.exit_code == 1


@pytest.mark.parametrize("info", [b"not json", b"[]", b"{}", b'{"isa": "generic"}'])
def test_a_library_that_does_not_describe_itself(core: Path, monkeypatch: pytest.MonkeyPatch, info: bytes) -> None:
    from types import SimpleNamespace

    from flare.replay import program

    libraries = SimpleNamespace(flare_library_info=lambda: info)
    monkeypatch.setattr(program, "load_library", lambda file: libraries)
    found = {check.name: check for check in validate_core(core).checks}
    assert found["libraries"].status == "failed" and "export the core again" in found["libraries"].detail
    assert "ended with" not in found["libraries"].detail


def test_a_tokenizer_with_a_gap_is_held_to_its_highest_id(core: Path) -> None:
    def move(data: bytes) -> bytes:
        content = json.loads(data)
        content["added_tokens"].append(content["added_tokens"][0] | {"id": 9999, "content": "<|far|>"})
        return json.dumps(content).encode()

    forge(core, "tokenizer.json", move)
    (check,) = (check for check in validate_core(core).checks if check.name == "tokenizer")
    assert check.status == "failed" and "highest id" in check.detail


def test_a_library_of_another_level(core: Path) -> None:
    manifest = json.loads((core / "core.json").read_bytes())
    files = [library["file"] for library in manifest["targets"][0]["libraries"]]
    if len(files) < 2:
        pytest.fail("the tiny core was meant to have several libraries")
    forge(core, files[0], lambda _: (core / files[1]).read_bytes())
    assert statuses(core)["libraries"] == "failed"


def test_weights_whose_values_changed_are_caught_by_hash_and_by_the_oracle(core: Path) -> None:
    from flare.core.checksums import sha256_chunked

    weights = core / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    for index in range(len(data) - 40_000, len(data) - 39_000):
        data[index] ^= 0x40
    weights.write_bytes(data)
    assert statuses(core)["weights"] == "failed"
    forge_manifest(core, lambda m: m["files"]["weights.safetensors"].update(hash=sha256_chunked(weights)))
    found = statuses(core)
    assert found["weights"] == "passed" and found["oracle"] == "failed"


def test_a_cuda_target_has_a_row_for_each_architecture(core: Path, cubins: Path) -> None:
    """A node that would write outside its segment is found without a device, behind checksums that are right."""
    add_cuda_target(core, cubins, "sm_80", "sm_90a")
    found = statuses(core)
    assert list(found) == [
        "structure", "weights", "libraries", "graphs", "cuda sm_80", "cuda sm_90a", "tokenizer", "template", "oracle",
    ]  # fmt: skip
    assert set(found.values()) == {"passed"}
    result = validate_core(core, numerics=True)
    details = {check.name: check.detail for check in result.checks}
    assert "equal to the bit" in details["oracle"] and details["oracle"].endswith(
        "; not replayed: the cuda target needs a device: `flare serve CORE --no-cpu-fallback --check` replays it there"
    )
    assert result.text().endswith(": accepted")
    assert details["cuda sm_90a"] == "2 kernels of 2 cubins, 21 nodes in 5 buckets"
    assert details["weights"].count(" tensors, ") == 2

    def change(graphs: dict[str, Any]) -> None:
        graphs["step"][1]["nodes"][6]["args"][1]["offset"] = 2**40

    forge(core, file_of("sm_90a"), graph(change))
    found = statuses(core)
    assert found.pop("cuda sm_90a") == "failed" and set(found.values()) == {"passed"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["sampling"]["defaults"].update(top_k=-5), "sampling.defaults.top_k is '-5', wanted -1 to 2147483647"),
        (lambda m: m["sampling"].update(ranges={"top_p": [1]}), "sampling.ranges.top_p is '[1]', wanted [least, most] or null"),
        (lambda m: m["template"]["facts"]["special_tokens"].update(x=1), "template.facts.special_tokens is "),
    ],
)  # fmt: skip
def test_tables_that_no_server_would_take(core: Path, change: Any, field: str) -> None:
    """What a start refuses, `validate` refuses before."""
    forge_manifest(core, change)
    found = validate_core(core).checks
    assert found[0].status == "failed" and found[0].detail.startswith(f"core.json: {field}")
    assert {check.status for check in found[1:]} == {"not_run"}


def test_a_core_for_cuda_alone(core: Path, cubins: Path, tmp_path: Path) -> None:
    """What needs the cpu target is left out; the oracle is read, and its replay is a check that was not run."""
    add_cuda_target(core, cubins, "sm_100a", "sm_90a")
    without_levels(core)

    def change(manifest: dict[str, Any]) -> None:
        for library in manifest["targets"][0]["libraries"]:
            del manifest["files"][library["file"]]
        del manifest["targets"][0], manifest["files"]["weights.safetensors"], manifest["files"]["graphs/step.msgpack"]
        manifest["oracle"].update(mean_kl=None, max_logprob_error=None, top1_agreement=None)

    forge_manifest(core, change)
    names = ["structure", "weights", "cuda sm_90a", "cuda sm_100a", "tokenizer", "template", "oracle"]
    result = validate_core(core)
    assert [check.name for check in result.checks] == names
    assert [check.status for check in result.checks] == ["passed"] * (len(names) - 1) + ["not_run"]
    assert result.checks[-1].detail.endswith(
        " prompts are read and not replayed; the cuda target needs a device: `flare serve CORE --no-cpu-fallback --check` "
        "replays it there"
    )
    assert result.exit_code == 0 and result.text().endswith(": accepted, not run: oracle")
    result.write_junit(tmp_path / "report.xml")
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert suite.find("testcase[@name='oracle']/skipped") is not None
    text = render(describe(core))
    assert "cuda: sm_90a, sm_100a; computes in f16\n" in text and "the reference's answers; no compiled results" in text
    assert "cpu" not in text.replace(str(core), "")

    forge(core, "oracle.msgpack", lambda data: data[:-5])
    assert statuses(core)["oracle"] == "failed"
    (core / file_of("sm_90a")).unlink()  # a core that does not open has the checks of its targets, too
    result = validate_core(core)
    assert [check.name for check in result.checks] == names and result.exit_code == 1
    assert [check.status for check in result.checks] == ["failed"] + ["not_run"] * (len(names) - 1)
    (core / MANIFEST_FILE).write_bytes(b"{}")
    assert list(statuses(core)) == ["structure", "weights", "tokenizer", "template", "oracle"]
    (core / MANIFEST_FILE).unlink()
    assert list(statuses(core)) == ["structure", "weights", "tokenizer", "template", "oracle"]


def test_inspect_shows_every_target(core: Path, cubins: Path) -> None:
    add_cuda_target(core, cubins, "sm_90a")
    add_host(core)
    forge_manifest(core, lambda m: m["targets"][1]["host"]["program"]["segments"].update(kv_page_bytes=4096))
    facts = describe(core)
    cpu, cuda = facts["targets"]
    assert cpu["kind"] == "cpu" and cpu["graphs"]["step"]["nodes"] > 10
    assert cuda["kv"] == {"format": "f16", "bytes_per_token": 512, "bytes_for_full_context": 16 * 8192}
    assert cuda["host"]["kv"] == {"format": "f32", "bytes_per_token": 256, "bytes_for_full_context": 16 * 4096}
    found = cuda["architectures"]["sm_90a"]
    assert found["kernels"] == {"cuda_kernels.dot": 1, "cuda_kernels.scale": 1} and found["cubins"] == 2
    assert found["cubin_bytes"] == sum(path.stat().st_size for path in (core / "kernels" / "sm_90a").iterdir())
    limits = facts["limits"]
    assert found["step"][1] == {"tokens": limits["max_step_tokens"], "rows": limits["max_rows"], "nodes": 7}
    text = render(facts)
    for wanted in (
        "cpu: x86-64-v4, x86-64-v3, generic\n",
        "cuda: sm_90a; computes in f16\n",
        "1 cuda_kernels.dot, 1 cuda_kernels.scale\n",
        f"step for 1, {limits['max_step_tokens']} tokens, of 7 nodes at most\n",
        f"sample for 1, {limits['max_rows']} rows, of 3 nodes at most\n",
        "the processor runs 2 silu_mul: x86-64-v4, x86-64-v3, generic\n",
    ):
        assert wanted in text
    lines = [line.strip() for line in text.splitlines()]
    assert "kv: f32, pages of 16 tokens, 256 B a token, 65.5 kB for a full context" in lines
    weights = next(line.split(None, 1)[1] for line in lines if line.startswith("weights "))  # those of the cpu target
    assert weights.startswith("f32 ") and f"weights: {weights}" in lines


def test_inspect_says_what_people_ask_for(core: Path) -> None:
    facts = describe(core)
    text = render(facts)
    for wanted in (
        "llama",
        "context",
        "256 tokens",
        "f32",
        "chat, completions, messages, responses, decisions, systemone, logprobs\n",
        "up to 20 alternatives, or 128 given ids; prompts are not scored (export with --prompt-logprobs)\n",
        "x86-64-v3",
        "thinking levels: none",
    ):
        assert wanted in text
    assert facts["bytes"] == sum(path.stat().st_size for path in core.rglob("*") if path.is_file()) - sum(
        (core / name).stat().st_size for name in ("core.json", "core.sha256")
    )


@pytest.mark.parametrize(
    ("alternatives", "ids", "prompt", "text"),
    [
        (0, 0, False, "none"),
        (7, 0, True, "up to 7 alternatives, or 0 given ids; prompts are scored"),
    ],
)
def test_inspect_and_the_server_agree_on_log_probabilities(
    core: Path, alternatives: int, ids: int, prompt: bool, text: str
) -> None:
    logprobs = {"alternatives": alternatives, "explicit_ids": ids, "prompt": prompt}
    forge_manifest(core, lambda m: m.update(logprobs=logprobs))
    facts = describe(core)
    assert facts["logprobs"] == logprobs and text in render(facts)
    assert (facts["apis"]["logprobs"], facts["apis"]["prompt_logprobs"]) == (alternatives > 0, prompt)
    model = served_model(
        open_core(core), RuntimeSettings(core=str(core), threads=1), kv_pages=4, decode_weight_bytes=77
    )
    assert (model.max_top_logprobs, model.explicit_ids, model.scores_prompts) == (alternatives, ids, prompt)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("syntax", ["hermes", None])
@pytest.mark.parametrize("template", [True, False])
def test_inspect_names_the_apis_that_the_server_serves(
    core: Path, declared: bool, syntax: str | None, template: bool
) -> None:
    """The server's own word on it is what refuses requests."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["template"]["facts"]["output"] = {"tools": syntax}
        manifest["template"]["facts"]["tools"]["declared"] = declared
        if not template:
            del manifest["files"][manifest["template"]["file"]]
            manifest["template"]["file"] = None

    forge_manifest(core, change)
    apis = describe(core)["apis"]
    model = served_model(
        open_core(core), RuntimeSettings(core=str(core), threads=1), kv_pages=4, decode_weight_bytes=77
    )
    assert apis["chat"] == apis["messages"] == apis["responses"] == model.has_template == template
    assert apis["decisions"] == apis["systemone"] == (template and model.explicit_ids > 0)
    assert apis["tools"] == (model.has_template and model.takes_tools) and apis["completions"]
