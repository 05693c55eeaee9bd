"""Exports: the same bytes every time, no half core ever, and one line for whatever cannot be exported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flare.core.directory import open_core
from flare.core.manifest import Logprobs
from flare.core.manifest_checks import MAX_ID
from flare.errors import InputError
from flare.replay.program import runnable_isas
from ignition.checkpoint import open_checkpoint
from ignition.export import configure, export_core
from ignition.options import ISAS, Options
from recipes.sampling import AUTHORS
from tests.support.checkpoints import make_checkpoint
from tests.test_pack import leftovers

BEST = runnable_isas(ISAS)[0]
FAST = Options(isas=(BEST,), slots=2, max_step_tokens=16)
pytestmark = pytest.mark.usefixtures("kept_compiles")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama_tied")


def ignition(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ignition.cli", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )


def content(core: Path) -> dict[str, bytes]:
    return {str(path.relative_to(core)): path.read_bytes() for path in sorted(core.rglob("*")) if path.is_file()}


def test_two_exports_are_equal_byte_for_byte(checkpoint: Path, tmp_path: Path) -> None:
    export_core(str(checkpoint), tmp_path / "one", FAST)
    again = ignition(
        "export", str(checkpoint), "-o", str(tmp_path / "elsewhere" / "two"),
        "--isa", BEST, "--slots", "2", "--max-step-tokens", "16", OMP_NUM_THREADS="1", PYTHONHASHSEED="7",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert content(tmp_path / "one") == content(tmp_path / "elsewhere" / "two")
    assert not leftovers(tmp_path, "one")


@pytest.mark.parametrize(
    ("slots", "step_tokens", "plain", "scoring"), [(2, 16, 2, 16), (32, 512, 32, 96), (80, 99, 80, 99), (1, 1, 1, 1)]
)
def test_a_core_that_scores_prompts_has_rows_for_their_tokens(
    slots: int, step_tokens: int, plain: int, scoring: int
) -> None:
    options = Options(slots=slots, max_step_tokens=step_tokens)
    assert options.max_rows == plain and replace(options, prompt_logprobs=True).max_rows == scoring


def test_an_export_with_prompt_logprobs_says_so_and_is_as_reproducible(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kernels are those of the test above, which compiles them twice."""
    from ignition.cli import app

    options = replace(FAST, prompt_logprobs=True)
    report = export_core(str(checkpoint), tmp_path / "one", options)
    with pytest.raises(SystemExit) as ended:
        app([
            "export", str(checkpoint), "-o", str(tmp_path / "two"), "--prompt-logprobs",
            "--isa", BEST, "--slots", "2", "--max-step-tokens", "16",
        ])  # fmt: skip
    said = capsys.readouterr().out
    assert ended.value.code in (None, 0)
    assert "\nlogprobs  up to 20 alternatives, or 128 given ids; prompts are scored\n" in said
    assert report.text().splitlines()[1:4] == said.splitlines()[1:4]
    assert content(tmp_path / "one") == content(tmp_path / "two")
    manifest = open_core(tmp_path / "one").manifest
    assert manifest.logprobs == Logprobs(alternatives=20, explicit_ids=128, prompt=True)
    assert manifest.limits.max_rows == 16 and manifest.cpu.segments.io_bytes >= 16 * manifest.model.vocabulary * 4


def test_a_new_export_replaces_a_core_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    core = tmp_path / "core"
    export_core(str(checkpoint), core, FAST)
    first = open_core(core).manifest_sha256
    export_core(str(checkpoint), core, Options(isas=(BEST,), slots=3, max_step_tokens=16))
    assert open_core(core).manifest.limits.slots == 3 and open_core(core).manifest_sha256 != first
    assert leftovers(tmp_path) == []
    other = tmp_path / "notes"
    other.mkdir()
    (other / "precious").write_text("x")
    with pytest.raises(InputError, match="exists and is not a core"):
        export_core(str(checkpoint), other, FAST)
    assert (other / "precious").read_text() == "x"


def test_kill_leaves_no_core_and_the_next_export_cleans_up(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ignition.cli",
        "export",
        str(checkpoint),
        "-o",
        str(tmp_path / "core"),
        "--isa",
        BEST,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parent.parent)
    assert process.stderr is not None
    for line in process.stderr:
        if "pack" in line:  # everything but the proof is on disk
            os.kill(process.pid, signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    assert not (tmp_path / "core").exists() and leftovers(tmp_path)
    export_core(str(checkpoint), tmp_path / "core", FAST)
    open_core(tmp_path / "core", verify=True)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="the disk is full") as caught:
        export_core(str(checkpoint), tmp_path / "core", FAST)
    assert str(tmp_path / "core") in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("damage", "arguments", "environment", "named"),
    [
        (None, (), {"CXX": "no-such-compiler"}, "no-such-compiler"),
        (None, ("--isa", "avx9"), {}, "--isa"),
        (None, ("--weights", "q3"), {}, "--weights"),
        (None, ("--target", "tpu"), {}, "--target"),
        (None, ("--slots", "0"), {}, "--slots"),
        (None, ("--page-tokens", "20"), {}, "--page-tokens"),
        (None, ("--max-context", "100000"), {}, "--max-context"),
        (None, ("--sampling-ranges", "author"), {}, "--sampling-ranges"),
        (None, ("--checkpoint", "elsewhere"), {}, "--checkpoint"),
        (lambda f: change_config(f, hidden_act="gelu"), (), {}, "hidden_act"),
        (lambda f: change_config(f, model_type="mamba"), (), {}, "model_type"),
        (lambda f: change_config(f, vocab_size=500), (), {}, "embed_tokens"),
        (lambda f: (f / "config.json").unlink(), (), {}, "config.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), (), {}, "model.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), (), {}, "model.safetensors"),
        (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), (), {}, "chat_template.jinja"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    checkpoint: Path,
    tmp_path: Path,
    damage: object,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process: the next test has one of its own, and loading torch takes longer than all that is tested here."""
    from ignition import cli

    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    if damage is not None:
        damage(source)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["ignition", "export", str(source), "-o", str(tmp_path / "core"), *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    check_one_line(capfd.readouterr().err, named, tmp_path / "core")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two\nlines", r"'two\nlines': a core's name of 9 characters"),
        ("", "'': a core's name of 0 characters"),
        ("x" * 600, "'" + "x" * 199 + "…: a core's name of 600 characters"),
    ],
    ids=["lines", "empty", "long"],
)
def test_a_name_that_no_core_can_have_is_refused_before_anything_is_made(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    named = replace(open_checkpoint(str(checkpoint)), name=name)
    monkeypatch.setattr("ignition.export.open_checkpoint", lambda source: named)
    with pytest.raises(InputError) as caught:
        export_core(str(checkpoint), tmp_path / "core", FAST)
    assert str(caught.value) == f"{said}, wanted 1 to 512 printable characters; rename the checkpoint"
    assert not (tmp_path / "core").exists()


def test_a_name_of_the_greatest_length_is_one_that_cores_have(checkpoint: Path) -> None:
    named = replace(open_checkpoint(str(checkpoint)), name="x" * MAX_ID)
    assert configure(named, None, FAST).name == "x" * MAX_ID


def test_a_process_says_one_line_too(checkpoint: Path, tmp_path: Path) -> None:
    """Nor do torch, transformers and Python itself say anything on the way to the last stage that reads the checkpoint."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (source / "chat_template.jinja").write_text("{% for %}")
    result = ignition("export", str(source), "-o", str(tmp_path / "core"))
    assert result.returncode == 2, result.stderr
    check_one_line(result.stderr, "chat_template.jinja", tmp_path / "core")


def check_one_line(said: str, named: str, core: Path) -> None:
    """But for the stages, what an export says on its stderr is one line that names what is wrong; there is no core."""
    lines = [line for line in said.splitlines() if not line.startswith("[")]
    assert len(lines) == 1 and lines[0].startswith("ignition: ") and named in lines[0], said
    assert not core.exists()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(checkpoint: Path) -> None:
    from dataclasses import replace

    from ignition.checkpoint import open_checkpoint
    from ignition.text_facts import gather_text_facts

    opened = open_checkpoint(checkpoint)
    gather_text_facts(opened, 384, None)
    content = json.loads(opened.tokenizer_json)
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 384, "content": "<|more|>"})
    with pytest.raises(
        InputError, match=r"tokenizer.json: its highest id is 384, the model has 384 tokens \(0 to 383\)"
    ):
        gather_text_facts(replace(opened, tokenizer_json=json.dumps(content).encode()), 384, None)


def test_q4_keeps_the_output_layer_of_an_untied_model_at_q8(tmp_path: Path) -> None:
    from ignition.export import capture_step, choose_weights, configure, open_source

    options = Options(weights="q4")
    opened, found = open_source(str(make_checkpoint(tmp_path / "untied", "llama")), None)
    configured = configure(opened, found, options)
    storage, _ = choose_weights(configured, capture_step(configured), options)
    formats = {name: stored.format for name, stored in storage.items()}
    assert formats["lm_head.weight"] == formats["model.embed_tokens.weight"] == "q8"
    assert formats["model.layers.0.mlp.up_proj.weight"] == "q4"


def test_a_recipe_s_author_settings_reach_the_core(checkpoint: Path) -> None:
    from ignition.export import configure, open_source, probe_text

    configured = configure(*open_source(str(checkpoint), None), FAST)
    assert probe_text(configured, FAST).sampling.ranges == "open"
    configured.recipe = replace(configured.recipe, sampling=AUTHORS["qwen38"])
    found = probe_text(configured, FAST).sampling
    assert (found.defaults["top_k"], found.sources["top_k"]) == (20, "recipe")
    assert found.ranges["temperature"] == [0.7, 1.0] and found.ranges["top_k"] is None
    opened = probe_text(configured, replace(FAST, sampling_ranges="open")).sampling
    assert opened.defaults == found.defaults and opened.ranges == "open"


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ignition import cli, export

    def interrupted(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "export_core", interrupted)
    monkeypatch.setattr(sys, "argv", ["ignition", "export", "smollm2", "-o", "core"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capsys.readouterr() == ("", "ignition: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing command; see `ignition --help`"),
        (["--nope"], "No such option: --nope; see `ignition --help`"),
        (["exprt", "x"], "'exprt' is no command; is export meant?; there are export, inspect, validate; see `ignition"),
        (["serve", "x"], "serve is a command of the server: `flare serve`; see `ignition --help`"),
        (["export", "smollm2"], "Missing option '-o' / '--output'; see `ignition export --help`"),
        (["export", "smollm2", "-o"], "requires an argument; see `ignition export --help`"),
        (["export", "smollm2", "-o", "x", "--wieghts", "q8"], "--weights"),
        (["export", "smollm2", "-o", "x", "--slots", "many"], "'--slots'"),
        (["inspect", "a", "b"], "(b); see `ignition inspect --help`"),
        (["validate", "no/core"], "no/core: no such core directory"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], says: str) -> None:
    result = ignition(*arguments)
    assert (result.returncode, result.stdout) == (2, "") and says in result.stderr
    assert result.stderr.startswith("ignition: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("absent", [("torch",), ("torch", "transformers", "huggingface_hub"), ("transformers",)])
def test_an_export_without_its_packages_says_what_to_install(absent: tuple[str, ...], tmp_path: Path) -> None:
    """As in a base install: None among the modules makes Python find nothing."""
    code = f"import sys; sys.modules |= dict.fromkeys({absent!r}); from ignition.cli import main; main()"
    command = [sys.executable, "-c", code, "export", "smollm2", "-o", str(tmp_path / "core")]
    repository = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"ignition: an export needs {', '.join(absent)}, which this Python (")
    assert "pip install 'flare-ignition[export]'" in result.stderr and not (tmp_path / "core").exists()


def test_a_torch_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open\\nshared object file')")
    result = ignition("export", "smollm2", "-o", str(tmp_path / "core"), PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr == (
        "ignition: torch cannot be imported (libtorch.so: cannot open shared object file); install it anew\n"
    )


@pytest.mark.parametrize("source", ["no-such-recipe", "dense"])
def test_a_source_that_is_nothing(source: str, tmp_path: Path) -> None:
    result = ignition("export", source, "-o", str(tmp_path / "core"))
    assert result.returncode == 2 and len(result.stderr.splitlines()) <= 2 and source in result.stderr
